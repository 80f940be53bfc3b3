"""What is wrong with the checkpoints of a run, which one a resume goes on from, and what to do about the others."""

from collections import Counter
from pathlib import Path

from lightninglm.checkpoint import (
    CheckpointError,
    CheckpointReader,
    base_hashes,
    check_bases,
    explain,
    layout,
    parse_step,
)
from lightninglm.doctor.checks import Check

SHOWN = 10  # findings of one checkpoint
PREFIXES = (layout.TEMPORARY_PREFIX, "damaged-", "grow-")


def check_checkpoints(path: str | Path, verify: str = "fast") -> list[Check]:
    """
    Looks through a checkpoint, a stage folder or a run folder.

    Args:
        verify: "fast" (names, sizes, heads, small files and a sample of tensors) or "full" (every byte).
    Raises CheckpointError when there is no checkpoint nor anything that was meant to be one.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if (path / layout.MANIFEST).is_file() or parse_step(path.name) is not None:
        return [_check_one(path, verify)]
    stages = [folder for folder in (path, *sorted(path.iterdir())) if folder.is_dir() and _attempts(folder)]
    if not stages:
        raise CheckpointError(f"{path}: neither a checkpoint nor a stage or a run with checkpoints (step-*) in it")
    return [check for stage in stages for check in _check_stage(stage, verify)]


def _attempts(folder: Path) -> list[Path]:
    """Everything in a stage folder that is, was or was to become a checkpoint."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_dir() and (parse_step(path.name) is not None or path.name.startswith(PREFIXES))
    ]


def _check_stage(stage: Path, verify: str) -> list[Check]:
    checks, sound = [], []
    for path in _attempts(stage):
        if path.name.startswith(layout.TEMPORARY_PREFIX):
            found = "left by a save or a deletion that was killed; no run reads it"
            checks.append(Check(str(path), "warning", found, "the next start of the stage deletes it"))
        elif path.name.startswith("damaged-"):
            found = "set aside by a resume that could not use it"
            checks.append(Check(str(path), "warning", found, "delete it when you do not want to look into it"))
        elif path.name.startswith("grow-"):
            found = "a step of a growth that has not ended"
            checks.append(Check(str(path), "warning", found, "the next start of the stage makes it anew"))
        else:
            check = _check_one(path, verify)
            checks.append(check)
            sound += [path] if check.state == "ok" else []
    if sound:
        newest = max(sound, key=lambda path: parse_step(path.name))
        state = CheckpointReader(newest, verify=None).trainer_state
        after = "the stage has finished" if state.get("finished") else f"goes on after step {state.get('step')}"
        checks.append(Check(str(stage), "ok", f"a resume takes {newest.name}: {after}"))
    else:
        advice = "a stage never starts from scratch by itself: restore one of them, or remove the folder"
        checks.append(Check(str(stage), "problem", "no checkpoint that a resume could take", advice))
    return checks


def _check_one(folder: Path, verify: str) -> Check:
    findings = [str(finding) for finding in explain(folder, verify)]
    if not findings:
        reader = CheckpointReader(folder, verify=None)
        bases = base_hashes({name: info.sha256 for name, info in reader.weights.items()})
        try:
            check_bases(folder, reader.trainer_state.get("expert_bases"), bases)
        except CheckpointError as error:
            findings = [str(error)]
    if findings:
        more = [f"... and {len(findings) - SHOWN} more"] if len(findings) > SHOWN else []
        advice = "a resume takes the newest sound checkpoint instead; bring damaged files back if you have a copy"
        return Check(str(folder), "problem", "\n".join([*findings[:SHOWN], *more]), advice)
    files = Counter(info.file for info in (*reader.weights.values(), *reader.optimizer.values()))
    size = sum((folder / name).stat().st_size for name in files)
    tensors = f"{len(reader.weights):,} weights and buffers, {len(reader.optimizer):,} optimizer tensors"
    return Check(str(folder), "ok", f"complete: {tensors}, {size / 2**30:.2f} GiB")
