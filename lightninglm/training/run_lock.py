"""One writer per folder: a lock that the system releases when its holder ends, however it ends."""

import fcntl
import os
import time
from pathlib import Path

from lightninglm.checkpoint import require_space

ROOM_TO_START = 16 * 2**20  # for the lock, logs and metrics; checkpoints are looked at when their size is known


class RunLockedError(ValueError):
    """Another live process works in the folder."""


class RunLock:
    """
    Holds `<folder>/.lock` for the life of a `with` block, or of the process.

    A run that was just killed may have ranks that are still saving; they are waited for, `wait_seconds` at most.
    Raises RunLockedError, naming the process, when the folder stays in use, and CheckpointError when it cannot be
    written or the disk is full.
    """

    def __init__(self, folder: Path, wait_seconds: float = 90.0):
        self.path = folder / ".lock"
        self.wait_seconds = wait_seconds
        self._file = None

    def __enter__(self) -> "RunLock":
        require_space(self.path.parent, ROOM_TO_START)
        self._file = open(self.path, "a+", encoding="ascii")
        deadline = time.monotonic() + self.wait_seconds
        told = False
        while not self._try():
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            if time.monotonic() > deadline:
                self._file.close()
                raise RunLockedError(
                    f"{self.path.parent} is in use by process {holder}; wait for it to end, or stop it (kill {holder})"
                )
            if not told:
                told = True
                print(f"{self.path.parent} is in use by process {holder}: waiting for it to end", flush=True)
            time.sleep(0.5)
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        return self

    def __exit__(self, *exc_info) -> None:
        self._file.close()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
