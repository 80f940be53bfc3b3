"""Grows a checkpoint: plan, write, measure, commit; nothing is left behind when any of these fails."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growth.errors import ReceiptError
from growth.job import parse_options, plan_growth
from growth.progress import transfer_bar
from growth.receipt import RECEIPT_FILE, build_receipt, failure, measure, summary
from growth.trainer_state import grown_trainer_state
from lightninglm.checkpoint import CheckpointReader, CheckpointWriter, base_hashes
from lightninglm.checkpoint.writer import refuse_existing

SMALL_FILES_BYTES = 32 * 2**20  # room for indexes, manifest and tokenizer beside the tensors


def grow(
    source: str | Path,
    target: str | Path,
    operator: str,
    options: Mapping[str, Any],
    *,
    stage: str,
    seed: int = 0,
    heldout: str | Path | None = None,
    moments: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Grows the checkpoint `source` into a new one, `target`, and returns the receipt that is written into it.

    Args:
        source: a checkpoint folder; never changed.
        target: folder to create; must not exist.
        operator: a key of `OPERATORS`; options: its options (see each operator's options class).
        stage: name of the stage that will train the target.
        seed: of everything drawn at random.
        heldout: safetensors file {domain: int32 [n, S]} of token ids on which source and target are measured; None
            writes the receipt without measurements.
        moments: carry the optimizer state by the written rule; False starts the target with a fresh Adam.
        progress: show a progress bar on standard error.
    Raises:
        GrowthError: bad input, a source that is not what the operator needs, no room; nothing was written.
        ReceiptError: the grown model differs from the source by more than was declared; the target was not committed.
        CheckpointError: the source is damaged, or the target cannot be written.
    """
    started = time.monotonic()
    source, target = Path(source), Path(target)
    parsed = parse_options(operator, options)
    refuse_existing(target)
    with CheckpointReader(source) as reader:
        job = plan_growth(reader, operator, parsed, seed=seed, moments=moments)
        state = grown_trainer_state(job, stage)
        with CheckpointWriter(target, expected_bytes=job.bytes_to_write() + SMALL_FILES_BYTES) as writer:
            with transfer_bar(job.bytes_to_write(), f"{operator} -> {target.name}", progress) as written:
                for name, tensor in job.tensors():
                    writer.add(name, tensor)
                    written(tensor.nbytes)

            receipt: dict[str, Any] = {}

            def check(folder: Path, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
                measured = None if heldout is None else measure(source, folder, Path(heldout), progress=progress)
                receipt.update(build_receipt(job, stage, tensors, measured, time.monotonic() - started))
                if receipt["passed"] is False:
                    raise ReceiptError(failure(receipt), receipt)
                state["lineage"].append({"growth": summary(receipt)})
                state["expert_bases"] = base_hashes({name: entry["sha256"] for name, entry in tensors.items()})
                return {RECEIPT_FILE: (json.dumps(receipt, indent=2) + "\n").encode()}

            writer.commit(job.plan.config.to_dict(), state, tokenizer_folder=job.plan.tokenizer or source, check=check)
    return receipt
