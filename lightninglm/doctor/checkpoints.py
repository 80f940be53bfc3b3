"""What is wrong with the checkpoints of a run, which one a resume goes on from, and what to do about the others."""

from collections.abc import Callable
from pathlib import Path

from lightninglm.checkpoint import (
    CheckpointError,
    CheckpointReader,
    Finding,
    base_hashes,
    check_bases,
    explain,
    layout,
    newest_checkpoint,
    parse_step,
)
from lightninglm.doctor.checks import Check

SHOWN = 10  # findings of one checkpoint
DAMAGED_PREFIX = "damaged-"  # see retention.set_aside
GROWN_PREFIX = f"{layout.TEMPORARY_PREFIX}grow-"  # see growth.chain

Progress = Callable[[int], None]


def check_checkpoints(path: str | Path, verify: str = "fast", progress: Progress | None = None) -> list[Check]:
    """
    Looks through a checkpoint, a stage folder or a run folder.

    Args:
        verify: "fast" (names, sizes, heads, small files and a sample of tensors) or "full" (every byte).
        progress: called with the number of bytes that were hashed.
    Raises CheckpointError when there is no checkpoint nor anything that was meant to be one.
    """
    path = Path(path)
    if _is_checkpoint(path):
        return [_describe(path, explain(path, verify, progress))]
    return [check for stage in _stages(path) for check in _check_stage(stage, verify, progress)]


def bytes_to_check(path: str | Path) -> int:
    """The bytes that `check_checkpoints` hashes in full mode."""
    path = Path(path)
    if _is_checkpoint(path):
        folders = [path]
    else:
        folders = [folder for stage in _stages(path) for folder in _step_folders(stage)]
    return sum(
        file.stat().st_size
        for folder in folders
        for file in folder.iterdir()
        if file.is_file() and file.name != layout.MANIFEST
    )


def _is_checkpoint(path: Path) -> bool:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    return (path / layout.MANIFEST).is_file() or parse_step(path.name) is not None


def _stages(path: Path) -> list[Path]:
    stages = [folder for folder in (path, *sorted(path.iterdir())) if folder.is_dir() and _attempts(folder)]
    if not stages:
        raise CheckpointError(f"{path}: neither a checkpoint nor a stage or a run with checkpoints (step-*) in it")
    return stages


def _attempts(folder: Path) -> list[Path]:
    """Everything in a stage folder that is, was or was to become a checkpoint."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_dir()
        and (parse_step(path.name) is not None or path.name.startswith((layout.TEMPORARY_PREFIX, DAMAGED_PREFIX)))
    ]


def _step_folders(stage: Path) -> list[Path]:
    return sorted((path for path in _attempts(stage) if parse_step(path.name) is not None), key=_step, reverse=True)


def _step(checkpoint: Path) -> int:
    return parse_step(checkpoint.name)


def _check_stage(stage: Path, verify: str, progress: Progress | None) -> list[Check]:
    checks, whole, sound = [], [], []
    for path in _attempts(stage):
        if path.name.startswith(GROWN_PREFIX):
            found = "a step of a growth that was interrupted"
            checks.append(Check(str(path), "warning", found, "the next start of the growth goes on from it"))
        elif path.name.startswith(layout.TEMPORARY_PREFIX):
            found = "left by a save or a deletion that was killed; no run reads it"
            checks.append(Check(str(path), "warning", found, "the next start of the stage deletes it"))
        elif path.name.startswith(DAMAGED_PREFIX):
            found = "set aside by a resume that could not use it"
            checks.append(Check(str(path), "warning", found, "delete it when you do not want to look into it"))
        else:
            findings = explain(path, verify, progress)
            check = _describe(path, findings)
            checks.append(check)
            whole += [] if findings else [path]
            sound += [path] if check.state == "ok" else []
    return [*checks, _check_resume(stage, verify, whole, sound)]


def _check_resume(stage: Path, verify: str, whole: list[Path], sound: list[Path]) -> Check:
    """What the next start of a stage does, which looks at its checkpoints as `checkpoint.verify` of its recipe says."""
    newest, skipped = newest_checkpoint(stage)
    start_verifies = "full" if newest is None else _start_verifies(newest)
    if verify == start_verifies == "full":  # it sees what was seen here
        newest = max(whole, key=_step, default=None)
        skipped = [path for path in _step_folders(stage) if newest is None or _step(path) > _step(newest)]
    else:
        skipped = [one.folder for one in skipped]
    if newest is None and skipped:
        advice = "a stage never starts from scratch by itself: restore one of them, or remove the folder"
        return Check(str(stage), "problem", "no checkpoint that a resume could take", advice)
    if newest is None:
        return Check(str(stage), "warning", "no checkpoint yet", "the next start begins the stage, or grows its model")
    if newest not in sound:
        advice = f"mv {newest} {newest.with_name('damaged-' + newest.name)}, so that the one before is taken"
        return Check(str(stage), "problem", f"a resume takes {newest.name}, which has a problem", advice)
    state = CheckpointReader(newest, verify=None).trainer_state
    found = f"a resume takes {newest.name}"
    if verify == "fast" and start_verifies == "full":
        found += " if every byte of it is sound, which it checks first (checkpoint.verify: full) and --full does here"
    found += ": the stage has finished" if state.get("finished") else f": goes on after step {state.get('step')}"
    if skipped:
        found += f"; it skips {', '.join(path.name for path in skipped)} and sets aside what is damaged"
    return Check(str(stage), "ok", found)


def _start_verifies(checkpoint: Path) -> str:
    """`checkpoint.verify` of the recipe that a checkpoint was made with; a grown one was made with none."""
    recipe = CheckpointReader(checkpoint, verify=None).trainer_state.get("recipe", {})
    return recipe.get("checkpoint", {}).get("verify", "full")


def _describe(folder: Path, found: list[Finding]) -> Check:
    findings = [str(finding).replace(f"{folder}/", "", 1) for finding in found]
    if not findings:
        reader = CheckpointReader(folder, verify=None)
        bases = base_hashes({name: info.sha256 for name, info in reader.weights.items()})
        try:
            check_bases(folder, reader.trainer_state.get("expert_bases"), bases)
        except CheckpointError as error:
            findings = [str(error).removeprefix(f"{folder}: ")]
    if findings:
        more = [f"... and {len(findings) - SHOWN:,} more"] if len(findings) > SHOWN else []
        advice = "bring what is damaged back from a copy, or move the folder away"
        return Check(str(folder), "problem", "\n".join([*findings[:SHOWN], *more]), advice)
    files = {info.file for info in (*reader.weights.values(), *reader.optimizer.values())}
    size = sum((folder / name).stat().st_size for name in files)
    tensors = f"{len(reader.weights):,} weights and buffers, {len(reader.optimizer):,} optimizer tensors"
    return Check(str(folder), "ok", f"complete: {tensors}, {size / 2**30:.2f} GiB")
