"""Reads a checkpoint: verified when opened, then tensors or parts of them, one at a time."""

import json
import os
from collections.abc import Mapping
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import TracebackType

import torch

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.layout import TensorInfo
from lightninglm.checkpoint.verification import check_files, read_manifest

_SHOWN_FINDINGS = 5


class CheckpointReader:
    """
    A checkpoint folder, opened for reading.

    Args:
        folder: the checkpoint.
        verify: `"fast"`: names, sizes and heads of all files, hashes of the small files and of a sample of tensors.
            `"full"`: every byte is hashed. None: the manifest only, for a folder that was verified before.
    Raises CheckpointError, naming each bad file, what was found and what was expected.
    """

    def __init__(self, folder: str | Path, verify: str | None = "fast"):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        findings = [] if verify is None else check_files(self.folder, self.manifest, verify)
        if findings:
            shown = "\n  ".join(str(finding) for finding in findings[:_SHOWN_FINDINGS])
            more = f"\n  and {len(findings) - _SHOWN_FINDINGS} more" if len(findings) > _SHOWN_FINDINGS else ""
            raise CheckpointError(f"{self.folder}: damaged checkpoint\n  {shown}{more}")
        self._files: dict[str, tuple[FileIO, dict[str, dict], int]] = {}

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files. They are opened again when more is read."""
        for file, _, _ in self._files.values():
            file.close()
        self._files.clear()

    @cached_property
    def config(self) -> dict:
        """Content of config.json."""
        return self._load(layout.CONFIG)

    @cached_property
    def trainer_state(self) -> dict:
        """Content of trainer_state.json."""
        return self._load(layout.TRAINER_STATE)

    @cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        """Weights and buffers of the model by their name on disk."""
        return self._index("model")

    @cached_property
    def optimizer(self) -> Mapping[str, TensorInfo]:
        """Optimizer tensors by name: `<weight's name>.master`, `.exp_avg`, `.exp_avg_sq`."""
        return self._index("optimizer")

    @cached_property
    def published(self) -> Mapping[str, TensorInfo]:
        """What an import kept as it was published, by `published.<published key>`; empty if there is nothing."""
        return self._index("published") if layout.INDEX["published"] in self.manifest["files"] else {}

    def info(self, name: str) -> TensorInfo:
        """What is known of a stored tensor. Raises CheckpointError when there is none of that name."""
        info = self.weights.get(name) or self.optimizer.get(name) or self.published.get(name)
        if info is None:
            raise CheckpointError(f"{self.folder}: holds no tensor {name}")
        return info

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """
        A stored tensor, on the CPU.

        Args:
            rows: (start, stop) along the first dimension; None for the whole tensor.
        """
        info = self.info(name)
        if rows is None:
            tensor, start = torch.empty(info.shape, dtype=info.dtype), 0
        else:
            tensor = torch.empty((rows[1] - rows[0], *info.shape[1:]), dtype=info.dtype)
            start = rows[0] * torch.Size(info.shape[1:]).numel()
        self.read_into(tensor.view(-1), name, start)
        return tensor

    def read_into(self, target: torch.Tensor, name: str, start: int = 0) -> None:
        """
        Fills `target` with elements `start, start + 1, ...` of a stored tensor, flattened.

        Args:
            target: 1-D, of any device and dtype; on the CPU in the stored dtype nothing is copied in between.
        """
        info = self.info(name)
        size = torch.Size(info.shape).numel()
        if not 0 <= start <= start + target.numel() <= size:
            raise CheckpointError(f"{name}: elements {start}..{start + target.numel()} of {size} were asked for")
        if target.device.type != "cpu" or target.dtype != info.dtype or not target.is_contiguous():
            values = torch.empty(target.shape, dtype=info.dtype)
            self.read_into(values, name, start)
            target.copy_(values)
            return
        file, head, data_start = self._open(info.file)
        first, last = head[name]["data_offsets"] if name in head else (0, 0)
        if last - first != size * info.dtype.itemsize:
            raise CheckpointError(f"{self.folder / info.file}: {name} is not stored there as {info.dtype} {info.shape}")
        position = data_start + first + start * info.dtype.itemsize
        view = memoryview(target.detach().view(torch.uint8).numpy())
        os.posix_fadvise(file.fileno(), position, len(view), os.POSIX_FADV_WILLNEED)
        while view:
            count = os.preadv(file.fileno(), [view], position)
            if count == 0:
                raise CheckpointError(f"{self.folder / info.file}: ends inside {name}")
            view, position = view[count:], position + count

    def sha256(self, name: str) -> str:
        """SHA-256 (hex) of the raw bytes of a tensor, as recorded when it was saved."""
        return self.info(name).sha256

    def _open(self, name: str) -> tuple[FileIO, dict[str, dict], int]:
        """A shard's file, head, and position of its data."""
        if name not in self._files:
            path = self.folder / name
            try:
                self._files[name] = (path.open("rb", buffering=0), *layout.decode_head(path))
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        return self._files[name]

    def _index(self, kind: str) -> dict[str, TensorInfo]:
        entries = self.manifest["tensors"]
        return {
            name: TensorInfo(
                dtype=layout.DTYPES[entries[name]["dtype"]],
                shape=tuple(entries[name]["shape"]),
                file=file,
                sha256=entries[name]["sha256"],
            )
            for name, file in self._load(layout.INDEX[kind])["weight_map"].items()
        }

    def _load(self, name: str) -> dict:
        path = self.folder / name
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
