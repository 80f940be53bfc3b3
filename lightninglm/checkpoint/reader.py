"""Reads a checkpoint: verified when opened, tensors mapped from the disk one at a time."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open

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
        self._files: dict[str, safe_open] = {}

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Releases the mapped files."""
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

    def info(self, name: str) -> TensorInfo:
        """What is known of a weight or optimizer tensor. Raises CheckpointError when there is none of that name."""
        info = self.weights.get(name) or self.optimizer.get(name)
        if info is None:
            raise CheckpointError(f"{self.folder}: holds no tensor {name}")
        return info

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """
        A weight or optimizer tensor.

        Args:
            rows: (start, stop) along the first dimension; None for the whole tensor.
        """
        file = self._open(self.info(name).file)
        return file.get_tensor(name) if rows is None else file.get_slice(name)[rows[0] : rows[1]]

    def sha256(self, name: str) -> str:
        """SHA-256 (hex) of the raw bytes of a tensor, as recorded when it was saved."""
        return self.info(name).sha256

    def _open(self, name: str) -> safe_open:
        if name not in self._files:
            self._files[name] = safe_open(self.folder / name, framework="pt")
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
