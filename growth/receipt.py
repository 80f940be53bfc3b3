"""The receipt of a growth step: what was asked for, where every tensor came from, and what changed, as measured.

The measurement runs both checkpoints in fp32 on the same held-out tokens, one layer at a time (growth/layerwise.py).
Relative logit difference is the norm of the difference over the norm of the source's logits, both centred over the
vocabulary (a constant added to all logits of a token changes no probability).
"""

import hashlib
import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import logging

from growth import __version__
from growth.errors import GrowthError
from growth.job import GrowthJob
from growth.layerwise import LayerwiseModel
from growth.moments import RULES, describe
from growth.progress import transfer_bar
from growth.text_loss import compare_text_losses
from lightninglm.checkpoint.layout import INDEX
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.losses import IGNORED
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM
from lightninglm.modeling.parameter_count import count_parameters

RECEIPT_FILE = "growth_receipt.json"
FORMAT = 1
TOKENS_PER_HEAD_CALL = 512


def measure(source: Path, target: Path, batches: Path, *, progress: bool = False) -> dict[str, Any]:
    """
    Compares two checkpoint folders, in fp32, on held-out tokens.

    Args:
        batches: safetensors file {domain: int32 [n, S]}.
    Returns:
        {"batches": {"file", "sha256", "tokens"}, "logits": {"max_absolute", "relative", "second_token_relative"},
        "heldout": {domain: {"before", "after"}}, "unit"}; second_token_relative None without that head. Losses in nats
        per token; between models of different tokenizers in nats per byte of the same text, and no logits compared.
    Raises GrowthError when the file does not hold token ids of the models' vocabulary.
    """
    domains = read_batches(batches)
    about = {
        "file": batches.name,
        "sha256": hashlib.sha256(batches.read_bytes()).hexdigest(),
        "tokens": sum(ids.numel() for ids in domains.values()),
    }
    with transfer_bar(sum(map(_weight_bytes, (source, target))), "measuring", progress) as done:
        before, after = (LayerwiseModel(folder, done) for folder in (source, target))
        if before.config.tokenizer_sha256 != after.config.tokenizer_sha256:
            return {
                "batches": about,
                "logits": {"max_absolute": None, "relative": None, "second_token_relative": None},
                "heldout": compare_text_losses(before, after, domains, batches),
                "unit": "nats per byte",
            }
        for domain, ids in domains.items():
            if int(ids.max()) >= before.config.vocab_size:
                raise GrowthError(
                    f"{batches}: domain {domain} has token id {int(ids.max())}, the vocabulary has "
                    f"{before.config.vocab_size}: it was made with another tokenizer"
                )
        return {"batches": about, **_compare(before, after, domains), "unit": "nats per token"}


def _compare(before: LayerwiseModel, after: LayerwiseModel, domains: Mapping[str, Tensor]) -> dict[str, Any]:
    """The "logits" and "heldout" of `measure`, for two models of one tokenizer."""
    logits, second = Difference(), Difference()
    heldout = {}
    for length in sorted({ids.shape[1] for ids in domains.values()}):
        rows = {domain: ids for domain, ids in domains.items() if ids.shape[1] == length}
        sizes = [len(ids) for ids in rows.values()]
        (old, old_second), (new, new_second) = (
            model.hidden_states(torch.cat(list(rows.values()))) for model in (before, after)
        )
        with before.head() as old_head, after.head() as new_head:
            heads = (old_head, new_head)
            for (domain, ids), *hidden in zip(rows.items(), old.split(sizes), new.split(sizes), strict=True):
                targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED).flatten()
                losses = torch.zeros(2, dtype=torch.float64)
                start = 0
                for pair in _logits(heads, hidden):
                    logits.add(*pair)
                    here = targets[start : start + len(pair[0])]
                    losses += torch.stack([F.cross_entropy(z, here, reduction="none").double().sum() for z in pair])
                    start += len(here)
                losses /= (targets != IGNORED).sum()
                heldout[domain] = dict(zip(("before", "after"), losses.tolist(), strict=True))
            if old_second is not None and new_second is not None:
                for pair in _logits(heads, (old_second, new_second)):
                    second.add(*pair)
    return {
        "logits": {
            "max_absolute": logits.largest,
            "relative": logits.relative(),
            "second_token_relative": second.relative() if second.count else None,
        },
        "heldout": {domain: heldout[domain] for domain in domains},
    }


