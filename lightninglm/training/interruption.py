"""What asks a run to stop: a signal, a deadline, a file that appears. The loop saves at the next step boundary."""

import os
import re
import signal
import time
from datetime import datetime
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXIT_STOPPED = 75
"""Exit code of a run that saved and stopped without a signal (EX_TEMPFAIL of sysexits.h: try again later)."""

FORGETTING = 0.9  # per step, of the longest step: a slow start does not count for ever
UNSEEN_SAVE_SECONDS = 120.0  # kept free for a save before the first one was timed, at most a tenth of the time left
MARGIN = 1.2


def parse_deadline(text: str, now: float) -> float:
    """
    Unix time of `2h30m`, `45m`, `90s`, `1d` from now, or of an ISO 8601 time (local unless it names a zone).

    Raises ValueError.
    """
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    try:
        if text and parts:
            seconds = sum(int(n or 0) * unit for n, unit in zip(parts.groups(), (86400, 3600, 60, 1), strict=True))
            return now + seconds
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"deadline {text!r}: needs a time from now such as 2h30m, or an ISO time such as 2026-07-01T18:30"
        ) from error


class Deadline:
    """
    Says when to stop so that the save is done in time, from the steps and saves it was told about.

    Args:
        at: Unix time.
    """

    def __init__(self, at: float):
        self.at = at
        self.step_seconds = 0.0
        self.save_seconds: float | None = None
        self._unseen_save = min(UNSEEN_SAVE_SECONDS, 0.1 * max(0.0, at - time.time()))

    def took(self, *, step: float | None = None, save: float | None = None) -> None:
        """Takes note of the seconds from one step boundary to the next (evaluation included), or of a save."""
        if step is not None:
            self.step_seconds = max(step, FORGETTING * self.step_seconds)
        if save is not None:
            self.save_seconds = max(save, self.save_seconds or 0.0)

    def is_due(self, now: float) -> bool:
        """Asked inside a step: whether the rest of it, one more step and a save would end too late."""
        save = self._unseen_save if self.save_seconds is None else self.save_seconds
        return now + MARGIN * (2 * self.step_seconds + save) >= self.at


class Interruption:
    """
    Remembers why a stop was asked for. A second Ctrl-C leaves at once, without saving.

    The ranks must stop at the same step, so the loop reduces `requested` over them once a step: one rank's reason
    stops all. `watch_pid` is a process to follow: when it is gone (the program that chained this stage was killed),
    the run saves and stops as if it had been asked to.

    Args:
        watch_pid: see above.
        deadline, stop_file: when to stop, and a file whose appearance asks for a stop (a notice that a spot machine
            will be taken away). For one rank, so that one clock and one file system decide.

    Usage: `with Interruption() as interruption: ...; if interruption.requested: ...`
    """

    def __init__(
        self, watch_pid: int | None = None, *, deadline: Deadline | None = None, stop_file: Path | None = None
    ):
        self.reason: str | None = None
        self.signal_number = 0
        self.watch_pid = watch_pid
        self.deadline = deadline
        self.stop_file = stop_file
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

    def took(self, *, step: float | None = None, save: float | None = None) -> None:
        """Tells the deadline how long a step or a save took."""
        if self.deadline is not None:
            self.deadline.took(step=step, save=save)

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        if self.reason is None and self.watch_pid is not None and not _alive(self.watch_pid):
            self.signal_number = signal.SIGTERM
            self.reason = f"process {self.watch_pid}, which started this stage, is gone"
        if self.reason is None and self.stop_file is not None and self.stop_file.exists():
            self.reason = f"{self.stop_file} has appeared"
        if self.reason is None and self.deadline is not None and self.deadline.is_due(time.time()):
            self.reason = f"the deadline {datetime.fromtimestamp(self.deadline.at):%Y-%m-%d %H:%M:%S}"
        return self.reason is not None

    def reason_and_signal(self) -> tuple[str, int] | None:
        """For `take_over` on the other ranks; None when this rank was not asked."""
        return None if self.reason is None else (self.reason, self.signal_number)

    def take_over(self, reasons: list[tuple[str, int] | None]) -> None:
        """Takes over the lowest rank's reason, so that all ranks say the same and exit alike."""
        rank, (reason, self.signal_number) = next((r, found) for r, found in enumerate(reasons) if found is not None)
        self.reason = reason if rank == 0 else f"{reason} (rank {rank})"

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it; without a signal `EXIT_STOPPED`."""
        return 128 + self.signal_number if self.signal_number else EXIT_STOPPED


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
