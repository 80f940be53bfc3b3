"""Shards of a checkpoint: tensors gathered in host memory, hashed, and written to safetensors files."""

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import torch

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import from_os_error

SHARD_BYTES = 256 * 2**20
_CHUNK_BYTES = 4 * 2**20
_ALIGNMENT = 64
_KEY_BYTES = 64


class Shard:
    """
    Tensors on their way into one file, copied into memory that is used again for later shards.

    Fresh memory for every tensor would cost as much time as hashing it, in page faults.
    """

    def __init__(self, capacity: int, pinned: bool):
        self._memory = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)
        self.clear()

    @property
    def capacity(self) -> int:
        """Bytes of its memory."""
        return len(self._memory)

    def clear(self) -> None:
        """Forgets the tensors."""
        self.tensors: dict[str, torch.Tensor] = {}
        self._used = 0

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether there is room for the tensor."""
        return self._start() + tensor.nbytes <= self.capacity

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor that fits."""
        start = self._start()
        self._used = start + tensor.nbytes
        held = self._memory[start : self._used].view(tensor.dtype).view(tensor.shape)
        self.tensors[name] = held.copy_(tensor)

    def _start(self) -> int:
        return -(-self._used // _ALIGNMENT) * _ALIGNMENT


class HostMemory:
    """
    Hands out empty shards; their memory is kept and handed out again.

    Args:
        shard_bytes: capacity of a shard; a tensor larger than that gets one of its own.
        pinned: page-locked memory, into which a GPU copies several times as fast.
    """

    def __init__(self, shard_bytes: int = SHARD_BYTES, pinned: bool = False):
        self.shard_bytes, self.pinned = shard_bytes, pinned
        self._all: list[Shard] = []
        self._free: list[Shard] = []

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(shard.capacity for shard in self._all)

    def take(self, tensor: torch.Tensor) -> Shard:
        """An empty shard with room for the tensor, the smallest that there is."""
        fitting = [shard for shard in self._free if shard.fits(tensor)]
        if fitting:
            shard = min(fitting, key=lambda shard: shard.capacity)
            self._free.remove(shard)
        else:
            shard = Shard(max(self.shard_bytes, tensor.nbytes), self.pinned)
            self._all.append(shard)
        return shard

    def give_back(self, shard: Shard) -> None:
        """Takes a shard back that is on the disk."""
        shard.clear()
        self._free.append(shard)

    def reclaim(self) -> None:
        """Takes all shards back, whatever became of the save that had them."""
        for shard in self._all:
            shard.clear()
        self._free = list(self._all)


def shard_parts(tensors: dict[str, torch.Tensor]) -> list[bytes | memoryview]:
    """The content of a safetensors file: its head, then the tensors, without a copy of them."""
    # wide elements first, so that every tensor starts at a multiple of its element size; else as they came
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    return [layout.encode_head(ordered), *(_raw_bytes(tensor) for _, tensor in ordered)]


def write_parts(path: Path, parts: list[bytes | memoryview]) -> None:
    """
    Writes a new file, past the page cache (O_DIRECT) where the file system can do that.

    Copying into the cache takes the processor longer than hashing.
    """
    try:
        with path.open("xb", buffering=0) as file:
            _set_direct(file, True)
            for chunk in _chunks(parts):
                if len(chunk) < _CHUNK_BYTES:
                    _set_direct(file, False)  # the last chunk may end inside a block
                write_all(file, chunk)
    except OSError as error:
        raise from_os_error(error, path, sum(map(len, parts))) from error


def shard_entry(parts: list[bytes | memoryview]) -> dict:
    """The entry in the manifest of a shard: the hashes of its tensors, which stand there too, cover the rest."""
    return {"bytes": sum(map(len, parts)), "head_sha256": hashlib.sha256(parts[0]).hexdigest()}


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The parts back to back in chunks of _CHUNK_BYTES, the last one shorter, in one page-aligned buffer."""
    buffer, filled = memoryview(mmap.mmap(-1, _CHUNK_BYTES)), 0
    for part in parts:
        view = memoryview(part)
        while view:
            count = min(len(view), _CHUNK_BYTES - filled)
            buffer[filled : filled + count] = view[:count]
            view, filled = view[count:], filled + count
            if filled == _CHUNK_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _set_direct(file: FileIO, direct: bool) -> None:
    """Turns writing past the page cache on or off; without effect on a file system that has no such thing (tmpfs)."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def hash_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes. Those equal to an earlier tensor's, as an expert's clones are, share its hash."""
    hashes: dict[str, str] = {}
    seen: dict[tuple[int, bytes, bytes], torch.Tensor] = {}
    known: dict[tuple[int, bytes, bytes], str] = {}
    for name, tensor in tensors.items():
        raw = _raw_bytes(tensor)
        key = len(raw), bytes(raw[:_KEY_BYTES]), bytes(raw[-_KEY_BYTES:])
        if key not in seen or not _same_bytes(tensor, seen[key]):
            seen[key], known[key] = tensor, hashlib.sha256(raw).hexdigest()
        hashes[name] = known[key]
    return hashes


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of equal size hold the same bytes (ten times as fast to see as to hash)."""
    wide = torch.int64 if a.nbytes % 8 == 0 else torch.uint8
    return torch.equal(a.reshape(-1).view(torch.uint8).view(wide), b.reshape(-1).view(torch.uint8).view(wide))


def write_file(path: Path, content: bytes) -> dict:
    """Writes a small file through to the disk and returns its entry in the manifest."""
    try:
        with path.open("xb", buffering=0) as file:
            write_all(file, memoryview(content))
            os.fsync(file.fileno())
    except OSError as error:
        raise from_os_error(error, path, len(content)) from error
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_all(file: FileIO, content: memoryview) -> None:
    """Writes all of it: one call may write less than it was asked to."""
    while content:
        content = content[file.write(content) :]


def fsync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