def _logits(heads: Sequence[Callable[[Tensor], Tensor]], hidden: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Logits [tokens, V] of both models, from hidden states [n, S, H], a bounded number of tokens at a time."""
    for states in zip(*(state.flatten(0, 1).split(TOKENS_PER_HEAD_CALL) for state in hidden), strict=True):
        yield tuple(head(state) for head, state in zip(heads, states, strict=True))


class Difference:
    """Accumulates the difference between two sets of logits, in fp64."""

    def __init__(self):
        self.count, self.largest, self.difference, self.norm = 0, 0.0, 0.0, 0.0

    def add(self, old: Tensor, new: Tensor) -> None:
        """Adds logits [..., V] of the source and of the target."""
        old, new = old.double(), new.double()
        change = new - old
        self.count += 1
        self.largest = max(self.largest, change.abs().max().item())
        self.difference += _centred(change).square().sum().item()
        self.norm += _centred(old).square().sum().item()

    def relative(self) -> float:
        """Norm of the difference over the norm of the source's logits."""
        return (self.difference / self.norm) ** 0.5


def load_model(folder: Path) -> LightningLMForCausalLM:
    """The model of a checkpoint folder in fp32, in evaluation mode."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return LightningLMForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    finally:
        if shown:
            logging.enable_progress_bar()


def read_batches(path: Path) -> dict[str, Tensor]:
    """The held-out file: {domain: int64 [n, S]}."""
    if not path.is_file():
        raise GrowthError(f"{path}: no such file; held-out tokens are a safetensors file {{domain: int32 [n, S]}}")
    tensors = load_file(path)
    for domain, ids in tensors.items():
        if ids.dtype != torch.int32 or ids.dim() != 2 or ids.shape[1] < 2 or int(ids.min()) < 0:
            raise GrowthError(f"{path}: {domain} is {ids.dtype} {tuple(ids.shape)}, expected int32 token ids [n, S]")
    if not tensors:
        raise GrowthError(f"{path}: holds no domain")
    return {domain: tensors[domain].long() for domain in sorted(tensors)}


def build_receipt(
    job: GrowthJob,
    stage: str,
    tensors: Mapping[str, Mapping[str, Any]],
    measured: dict[str, Any] | None,
    seconds: float,
) -> dict[str, Any]:
    """
    The receipt of a growth that was written but not yet committed.

    Args:
        tensors: the target's manifest entries {name: {"sha256", "dtype", "shape"}}.
        measured: from `measure`, or None.
    """
    plan, reader = job.plan, job.reader
    kinds = Counter(origin.kind for origin in plan.origins.values())
    trained = [name for name in plan.origins if job.table[name].trainable]
    options = job.options.model_dump()
    receipt = {
        "format": FORMAT,
        "tool_version": __version__,
        "operator": job.operator,
        "strategy": job.options.strategy,
        "options": options,
        "seed": job.seed,
        "stage": stage,
        "source": {
            "stage": reader.trainer_state["stage"],
            "step": reader.trainer_state["step"],
            "manifest_sha256": reader.manifest["sha256"],
            "tensors_sha256": tensors_sha256(reader.manifest["tensors"]),
        },
        "target": {"tensors_sha256": tensors_sha256(tensors)},
        "tensors": {
            "by_kind": dict(sorted(kinds.items())),
            "identical": sum(n for kind, n in kinds.items() if RULES[kind].identical),
            "derived": sum(n for kind, n in kinds.items() if not RULES[kind].identical and not RULES[kind].new),
            "new": sum(n for kind, n in kinds.items() if RULES[kind].new),
            "dropped": dict(sorted(plan.dropped.items())),
        },
        "parameters": {"before": _parameters(job.source.config), "after": _parameters(plan.config)},
        "moments": {
            "carried": job.moments,
            "rule": describe(plan.origins[name].kind for name in trained) if job.moments else None,
            "tensors_by_kind": dict(sorted(Counter(plan.origins[name].kind for name in trained).items())),
            "parameters_carried": sum(job.table[name].numel for name in trained if job.carries(name)),
            "adam_step": reader.trainer_state["adam_step"] if job.moments else 0.0,
        },
        "details": plan.details or None,
        "measured": measured,
        "signal_to_noise_db": plan.measurements or None,
        "tolerance": {
            "relative_logit_difference": job.options.tolerance or plan.tolerance,
            "heldout_loss": plan.loss_tolerance,
        },
        "cost": {
            "seconds": round(seconds, 3),
            "bytes_read": job.bytes_to_read(),
            "bytes_written": job.bytes_to_write(),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    }
    receipt["passed"] = passes(receipt)
    return receipt


def passes(receipt: Mapping[str, Any]) -> bool | None:
    """Whether the measurement is within the declared tolerance; None when nothing was measured."""
    measured, tolerance = receipt["measured"], receipt["tolerance"]
    if measured is None:
        return None
    logits, allowed = measured["logits"], tolerance["relative_logit_difference"]
    differences = [logits[key] for key in ("relative", "second_token_relative") if logits[key] is not None]
    jumps = [abs(loss["after"] - loss["before"]) for loss in measured["heldout"].values()]
    return all(allowed is None or value <= allowed for value in differences) and all(
        tolerance["heldout_loss"] is None or jump <= tolerance["heldout_loss"] for jump in jumps
    )


def failure(receipt: Mapping[str, Any]) -> str:
    """What a receipt that did not pass says, in one sentence."""
    measured, tolerance = receipt["measured"], receipt["tolerance"]
    jumps = ", ".join(f"{d} {v['before']:.6f} -> {v['after']:.6f}" for d, v in measured["heldout"].items())
    relative, allowed = measured["logits"]["relative"], tolerance["relative_logit_difference"]
    return (
        f"{receipt['operator']} ({receipt['strategy']}) missed its tolerance and was not committed: relative logit "
        f"difference {'not compared' if relative is None else f'{relative:.3e}'} (allowed {allowed}), held-out loss "
        f"{jumps} (allowed change {tolerance['heldout_loss']})"
    )


def summary(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """What the lineage in trainer_state.json keeps of a receipt. The same for the same growth: no times in it."""
    measured = receipt["measured"]
    return {
        "operator": receipt["operator"],
        "strategy": receipt["strategy"],
        "options": receipt["options"],
        "seed": receipt["seed"],
        "source_tensors_sha256": receipt["source"]["tensors_sha256"],
        "target_tensors_sha256": receipt["target"]["tensors_sha256"],
        "relative_logit_difference": measured and measured["logits"]["relative"],
        "heldout_before": measured and {domain: loss["before"] for domain, loss in measured["heldout"].items()},
        "heldout_after": measured and {domain: loss["after"] for domain, loss in measured["heldout"].items()},
        "moments_carried": receipt["moments"]["parameters_carried"],
    }


def tensors_sha256(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """One hash over the names, dtypes, shapes and hashes of all tensors of a checkpoint."""
    rows = [[name, entry["dtype"], list(entry["shape"]), entry["sha256"]] for name, entry in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _parameters(config: LightningLMConfig) -> dict[str, int]:
    count = count_parameters(config)
    return {"stored": count.stored, "active": count.active}


def _weight_bytes(folder: Path) -> int:
    return json.loads((folder / INDEX["model"]).read_bytes())["metadata"]["total_size"]


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)
