"""Which checkpoints of a stage there are, which is the newest sound one, and which may be deleted."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError, from_os_error
from lightninglm.checkpoint.reader import CheckpointReader


@dataclass(frozen=True)
class Skipped:
    """A step folder that cannot be used, and why."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"skipped {self.folder}: {self.reason}"


def list_checkpoints(stage_folder: str | Path, verify: str | None = "fast") -> tuple[list[Path], list[Skipped]]:
    """The sound checkpoints `step-*` of a stage, newest step first, and those that were skipped (newest first)."""
    sound, skipped = [], []
    for folder in _step_folders(Path(stage_folder)):
        reason = _reason_to_skip(folder, verify)
        if reason is None:
            sound.append(folder)
        else:
            skipped.append(Skipped(folder, reason))
    return sound, skipped


def newest_checkpoint(stage_folder: str | Path, verify: str | None = "fast") -> tuple[Path | None, list[Skipped]]:
    """The sound checkpoint with the highest step (None when there is none), and the newer ones that were skipped."""
    skipped = []
    for folder in _step_folders(Path(stage_folder)):
        reason = _reason_to_skip(folder, verify)
        if reason is None:
            return folder, skipped
        skipped.append(Skipped(folder, reason))
    return None, skipped


def prune(stage_folder: str | Path, keep: int, pinned: Iterable[str | Path] = ()) -> list[Path]:
    """
    Deletes the sound checkpoints of a stage but the newest `keep`. Damaged folders do not count and are left alone.

    Args:
        keep: at least 1, so that the newest sound checkpoint always stays.
        pinned: checkpoints that stay in any case.
    Returns:
        The deleted folders.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: must be at least 1")
    stays = {Path(folder).resolve() for folder in pinned}
    sound, _ = list_checkpoints(stage_folder)
    deleted = [folder for folder in sound[keep:] if folder.resolve() not in stays]
    for folder in deleted:
        remove_checkpoint(folder)
    return deleted


def remove_checkpoint(folder: str | Path) -> None:
    """Deletes a checkpoint; killed in between, it leaves a temporary folder, never half a checkpoint."""
    folder = Path(folder)
    doomed = folder.parent / f"{layout.TEMPORARY_PREFIX}deleted-{folder.name}"
    try:
        if doomed.exists():  # left by a deletion that was killed
            shutil.rmtree(doomed)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise from_os_error(error, folder, 0) from error


def set_aside(folder: str | Path) -> Path:
    """
    Renames a damaged `step-*` folder to `damaged-step-*`, so that a resumed run can write that step again.

    Nothing is deleted. Returns the new path.
    """
    folder = Path(folder)
    number = 0
    while (target := folder.parent / f"damaged-{folder.name}{f'-{number}' if number else ''}").exists():
        number += 1
    try:
        os.rename(folder, target)
    except OSError as error:
        raise from_os_error(error, folder, 0) from error
    return target


def remove_leftovers(stage_folder: str | Path) -> list[Path]:
    """
    Deletes what saves and deletions that were killed have left (`.tmp-*`). Call it on one rank, at the start of a run.

    Returns:
        The deleted paths.
    """
    leftovers = sorted(Path(stage_folder).glob(f"{layout.TEMPORARY_PREFIX}*"))
    for path in leftovers:
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise from_os_error(error, path, 0) from error
    return leftovers


def _step_folders(stage_folder: Path) -> list[Path]:
    if not stage_folder.is_dir():
        return []
    steps = [(layout.parse_step(path.name), path) for path in stage_folder.iterdir() if path.is_dir()]
    return [path for step, path in sorted(((s, p) for s, p in steps if s is not None), reverse=True)]


def _reason_to_skip(folder: Path, verify: str | None) -> str | None:
    try:
        CheckpointReader(folder, verify)
    except CheckpointError as error:
        return str(error)
    return None
