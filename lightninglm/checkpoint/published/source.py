"""
The files of a published checkpoint: which tensors they hold, read one at a time, never unpickled.

A source is a safetensors file, a folder of safetensors shards with their index, a plain tensor file (`torch.save` of a
state dict, bare or under "state_dict" or "module"), or a folder with one such file for each expert-parallel rank.
"""

import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError

SAFETENSORS = ".safetensors"
TENSOR_FILES = (".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "module")
MAPPED_BYTES = 2**30  # read from a file before its pages are given back


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of one file: its key, shape and dtype (None: one that cannot be read here, `found` names it)."""

    file: "SafetensorsFile | TensorFile"
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    found: str

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * (self.dtype or torch.uint8).itemsize

    def read(self) -> torch.Tensor:
        """The tensor, mapped from the file."""
        return self.file.read(self.key)


class _MappedFile:
    """
    A file of tensors, mapped into memory. It is opened anew now and then, so that the pages read can go.

    Attributes:
        tensors: what it holds, by key.
        ignored: entries that are not tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.ignored: list[str] = []
        self._mapped: Any = None
        self._read_bytes = 0

    def read(self, key: str) -> torch.Tensor:
        """A tensor, mapped from the file."""
        if self._mapped is None or self._read_bytes > MAPPED_BYTES:
            self._mapped, self._read_bytes = None, 0
            self._mapped = self._open()
        self._read_bytes += self.tensors[key].nbytes
        return self._get(key)


class SafetensorsFile(_MappedFile):
    """One safetensors file."""

    def __init__(self, path: Path):
        super().__init__(path)
        head, _ = layout.decode_head(path)
        self.tensors = {
            key: StoredTensor(self, key, tuple(entry["shape"]), layout.DTYPES.get(entry["dtype"]), entry["dtype"])
            for key, entry in head.items()
        }

    def _open(self) -> safe_open:
        return safe_open(self.path, framework="pt")

    def _get(self, key: str) -> torch.Tensor:
        return self._mapped.get_tensor(key)


class TensorFile(_MappedFile):
    """One file of `torch.save` that holds a state dict. Entries that are not tensors are ignored."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._mapped = self._open()
        for key, value in self._mapped.items():
            if isinstance(value, torch.Tensor):
                self.tensors[key] = self._stored(key, value)
            else:
                self.ignored.append(key)

    def _get(self, key: str) -> torch.Tensor:
        return self._mapped[key].detach()

    def _stored(self, key: str, tensor: torch.Tensor) -> StoredTensor:
        readable = tensor.layout == torch.strided and tensor.dtype in layout.DTYPE_NAMES
        found = layout.DTYPE_NAMES[tensor.dtype] if readable else f"{tensor.dtype} {tensor.layout}"
        return StoredTensor(self, key, tuple(tensor.shape), tensor.dtype if readable else None, found)

    def _open(self) -> Mapping[str, Any]:
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            kind = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{self.path}: holds more than tensors{f' ({kind[1]})' if kind else ''} and is not unpickled, which "
                "could run code. Save the state dict by itself, as safetensors or with torch.save"
            ) from error
        except (RuntimeError, EOFError) as error:
            raise CheckpointError(
                f"{self.path}: damaged, or not in the zip format of torch.save, which can be mapped "
                f"({str(error).splitlines()[0]})"
            ) from error
        for wrapper in WRAPPERS:
            if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
                state = state[wrapper]
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            raise CheckpointError(f"{self.path}: holds {type(state).__name__}, not a state dict")
        return state


class PublishedSource:
    """
    A published checkpoint, opened for reading.

    Args:
        path: a file or folder, see above.
    Attributes:
        files: in the order of the ranks.
        ranks: number of expert-parallel ranks that have a file of their own, else 1.
        tensors: key -> the tensor in each file that holds it, in the order of `files`.
        ignored: entries that are not tensors.
    Raises CheckpointError when nothing can be read there, naming the file and what is wrong with it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.is_dir():
            self.files, self.ranks = _open_folder(self.path)
        elif self.path.is_file():
            self.files, self.ranks = [_open_file(self.path)], 1
        else:
            raise CheckpointError(f"{self.path}: no such file or folder")
        self.tensors: dict[str, list[StoredTensor]] = {}
        for file in self.files:
            for key, stored in file.tensors.items():
                self.tensors.setdefault(key, []).append(stored)
        self.ignored = sorted({name for file in self.files for name in file.ignored})
        if not self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensors")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape in the first file that holds it."""
        return {key: stored[0].shape for key, stored in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.nbytes for parts in self.tensors.values() for stored in parts)


def _open_file(path: Path) -> SafetensorsFile | TensorFile:
    if path.suffix in (SAFETENSORS, *TENSOR_FILES):
        try:
            return SafetensorsFile(path) if path.suffix == SAFETENSORS else TensorFile(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    raise CheckpointError(f"{path}: must end with one of {', '.join((SAFETENSORS, *TENSOR_FILES))}")


def _open_folder(folder: Path) -> tuple[list[SafetensorsFile | TensorFile], int]:
    """The files of a folder, and the number of ranks that wrote them."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    paths = sorted(path for path in folder.iterdir() if path.suffix in (SAFETENSORS, *TENSOR_FILES))
    if len(indexes) > 1:
        raise CheckpointError(f"{folder}: several indexes ({', '.join(path.name for path in indexes)}); keep one")
    if indexes:
        return _open_shards(folder, indexes[0]), 1
    if not paths:
        raise CheckpointError(f"{folder}: holds no file that ends with {', '.join((SAFETENSORS, *TENSOR_FILES))}")
    if len(paths) > 1:
        paths = _in_order_of_ranks(folder, paths)
    return [_open_file(path) for path in paths], len(paths)


def _open_shards(folder: Path, index: Path) -> list[SafetensorsFile | TensorFile]:
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors shards ({error!r})") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{index}: names files that are not there: {', '.join(missing)}")
    files = [_open_file(folder / name) for name in names]
    held = {(key, file.path.name) for file in files for key in file.tensors}
    differing = sorted(key for key, _ in held ^ set(places.items()))
    if differing:
        raise CheckpointError(f"{index}: the shards do not hold what it says: {', '.join(dict.fromkeys(differing))}")
    return files


def _in_order_of_ranks(folder: Path, paths: list[Path]) -> list[Path]:
    """Files whose names differ in one number, which counts from 0."""
    pieces = [re.split(r"(\d+)", path.name) for path in paths]
    if len({len(split) for split in pieces}) == 1:
        varying = [i for i in range(len(pieces[0])) if len({split[i] for split in pieces}) > 1]
        if len(varying) == 1 and varying[0] % 2 == 1:
            ranked = {int(split[varying[0]]): path for split, path in zip(pieces, paths, strict=True)}
            if sorted(ranked) == list(range(len(paths))):
                return [ranked[rank] for rank in range(len(paths))]
    raise CheckpointError(
        f"{folder}: {len(paths)} tensor files without an index ({', '.join(path.name for path in paths)}). The files "
        "of expert-parallel ranks must differ in the rank alone, counted from 0 without a gap; shards need their "
        "model.safetensors.index.json; for a single checkpoint give the path of its file"
    )
