"""Writes a checkpoint tensor by tensor: bounded memory, hashes computed beside the writing, committed in one rename."""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError, free_bytes, from_os_error
from lightninglm.checkpoint.model_code import AUTO_MAP, MODEL_TYPE, model_code

SHARD_BYTES = 256 * 2**20
_CHUNK_BYTES = 4 * 2**20
_SMALL_FILE_THREADS = 8
_ALIGNMENT = 64
_KEY_BYTES = 64


class CheckpointWriter:
    """
    Collects tensors into shards of about `shard_bytes`, then turns them into a checkpoint with `commit`.

    Everything is written into `.tmp-<name>` beside the target, flushed to the disk, and renamed once, after
    manifest.json: a crash at any moment leaves no target folder, or a complete one. Memory is bounded by three shards
    plus the largest tensor. Used as a context manager, it removes what it wrote unless `commit` was reached.

    With several ranks each writes the tensors it adds. An error on one rank is kept until `commit`, so that
    collectives between `add` calls stay matched, and is then raised on all ranks. A lone writer raises at once.

    Args:
        target: folder of the new checkpoint. It must not exist. Its parent is created.
        rank, world_size: of this writer.
        all_gather: object -> the objects of all ranks in order (`torch.distributed.all_gather_object`). Collective.
        shard_bytes: a shard is written when the next tensor would make it larger than this.
        expected_bytes: of the whole checkpoint, if known: without room for it, nothing is written.
    Raises CheckpointError on all ranks when the target exists, or cannot be created, or there is no room.
    """

    def __init__(
        self,
        target: str | Path,
        rank: int = 0,
        world_size: int = 1,
        all_gather: Callable[[Any], list[Any]] = lambda item: [item],
        shard_bytes: int = SHARD_BYTES,
        expected_bytes: int = 0,
    ):
        self.target = Path(target)
        self.temporary = self.target.parent / (layout.TEMPORARY_PREFIX + self.target.name)
        self.rank, self.world_size = rank, world_size
        self.shard_bytes = shard_bytes
        self._all_gather = all_gather
        self._error: CheckpointError | None = None
        self._names: set[str] = set()
        self._open: dict[str, _Shard] = {}
        self._spare: list[_Shard] = []
        self._shard_count = dict.fromkeys(layout.INDEX, 0)
        self._pool = ThreadPoolExecutor(max_workers=3, thread_name_prefix="checkpoint")
        self._in_flight: tuple[str, _Shard, Future, Future] | None = None
        self._flushes: list[tuple[str, Future]] = []
        self._files: dict[str, dict] = {}
        self._tensors: dict[str, dict[str, dict]] = {}  # file -> tensor -> its entry in the manifest
        if rank == 0:
            self._run(self._create, expected_bytes)
        self._agree()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *exc_info) -> None:
        self.abort()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """
        Adds a tensor under its name on disk (experts one by one, see layout.py). It is copied: change it freely.

        Raises CheckpointError (see the class for when) on a name already added, a floating-point tensor that is not
        finite, or a failed write.
        """
        self._run(self._add, name, tensor)

    def commit(
        self,
        config: dict,
        trainer_state: dict,
        tokenizer_folder: str | Path | None = None,
        extra_files: dict[str, bytes] | None = None,
        check: Callable[[Path, dict[str, dict]], dict[str, bytes]] | None = None,
    ) -> Path:
        """
        Makes the checkpoint: all files on the disk, manifest.json last, then the rename. Collective.

        Args:
            config, trainer_state: become config.json and trainer_state.json. Those of rank 0 count, as do the rest.
                With the config of a LightningLM model its source files are added.
            tokenizer_folder: its tokenizer files are copied.
            extra_files: further files by name.
            check: called on rank 0 when all but trainer state and manifest lies in the temporary folder, which
                `from_pretrained` can load, with that folder and the manifest's entries of the tensors. It may still
                change `trainer_state`, returns further files (growth_receipt.json), and raises to stop the commit.
        Returns:
            The folder. Raises CheckpointError on all ranks, after removing what was written, if any rank failed.
        """
        self._run(self._finish_shards)
        self._pool.shutdown(cancel_futures=True)  # nothing is being written when a failure removes the folder
        shards = self._agree((self._files, self._tensors))
        if self.rank == 0:
            self._run(self._publish, shards, config, trainer_state, tokenizer_folder, extra_files or {}, check)
        self._agree()
        return self.target

    def abort(self) -> None:
        """Stops writing and removes the temporary folder. Does nothing after a commit."""
        self._pool.shutdown(cancel_futures=True)
        if self.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _run(self, action: Callable, *args) -> None:
        """Runs a step; its CheckpointError ends a lone writer, and waits for the next _agree of a rank among others."""
        if self._error is not None:
            return
        try:
            action(*args)
        except CheckpointError as error:
            if self.world_size == 1:
                self.abort()
                raise
            self._error = error

    def _agree(self, item: Any = None) -> list[Any]:
        """Gathers an item of every rank, or raises the first rank's error on all of them."""
        answers = self._all_gather((None if self._error is None else str(self._error), item))
        for rank, (message, _) in enumerate(answers):
            if message is not None:
                self.abort()
                raise CheckpointError(f"rank {rank}: {message}")
        return [item for _, item in answers]

    def _create(self, expected_bytes: int) -> None:
        refuse_existing(self.target)
        require_space(self.target.parent, expected_bytes)
        try:
            if self.temporary.exists():  # left by a save that was killed
                shutil.rmtree(self.temporary)
            self.temporary.mkdir()
        except OSError as error:
            raise from_os_error(error, self.temporary, 0) from error

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._names:
            raise CheckpointError(f"{name}: added twice to {self.target}")
        if tensor.dtype not in layout.DTYPE_NAMES:
            raise CheckpointError(f"{name}: cannot store {tensor.dtype}")
        refuse_non_finite(name, tensor)
        self._names.add(name)
        kind = layout.kind_of(name)
        if kind in self._open and self._open[kind].nbytes + tensor.nbytes > self.shard_bytes:
            self._flush(kind)
        if kind not in self._open:
            self._open[kind] = self._spare.pop() if self._spare else _Shard(self.shard_bytes)
        self._open[kind].add(name, tensor.detach())

    def _flush(self, kind: str) -> None:
        """Hands the open shard of a kind to the background, once the previous shard is done."""
        self._wait()
        shard = self._open.pop(kind)
        file = f"{kind}-{self.rank:05d}-{self._shard_count[kind]:05d}.safetensors"
        self._shard_count[kind] += 1
        writing = self._pool.submit(_write_shard, self.temporary / file, shard.tensors)
        self._in_flight = (file, shard, writing, self._pool.submit(_hash_tensors, shard.tensors))

    def _wait(self) -> None:
        """Waits for the shard in the background and notes its hashes; its flush to the disk goes on behind."""
        if self._in_flight is None:
            return
        file, shard, writing, hashing = self._in_flight
        self._in_flight = None
        self._files[file] = writing.result()
        sha256 = hashing.result()
        self._tensors[file] = {
            name: {"sha256": sha256[name], "dtype": layout.DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
            for name, tensor in shard.tensors.items()
        }
        shard.clear()
        self._spare.append(shard)
        self._flushes.append((file, self._pool.submit(_fsync, self.temporary / file)))

    def _finish_shards(self) -> None:
        for kind in list(self._open):
            self._flush(kind)
        self._wait()
        for file, flush in self._flushes:
            try:
                flush.result()
            except OSError as error:
                raise from_os_error(error, self.temporary / file, self._files[file]["bytes"]) from error

    def _publish(
        self,
        shards: list[tuple[dict, dict]],
        config: dict,
        trainer_state: dict,
        tokenizer_folder: str | Path | None,
        extra_files: dict[str, bytes],
        check: Callable[[Path, dict[str, dict]], dict[str, bytes]] | None,
    ) -> None:
        """Rank 0: the indexes and small files, the manifest, the rename."""
        files, tensors, indexes = _merge(shards)
        ships_code = config.get("model_type") == MODEL_TYPE
        contents = {
            layout.CONFIG: _json(layout.CONFIG, config | ({"auto_map": AUTO_MAP} if ships_code else {})),
            layout.GENERATION_CONFIG: _json(layout.GENERATION_CONFIG, _generation_config(config)),
            **({} if tokenizer_folder is None else _tokenizer_files(Path(tokenizer_folder))),
            **(model_code() if ships_code else {}),
            **{name: _json(name, index) for name, index in indexes.items()},
        }
        with ThreadPoolExecutor(_SMALL_FILE_THREADS) as pool:  # flushes to the disk that wait together cost one
            paths = [self.temporary / name for name in contents]
            files |= zip(contents, pool.map(_write_file, paths, contents.values()), strict=True)
        if check is not None:
            extra_files = extra_files | check(self.temporary, tensors)
        for name in extra_files.keys() & (files.keys() | {layout.TRAINER_STATE, layout.MANIFEST}):
            raise CheckpointError(f"extra file {name}: the checkpoint has a file of that name already")
        last = extra_files | {layout.TRAINER_STATE: _json(layout.TRAINER_STATE, trainer_state)}
        for name, content in last.items():
            files[name] = _write_file(self.temporary / name, content)
        manifest = {"format": layout.FORMAT, "files": files, "tensors": tensors}
        manifest["sha256"] = manifest_sha256(manifest)
        _write_file(self.temporary / layout.MANIFEST, _json(layout.MANIFEST, manifest, indent=None))
        refuse_existing(self.target)
        try:
            _fsync(self.temporary)
            os.rename(self.temporary, self.target)
            _fsync(self.target.parent)
        except OSError as error:
            raise from_os_error(error, self.target, 0) from error


class _Shard:
    """
    Tensors on their way into one file, copied into memory that is used again for later shards.

    Fresh memory for every tensor would cost as much time as hashing it, in page faults.
    """

    def __init__(self, capacity: int):
        self._memory = torch.empty(capacity, dtype=torch.uint8)
        self.clear()

    def clear(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.nbytes = 0
        self._used = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + tensor.nbytes > len(self._memory):  # a tensor larger than a shard is one by itself
            held = torch.empty(tensor.shape, dtype=tensor.dtype)
        else:
            self._used = start + tensor.nbytes
            held = self._memory[start : self._used].view(tensor.dtype).view(tensor.shape)
        self.tensors[name] = held.copy_(tensor)
        self.nbytes += tensor.nbytes


def manifest_sha256(manifest: dict) -> str:
    """SHA-256 of a manifest without its own hash, so that an edit of the manifest itself is seen."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def require_space(folder: str | Path, needed: int) -> None:
    """Raises CheckpointError unless `needed` bytes can be written under `folder`, which is created."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{layout.TEMPORARY_PREFIX}probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise from_os_error(error, folder, needed) from error
    if needed > free_bytes(folder):
        raise CheckpointError(
            f"{folder}: no room for a checkpoint: {needed:,} bytes needed, {free_bytes(folder):,} bytes free. "
            "Free some space or choose another run folder"
        )


def refuse_existing(target: Path) -> None:
    """Raises CheckpointError when something already lies at `target`."""
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: exists already and is never overwritten. Remove it or choose another folder")


def refuse_non_finite(name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError, naming the tensor, when it holds NaN or infinity."""
    if not all_finite(tensor):
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        raise CheckpointError(f"{name}: {bad:,} of {tensor.numel():,} values are NaN or infinite; not saved")


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity. One pass without a temporary tensor."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _merge(shards: list[tuple[dict, dict]]) -> tuple[dict[str, dict], dict[str, dict], dict[str, dict]]:
    """The manifest's entries of files and of tensors, and the content of each index file, from what all ranks wrote."""
    files: dict[str, dict] = {}
    tensors: dict[str, dict] = {}
    kinds = {file.partition("-")[0] for _, rank_tensors in shards for file in rank_tensors}
    used = [name for kind, name in layout.INDEX.items() if kind in kinds or kind not in layout.OPTIONAL_KINDS]
    indexes = {name: {"metadata": {"total_size": 0}, "weight_map": {}} for name in used}
    for rank_files, rank_tensors in shards:
        files |= rank_files
        for file, entries in rank_tensors.items():
            index = indexes[layout.INDEX[file.partition("-")[0]]]
            index["metadata"]["total_size"] += rank_files[file]["bytes"]
            for name in entries.keys() & tensors.keys():
                raise CheckpointError(f"{name}: added by two ranks ({index['weight_map'][name]} and {file})")
            index["weight_map"] |= dict.fromkeys(entries, file)
            tensors |= entries
    return files, tensors, indexes


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> dict:
    """
    Writes a safetensors file and returns its entry in the manifest.

    It goes past the page cache (O_DIRECT) where the file system can do that: copying into the cache takes the
    processor longer than hashing.
    """
    # wide elements first, so that every tensor starts at a multiple of its element size
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    head = layout.encode_head(ordered)
    size = len(head) + sum(tensor.nbytes for _, tensor in ordered)
    sha256 = hashlib.sha256()
    try:
        with path.open("xb", buffering=0) as file:
            _set_direct(file, True)
            for chunk in _chunks((head, *(_raw_bytes(tensor) for _, tensor in ordered))):
                if len(chunk) < _CHUNK_BYTES:
                    _set_direct(file, False)  # the last chunk may end inside a block
                sha256.update(chunk)
                _write_all(file, chunk)
    except OSError as error:
        raise from_os_error(error, path, size) from error
    return {"bytes": size, "sha256": sha256.hexdigest()}


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


def _hash_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
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


def _write_file(path: Path, content: bytes) -> dict:
    try:
        with path.open("xb", buffering=0) as file:
            _write_all(file, memoryview(content))
            os.fsync(file.fileno())
    except OSError as error:
        raise from_os_error(error, path, len(content)) from error
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write_all(file: FileIO, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _json(name: str, content: dict, indent: int | None = 2) -> bytes:
    try:
        return (json.dumps(content, indent=indent, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: holds something that JSON cannot express ({error})") from error


def _generation_config(config: dict) -> dict:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")
    return {"_from_model_config": True} | {key: config[key] for key in keys if config.get(key) is not None}


def _tokenizer_files(folder: Path) -> dict[str, bytes]:
    found = {name: (folder / name).read_bytes() for name in layout.TOKENIZER_FILES if (folder / name).is_file()}
    if not found:
        raise CheckpointError(f"{folder}: holds no tokenizer (none of {', '.join(layout.TOKENIZER_FILES)})")
    return found
