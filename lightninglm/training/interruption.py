"""Signals that ask a run to stop: they set a flag, the loop saves at the next step boundary and leaves."""

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """
    Remembers that a signal asked for a stop. A second Ctrl-C leaves at once, without saving.

    The ranks must stop at the same step, so the loop reduces `requested` over them once a step: a signal to any one
    rank stops all. `watch_pid` is a process to follow: when it is gone (the program that chained this stage was
    killed), the run saves and stops as if it had been asked to.

    Usage: `with Interruption() as interruption: ...; if interruption.requested: ...`
    """

    def __init__(self, watch_pid: int | None = None):
        self.reason: str | None = None
        self.signal_number = 0
        self.watch_pid = watch_pid
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_number == signal.SIGINT:
            os._exit(128 + number)
        if self.reason is None:
            self.signal_number = number
            self.reason = signal.Signals(number).name

    def ask(self, reason: str) -> None:
        """Asks for a stop from inside the program; the first reason counts."""
        if self.reason is None:
            self.reason = reason

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        if self.reason is None and self.watch_pid is not None and not _alive(self.watch_pid):
            self.signal_number = signal.SIGTERM
            self.reason = f"process {self.watch_pid}, which started this stage, is gone"
        return self.reason is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it."""
        return 128 + (self.signal_number or signal.SIGTERM)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
