"""Several growth steps in a row, as a recipe lists them: each one's target is the next one's source."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from growth.core import grow
from growth.job import parse_options
from growth.receipt import RECEIPT_FILE, tensors_sha256
from lightninglm.checkpoint import CheckpointError, CheckpointReader, remove_checkpoint
from lightninglm.checkpoint.layout import TEMPORARY_PREFIX


def grow_chain(
    source: Path,
    target: Path,
    steps: Sequence[Mapping[str, Mapping[str, Any]]],
    *,
    stage: str,
    seed: int,
    heldout: Path | None,
    moments: bool = True,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """
    Applies `steps` (each `{operator: options}`) to the checkpoint `source`; the result is committed as `target`.

    Without steps the target is an exact copy that begins the new stage (`carry_over`). Checkpoints in between lie
    beside the target as `.tmp-grow-<n>-<operator>` until the target is complete. A chain that was interrupted goes on
    from the last of them that this same chain would make; others are removed. What a chain leaves that was killed after
    its target was complete, the next run of the stage removes (`remove_leftovers`).

    Returns:
        The receipts, in order.
    Raises:
        GrowthError, CheckpointError: as `grow` does; the source is never touched.
    """
    steps = steps or [{"carry_over": {}}]
    for step in steps:
        for operator, options in step.items():
            parse_options(operator, options)
    receipts, folders = [], []
    for number, step in enumerate(steps, start=1):
        ((operator, options),) = step.items()
        last = number == len(steps)
        folder = target if last else target.parent / f"{TEMPORARY_PREFIX}grow-{number}-{operator}"
        receipt = None
        if not last:
            folders.append(folder)
            receipt = _finished(folder, source, operator, options, seed, moments)
        if receipt is None:
            receipt = grow(
                source,
                folder,
                operator,
                options,
                stage=stage,
                seed=seed,
                heldout=heldout,
                moments=moments,
                progress=progress,
            )
        receipts.append(receipt)
        source = folder
    for folder in folders:
        remove_checkpoint(folder)
    return receipts


def _finished(
    folder: Path, source: Path, operator: str, options: Mapping[str, Any], seed: int, moments: bool
) -> dict[str, Any] | None:
    """The receipt of an earlier, interrupted run's step when it is the one asked for; else the folder is removed."""
    if not folder.exists():
        return None
    try:
        with CheckpointReader(folder), CheckpointReader(source, verify=None) as before:
            receipt = json.loads((folder / RECEIPT_FILE).read_bytes())
            asked = {
                "operator": operator,
                "options": parse_options(operator, options).model_dump(),
                "seed": seed,
                "source_tensors": tensors_sha256(before.manifest["tensors"]),
                "moments": moments,
            }
    except CheckpointError:
        remove_checkpoint(folder)
        return None
    made = {
        "operator": receipt["operator"],
        "options": receipt["options"],
        "seed": receipt["seed"],
        "source_tensors": receipt["source"]["tensors_sha256"],
        "moments": receipt["moments"]["carried"],
    }
    if made == asked:
        return receipt
    remove_checkpoint(folder)
    return None
