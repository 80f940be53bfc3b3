"""Checks of two checkpoints against each other: `verify` replays a growth and measures it again, `diff` lists tensors.

Verification does not trust the receipt: it plans the growth anew from the source, makes every tensor of the target
again, one at a time, and compares hashes. A tensor swapped, forgotten, misplaced or rounded is found by name,
weights, buffers and optimizer state alike.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growth.errors import GrowthError
from growth.job import GrowthJob, parse_options, plan_growth, tensor_sha256
from growth.operator import EXACT_TOLERANCE
from growth.progress import transfer_bar
from growth.receipt import RECEIPT_FILE, measure, passes, tensors_sha256
from growth.source_checks import check_tokenizer, read_source
from growth.tensor_table import table_problems
from growth.trainer_state import grown_trainer_state
from lightninglm.checkpoint import CheckpointReader, TensorInfo, base_hashes, from_disk_name
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig


def verify(
    source: str | Path, target: str | Path, batches: str | Path | None, *, progress: bool = True
) -> dict[str, Any]:
    """
    Re-checks a pair of checkpoints, every byte of both.

    Args:
        batches: safetensors file {domain: int32 [n, S]}; None checks the tensors without running the models.
    Returns:
        {"passed", "findings": [{"tensor", "found", "expected"}], "replayed", "measured", "tolerance"}. Without a
        receipt in the target nothing can be replayed, and the tolerance is that of an exact growth.
    Raises GrowthError or CheckpointError when one of the two cannot be read at all, or the source is not what its
    configuration says.
    """
    source, target = Path(source), Path(target)
    with CheckpointReader(source, verify="full") as before, CheckpointReader(target, verify="full") as after:
        findings = _own_findings(after)
        receipt = read_receipt(target)
        if receipt is None:
            read_source(before)
        else:
            findings += _replay(before, after, receipt, progress)
        measured = None if batches is None or findings else measure(source, target, Path(batches), progress=progress)
    tolerance = {"relative_logit_difference": EXACT_TOLERANCE, "heldout_loss": None}
    if receipt is not None:
        tolerance = receipt["tolerance"]
    within = passes({"measured": measured, "tolerance": tolerance})
    return {
        "passed": not findings and within is not False,
        "findings": findings,
        "replayed": receipt is not None,
        "measured": measured,
        "tolerance": tolerance,
    }


def read_receipt(folder: Path) -> dict[str, Any] | None:
    """The growth receipt of a checkpoint, None if it was not grown."""
    path = folder / RECEIPT_FILE
    return json.loads(path.read_bytes()) if path.is_file() else None


def diff(source: str | Path, target: str | Path) -> dict[str, Any]:
    """
    Compares the tensors of two checkpoints by name, optimizer state included.

    Returns:
        {"counts": {status: n}, "tensors": [{"tensor", "status", "max_change", "same_as", "sha256"}]}, the target's
        tensors in order, then the removed ones. Status is `identical`, `changed` (max_change: the largest absolute
        change), `reshaped`, `new` or `removed`; same_as is a source tensor of another name with the same bytes.
    """
    with CheckpointReader(source) as before, CheckpointReader(target) as after:
        old, new = {**before.weights, **before.optimizer}, {**after.weights, **after.optimizer}
        by_content = {_content(info): name for name, info in reversed(old.items())}
        rows = []
        for name in [*new, *(name for name in old if name not in new)]:
            status, change, same_as = "removed", None, None
            if name in new:
                same_as = by_content.get(_content(new[name]))
                status = _status(old.get(name), new[name])
            if status == "changed":
                change = (after.read(name).double() - before.read(name).double()).abs().max().item()
            rows.append(
                {
                    "tensor": name,
                    "status": status,
                    "max_change": change,
                    "same_as": None if status == "identical" else same_as,
                    "sha256": (new.get(name) or old[name]).sha256,
                }
            )
    counts = Counter(row["status"] for row in rows)
    return {"counts": dict(sorted(counts.items())), "tensors": rows}


def _content(info: TensorInfo) -> tuple:
    return info.sha256, info.dtype, info.shape


def _status(old: TensorInfo | None, new: TensorInfo) -> str:
    if old is None:
        return "new"
    if old.shape != new.shape:
        return "reshaped"
    return "identical" if _content(old) == _content(new) else "changed"


def _own_findings(target: CheckpointReader) -> list[dict[str, str]]:
    """What is wrong with the target by itself: its configuration, its tensors' names and shapes, its tokenizer."""
    try:
        config = LightningLMConfig.from_dict(dict(target.config))
    except ValueError as error:
        return [_finding("config.json", str(error), "a configuration of a model")]
    findings = [_finding(*problem) for problem in table_problems(target.weights, config)]
    try:
        check_tokenizer(target.folder, config)
    except GrowthError as error:
        findings.append(_finding("tokenizer.json", str(error), "the tokenizer of config.tokenizer_sha256"))
    return findings


