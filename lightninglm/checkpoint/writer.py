"""Writes a checkpoint tensor by tensor: bounded memory, hashes computed beside the writing, committed in one rename."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError, free_bytes, from_os_error
from lightninglm.checkpoint.model_code import AUTO_MAP, MODEL_TYPE, model_code
from lightninglm.checkpoint.shards import (
    SHARD_BYTES,
    HostMemory,
    Shard,
    fsync,
    hash_tensors,
    shard_entry,
    shard_parts,
    write_file,
    write_parts,
)

_SMALL_FILE_THREADS = 8
_HASHING_THREADS = 2
_SHARD_THREADS = _HASHING_THREADS + 2  # writing, and the flush of the shard before


class CheckpointWriter:
    """
    Collects tensors into shards of about `shard_bytes`, then turns them into a checkpoint with `commit`.

    Everything is written into `.tmp-<name>` beside the target, flushed to the disk, and renamed once, after
    manifest.json: a crash at any moment leaves no target folder, or a complete one. Memory is bounded by three shards
    plus the largest tensor. Used as a context manager, it removes what it wrote unless `commit` was reached.

    With `memory` it takes a snapshot instead: `add` only copies, into that memory, and `commit`, which another thread
    may call, writes all of it.

    With several ranks each writes the tensors it adds. An error on one rank is kept until `commit`, so that
    collectives between `add` calls stay matched, and is then raised on all ranks. A lone writer raises at once.

    Args:
        target: folder of the new checkpoint. It must not exist. Its parent is created.
        rank, world_size: of this writer.
        all_gather: object -> the objects of all ranks in order (`torch.distributed.all_gather_object`). Collective.
        shard_bytes: a shard is written when the next tensor would make it larger than this.
        expected_bytes: of the whole checkpoint, if known: without room for it, nothing is written.
        memory: for a snapshot. It takes its shards back when they are written; its own shard_bytes counts.
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
        memory: HostMemory | None = None,
    ):
        self.target = Path(target)
        self.temporary = self.target.parent / (layout.TEMPORARY_PREFIX + self.target.name)
        self.rank, self.world_size = rank, world_size
        self._all_gather = all_gather
        self._memory = HostMemory(shard_bytes) if memory is None else memory
        self._is_snapshot = memory is not None
        self._error: CheckpointError | None = None
        self._names: set[str] = set()
        self._open: dict[str, Shard] = {}
        self._full: list[tuple[str, Shard]] = []
        self._shard_count = dict.fromkeys(layout.INDEX, 0)
        self._pool = ThreadPoolExecutor(_SHARD_THREADS, thread_name_prefix="checkpoint")
        self._in_flight: tuple[str, Shard, list[Future]] | None = None
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
        after: Callable[[Path], None] | None = None,
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
            after: called on rank 0 with the folder once it is complete (what it raises undoes nothing).
        Returns:
            The folder. Raises CheckpointError on all ranks, after removing what was written, if any rank failed.
        """
        self._run(self._finish_shards)
        self._pool.shutdown(cancel_futures=True)  # nothing is being written when a failure removes the folder
        shards = self._agree((self._files, self._tensors))
        if self.rank == 0:
            self._run(self._publish, shards, config, trainer_state, tokenizer_folder, extra_files or {}, check)
            if after is not None:
                self._run(after, self.target)
        self._agree()
        return self.target

    def abort(self) -> None:
        """Stops writing and removes the temporary folder. Does nothing after a commit."""
        self._pool.shutdown(cancel_futures=True)
        if self.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _run(self, action: Callable, *args) -> None:
        """Runs a step; its error ends a lone writer, and waits for the next _agree of a rank among others."""
        if self._error is not None:
            return
        try:
            action(*args)
        except (CheckpointError, OSError) as found:
            error = found
            if isinstance(error, OSError):
                error = from_os_error(error, Path(error.filename or self.temporary), 0)
            if self.world_size == 1:
                self.abort()
                raise error from found
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
        if kind in self._open and not self._open[kind].fits(tensor):
            self._close(kind)
        if kind not in self._open:
            self._open[kind] = self._memory.take(tensor)
        self._open[kind].add(name, tensor.detach())

    def _close(self, kind: str) -> None:
        """Ends the open shard of a kind; it is written now, or with the rest of a snapshot."""
        self._full.append((f"{kind}-{self.rank:05d}-{self._shard_count[kind]:05d}.safetensors", self._open.pop(kind)))
        self._shard_count[kind] += 1
        if not self._is_snapshot:
            self._write_full()

    def _write_full(self) -> None:
        """Hands the full shards to the background, each once the one before is done."""
        for file, shard in self._full:
            self._wait()
            parts = shard_parts(shard.tensors)
            self._files[file] = shard_entry(parts)
            shares = (_every(shard.tensors, _HASHING_THREADS, first) for first in range(_HASHING_THREADS))
            jobs = (write_parts, self.temporary / file, parts), *((hash_tensors, share) for share in shares)
            self._in_flight = file, shard, [self._pool.submit(*job) for job in jobs]
        self._full.clear()

    def _wait(self) -> None:
        """Waits for the shard in the background and notes its hashes; its flush to the disk goes on behind."""
        if self._in_flight is None:
            return
        (file, shard, jobs), self._in_flight = self._in_flight, None
        _, *hashes = (job.result() for job in jobs)
        sha256 = {name: value for share in hashes for name, value in share.items()}
        self._tensors[file] = {
            name: {"sha256": sha256[name], "dtype": layout.DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
            for name, tensor in shard.tensors.items()
        }
        self._memory.give_back(shard)
        self._flushes.append((file, self._pool.submit(fsync, self.temporary / file)))

    def _finish_shards(self) -> None:
        for kind in list(self._open):
            self._close(kind)
        self._write_full()
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
            files |= zip(contents, pool.map(write_file, paths, contents.values()), strict=True)
        if check is not None:
            extra_files = extra_files | check(self.temporary, tensors)
        for name in extra_files.keys() & (files.keys() | {layout.TRAINER_STATE, layout.MANIFEST}):
            raise CheckpointError(f"extra file {name}: the checkpoint has a file of that name already")
        last = extra_files | {layout.TRAINER_STATE: _json(layout.TRAINER_STATE, trainer_state)}
        for name, content in last.items():
            files[name] = write_file(self.temporary / name, content)
        manifest = {"format": layout.FORMAT, "files": files, "tensors": tensors}
        write_file(self.temporary / layout.MANIFEST, encode_manifest(manifest))
        refuse_existing(self.target)
        try:
            fsync(self.temporary)
            os.rename(self.temporary, self.target)
            fsync(self.target.parent)
        except OSError as error:
            raise from_os_error(error, self.target, 0) from error


def encode_manifest(manifest: dict) -> bytes:
    """The content of manifest.json: the manifest with a hash of itself, so that no byte of it can change unseen."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    sha256 = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return _json(layout.MANIFEST, content | {"sha256": sha256}, indent=None)


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
            f"{folder}: no room on the disk: {needed:,} bytes needed, {free_bytes(folder):,} bytes free. "
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


def _every(tensors: dict[str, torch.Tensor], nth: int, first: int) -> dict[str, torch.Tensor]:
    return dict(itertools.islice(tensors.items(), first, None, nth))


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
