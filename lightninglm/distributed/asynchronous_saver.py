"""Saves behind training: this rank's part of the state is copied to host memory, and a thread writes the copy."""

import copy
import os
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from lightninglm.checkpoint.shards import HostMemory
from lightninglm.checkpoint.writer import CheckpointWriter
from lightninglm.distributed.checkpointing import all_gather, bytes_to_write, engine_writer

NICENESS = 10


class AsynchronousSaver:
    """
    Saves an engine as `save_checkpoint` does, byte for byte, while it trains on. One save at a time.

    The ranks' threads have a gloo group of their own. While a save runs nothing else uses it, and every save makes the
    same collectives on it on every rank, whatever fails: they can neither meet a collective of training nor wait for
    one. A process that is killed leaves a temporary folder.

    The memory of the first copy is kept for the next ones; with a GPU it is page-locked. Collective to create.
    """

    def __init__(self, engine: DeepSpeedEngine):
        self.engine = engine
        self._all_gather = partial(all_gather, group=dist.new_group(backend="gloo"))
        self._memory = HostMemory(pinned=engine.device.type == "cuda")
        # training goes first where the processors are busy; the threads of the writer inherit it
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save", initializer=os.nice, initargs=(NICENESS,))
        self._save: Future[tuple[Path, float]] | None = None

    def start(self, folder: Path, trainer_state: dict, **commit_options: Any) -> None:
        """
        Copies the state and starts to write it. Collective; call it between steps, and only when no save is running.

        Args:
            commit_options: of `CheckpointWriter.commit`; what is called there is called in the thread.
        Raises CheckpointError on all ranks when there is no room, or the folder cannot be created.
        """
        assert self._save is None, "the save before was not waited for"
        self._memory.reclaim()
        started = time.perf_counter()
        state = copy.deepcopy(trainer_state)
        writer, content = engine_writer(self.engine, folder, state, self._all_gather, memory=self._memory)
        self._save = self._pool.submit(_commit, writer, started, content | commit_options)

    @property
    def running(self) -> bool:
        """Whether a save was started that was not waited for. The same on all ranks."""
        return self._save is not None

    @property
    def ended(self) -> bool:
        """Whether this rank has finished such a save, well or not."""
        return self._save is not None and self._save.done()

    def wait(self) -> tuple[Path, float]:
        """
        Waits for the running save: the folder, and the seconds since `start`.

        Raises CheckpointError on all ranks when it failed; then nothing is left of it.
        """
        save, self._save = self._save, None
        return save.result()

    def settle(self) -> None:
        """Waits for a save that may be running, whatever becomes of it; not a collective of the calling thread."""
        if self._save is not None:
            wait([self._save])


def host_memory(engine: DeepSpeedEngine) -> tuple[int, int, str]:
    """
    (bytes that the copies of a save take on a host, bytes available there, its name), for the host with the least room.

    Collective. The memory of the copies must not be allocated yet.
    """
    hosts: dict[str, tuple[int, int]] = {}
    for host, needed, available in all_gather(
        (socket.gethostname(), bytes_to_write(engine), psutil.virtual_memory().available)
    ):
        before, least = hosts.get(host, (0, available))
        hosts[host] = before + needed, min(least, available)
    host = min(hosts, key=lambda name: hosts[name][1] - hosts[name][0])
    return *hosts[host], host


def _commit(writer: CheckpointWriter, started: float, content: dict[str, Any]) -> tuple[Path, float]:
    with writer:
        return writer.commit(**content), time.perf_counter() - started