def _replay(
    before: CheckpointReader, after: CheckpointReader, receipt: Mapping[str, Any], progress: bool
) -> list[dict[str, str]]:
    """What differs between the target and what the receipt's growth makes of the source."""
    recorded, found = receipt["source"]["tensors_sha256"], tensors_sha256(before.manifest["tensors"])
    if recorded != found:
        return [_finding("(source)", f"tensors with SHA-256 {found}", f"{recorded}, from which the target was grown")]
    options = dict(receipt["options"])
    if "tokenizer" in options:  # the target has it, wherever it came from
        options["tokenizer"] = str(after.folder)
    options = parse_options(receipt["operator"], options)
    job = plan_growth(before, receipt["operator"], options, seed=receipt["seed"], moments=receipt["moments"]["carried"])
    stored = {**after.weights, **after.optimizer}
    findings, made = [], set()
    with transfer_bar(job.bytes_to_write(), "verifying", progress) as done:
        for name, tensor in job.tensors():
            made.add(name)
            done(tensor.nbytes)
            if name not in stored:
                findings.append(_finding(name, "missing", _source_of(job, name)))
            elif (stored[name].dtype, stored[name].shape) != (tensor.dtype, tuple(tensor.shape)):
                expected = f"{tensor.dtype} {tuple(tensor.shape)}, {_source_of(job, name)}"
                findings.append(_finding(name, f"{stored[name].dtype} {stored[name].shape}", expected))
            elif stored[name].sha256 != tensor_sha256(tensor):
                findings.append(_finding(name, f"SHA-256 {stored[name].sha256[:16]}...", _source_of(job, name)))
    findings += [_finding(name, "a tensor that no rule makes", "none") for name in stored if name not in made]
    recorded, bases = after.trainer_state.get("expert_bases"), _bases(after)
    if recorded != bases:
        findings.append(_finding("trainer_state.expert_bases", json.dumps(recorded), json.dumps(bases)))
    return findings + _config_findings(job, after.config) + _state_findings(job, after.trainer_state, receipt)


def _bases(reader: CheckpointReader) -> dict[str, str]:
    return base_hashes({name: info.sha256 for name, info in reader.weights.items()})


def _config_findings(job: GrowthJob, config: Mapping[str, Any]) -> list[dict[str, str]]:
    expected = json.loads(json.dumps(job.plan.config.to_dict()))
    del expected["transformers_version"]
    return [
        _finding(f"config.{key}", json.dumps(config.get(key)), json.dumps(value))
        for key, value in expected.items()
        if config.get(key) != value
    ]


def _state_findings(job: GrowthJob, state: Mapping[str, Any], receipt: Mapping[str, Any]) -> list[dict[str, str]]:
    expected = grown_trainer_state(job, receipt["stage"])
    lineage, kept = expected.pop("lineage"), state["lineage"][:-1]
    findings = [
        _finding(f"trainer_state.{key}", json.dumps(state.get(key)), json.dumps(value))
        for key, value in expected.items()
        if state.get(key) != value
    ]
    if lineage != kept:
        findings.append(_finding("trainer_state.lineage", json.dumps(kept), json.dumps(lineage)))
    return findings


def _source_of(job: GrowthJob, name: str) -> str:
    """Where the growth takes a tensor from, in words."""
    weight = name if name in job.plan.origins else name.rpartition(".")[0]
    origin = job.plan.origins[weight]
    return f"{origin.kind} {'of ' + ', '.join(origin.sources) if origin.sources else ''}".strip()


def _finding(tensor: str, found: str, expected: str) -> dict[str, str]:
    return {"tensor": tensor, "found": found, "expected": expected}


def grouped(rows: list[dict[str, Any]]) -> list[tuple[str, str, int, float | None]]:
    """Rows of `diff`, experts of one stack together: (name in memory, status, tensors, largest change)."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((from_disk_name(row["tensor"])[0], row["status"]), []).append(row)
    result = []
    for (name, status), members in groups.items():
        changes = [row["max_change"] for row in members if row["max_change"] is not None]
        result.append((name, status, len(members), max(changes) if changes else None))
    return result
