"""Carries out a growth plan: checkpoint in, checkpoint out, one tensor at a time, nothing left behind when it fails.

Memory is bounded by the largest tensors in flight and the writer's two shards, whatever the size of the checkpoint
(measuring the receipt loads both models, see receipt.py). The source is only read.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from growth import deepen, dense_to_moe, flatten_router, multiply_experts, quantize_experts
from growth.errors import GrowthError, ReceiptError
from growth.moments import EXP_AVG, EXP_AVG_SQ, MASTER, NEW_TENSOR_WARMUP_STEPS, RULES
from growth.operator import OperatorOptions, Origin, Plan, Source, listed, unused
from growth.receipt import RECEIPT_FILE, build_receipt, measure, summary
from growth.tensor_table import TensorSpec, table_problems, tensor_table
from lightninglm.checkpoint import CheckpointReader, CheckpointWriter
from lightninglm.checkpoint.writer import refuse_existing
from lightninglm.modeling.byte_embedding import token_bytes, tokens_sha256
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig

OPERATORS = {
    "dense_to_moe": (dense_to_moe.DenseToMoEOptions, dense_to_moe.plan),
    "deepen": (deepen.DeepenOptions, deepen.plan),
    "multiply_experts": (multiply_experts.MultiplyExpertsOptions, multiply_experts.plan),
    "quantize_experts": (quantize_experts.QuantizeExpertsOptions, quantize_experts.plan),
    "flatten_router": (flatten_router.FlattenRouterOptions, flatten_router.plan),
}
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

            def check(folder: Path, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
                measured = None if heldout is None else measure(source, folder, Path(heldout), progress=progress)
                receipt = build_receipt(job, stage, tensors, measured, time.monotonic() - started)
                if receipt["passed"] is False:
                    raise ReceiptError(failure(receipt), receipt)
                state["lineage"].append({"growth": summary(receipt)})
                receipts.append(receipt)
                return {RECEIPT_FILE: (json.dumps(receipt, indent=2) + "\n").encode()}

            receipts: list[dict[str, Any]] = []
            writer.commit(job.plan.config.to_dict(), state, tokenizer_folder=source, check=check)
    return receipts[0]


def parse_options(operator: str, options: Mapping[str, Any]) -> OperatorOptions:
    """The operator's options, checked. Raises GrowthError naming the option, the value and what is valid."""
    if operator not in OPERATORS:
        raise GrowthError(f"operator {operator!r}: must be one of {', '.join(OPERATORS)}")
    kind = OPERATORS[operator][0]
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, found {e['input']!r}" for e in error.errors()]
        valid = ", ".join(kind.model_fields)
        raise GrowthError(f"{operator}: {'; '.join(problems)}. Options are {valid}") from error


@dataclass
class GrowthJob:
    """A checked plan together with the checkpoint it applies to."""

    reader: CheckpointReader
    source: Source
    operator: str
    options: OperatorOptions
    seed: int
    moments: bool
    plan: Plan
    table: dict[str, TensorSpec]

    def __post_init__(self):
        self._verified: set[str] = set()

    def tensors(self):
        """Yields (name on disk, tensor) of everything the target holds, weights and optimizer state.

        Raises GrowthError when a source tensor is not what its manifest says or not finite, or a formula gives a
        tensor of another shape than the target's model has.
        """
        for name in self.order():
            yield from self._one(name, self.plan.origins[name])

    def order(self) -> list[str]:
        """Target tensors, those made of the same source tensor next to each other."""
        place = {name: i for i, name in enumerate(self.source.table)}
        origins = self.plan.origins
        return sorted(origins, key=lambda name: place[origins[name].sources[0]] if origins[name].sources else -1)

    def weight_bytes(self) -> int:
        """Bytes of the target's weights and buffers."""
        return sum(
            spec.numel * self._dtype(spec, self.plan.origins[name]).itemsize for name, spec in self.table.items()
        )

    def bytes_to_write(self) -> int:
        """Bytes of all tensors of the target, optimizer state included."""
        total = self.weight_bytes()
        for name, spec in self.table.items():
            if spec.trainable:
                has_master = self._dtype(spec, self.plan.origins[name]) != torch.float32
                total += spec.numel * 4 * (3 if has_master else 2)
        return total

    def bytes_to_read(self) -> int:
        """Bytes of the source tensors that are used, each counted once."""
        names = {name for origin in self.plan.origins.values() for name in origin.sources}
        parts = [name for name in self.reader.optimizer if name.rpartition(".")[0] in names] if self.moments else []
        return sum(_nbytes(self.reader.info(name)) for name in (*names, *parts))

    def carries(self, name: str) -> bool:
        """Whether Adam's moments of this target tensor come from the source."""
        return self.moments and self.table[name].trainable and self.plan.origins[name].moment() is not None

    def _one(self, name: str, origin: Origin):
        spec, dtype = self.table[name], self._dtype(self.table[name], origin)
        read = self._read if RULES[origin.kind].identical else self._read_master
        value = origin.value(*map(read, origin.sources))
        if tuple(value.shape) != spec.shape:
            made = f"made from {listed(origin.sources)} it has shape {tuple(value.shape)}"
            raise GrowthError(f"{name}: {made}, the target's model needs {spec.shape}")
        yield name, value.to(dtype)
        if not spec.trainable:
            return
        if dtype != torch.float32:
            if read == self._read:
                value = origin.value(*map(self._read_master, origin.sources))
            yield f"{name}.{MASTER}", value.float()
        moment = origin.moment() if self.moments else None
        for part, divisor in ((EXP_AVG, origin.clones), (EXP_AVG_SQ, origin.clones**2)):
            if moment is None:
                yield f"{name}.{part}", torch.zeros(spec.shape)
            else:
                state = moment(*(self._read(f"{parent}.{part}") for parent in origin.sources))
                yield f"{name}.{part}", state if divisor == 1 else state / divisor

    def _dtype(self, spec: TensorSpec, origin: Origin) -> torch.dtype:
        """A target tensor is stored in the dtype of the source tensor it comes from, unless the model fixes its own."""
        like = origin.like or (origin.sources[0] if origin.sources else None)
        if spec.fixed_dtype or like is None:
            return spec.dtype
        return self.reader.weights[like].dtype

    def _read_master(self, name: str) -> Tensor:
        """The fp32 master copy of a source weight; the weight itself where that is fp32 or a buffer."""
        master = f"{name}.{MASTER}"
        return self._read(master if self.moments and master in self.reader.optimizer else name)

    def _read(self, name: str) -> Tensor:
        """A source tensor, its hash compared with the manifest the first time."""
        tensor = self.reader.read(name)
        if name not in self._verified:
            found = tensor_sha256(tensor)
            if found != self.reader.sha256(name):
                raise GrowthError(
                    f"{self.reader.folder}: {name} was damaged after it was saved: its SHA-256 is {found[:16]}..., the "
                    f"manifest says {self.reader.sha256(name)[:16]}..."
                )
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise GrowthError(f"{self.reader.folder}: {name} holds NaN or infinite values, nothing was grown")
            self._verified.add(name)
        return tensor


def plan_growth(
    reader: CheckpointReader, operator: str, options: OperatorOptions, *, seed: int, moments: bool = True
) -> GrowthJob:
    """Plans a growth and checks it against the source, tensor by tensor; reads and writes no tensor."""
    source = read_source(reader)
    if moments:
        check_optimizer_state(reader, source)
    plan = OPERATORS[operator][1](source, options, seed)
    table = tensor_table(plan.config)
    absent = sorted({name for origin in plan.origins.values() for name in origin.sources} - source.table.keys())
    if absent:
        raise GrowthError(f"{operator} needs source tensors that the source does not have: {listed(absent)}")
    leftover = [name for name in unused(source, plan.origins) if name not in plan.dropped]
    if leftover:
        raise GrowthError(f"{operator} would lose {len(leftover)} tensor(s) of the source: {listed(leftover)}")
    return GrowthJob(reader, source, operator, options, seed, moments, plan, table)


def read_source(reader: CheckpointReader) -> Source:
    """The source as an operator sees it. Raises GrowthError, naming tensors, unless it holds what its config says."""
    config = LightningLMConfig.from_dict(dict(reader.config))
    problems = table_problems(reader.weights, config)
    if problems:
        shown = listed([f"{name} (found {found}, expected {expected})" for name, found, expected in problems])
        raise GrowthError(f"{reader.folder}: {len(problems)} tensor(s) do not fit its config.json: {shown}")
    steps = reader.read("model.step_size").tolist()
    if steps != torch.tensor(config.step_sizes, dtype=torch.float32).tolist():
        raise GrowthError(f"{reader.folder}: model.step_size is {steps}, config.step_sizes is {config.step_sizes}")
    check_tokenizer(reader.folder, config)
    return Source(config, tensor_table(config), reader.trainer_state)


def check_tokenizer(folder: Path, config: LightningLMConfig) -> None:
    """Raises GrowthError unless the folder's tokenizer has the bytes that the model was trained with."""
    found = tokens_sha256(token_bytes(folder / "tokenizer.json"))
    if config.tokenizer_sha256 not in (None, found):
        raise GrowthError(
            f"{folder / 'tokenizer.json'}: another tokenizer than the model was trained with (its tokens have SHA-256 "
            f"{found[:16]}..., config.tokenizer_sha256 is {config.tokenizer_sha256[:16]}...)"
        )


def check_optimizer_state(reader: CheckpointReader, source: Source) -> None:
    """Raises GrowthError unless there is Adam state for every trained parameter, of its shape, and for nothing else."""
    if not reader.optimizer:
        raise GrowthError(
            f"{reader.folder}: holds no optimizer state to carry; ask for a fresh optimizer (--drop-moments) or take a "
            "checkpoint that training wrote"
        )
    expected = {}
    for name, spec in source.table.items():
        if spec.trainable:
            parts = (EXP_AVG, EXP_AVG_SQ)
            if reader.weights[name].dtype != torch.float32:
                parts = (MASTER, *parts)
            expected |= {f"{name}.{part}": spec.shape for part in parts}
    missing = [name for name in expected if name not in reader.optimizer]
    extra = [name for name in reader.optimizer if name not in expected]
    if missing or extra:
        parts = [f"{len(missing)} missing: {listed(missing)}"] * bool(missing)
        parts += [f"{len(extra)} of no trained parameter: {listed(extra)}"] * bool(extra)
        raise GrowthError(f"{reader.folder}: its optimizer state is not that of its parameters; " + "; ".join(parts))
    for name, shape in expected.items():
        info = reader.optimizer[name]
        if info.shape != shape or info.dtype != torch.float32:
            raise GrowthError(
                f"{reader.folder}: {name} is {info.dtype} {info.shape}, its parameter needs torch.float32 {shape}: "
                "the state of another parameter"
            )


def grown_trainer_state(job: GrowthJob, stage: str) -> dict[str, Any]:
    """trainer_state.json of the target: step 0 of `stage`, everything that crosses a growth step carried."""
    old = job.reader.trainer_state
    data = old["data"]
    names = [name for name in job.plan.origins if job.table[name].trainable and starts_fresh(job, name)]
    return {
        "format": old["format"],
        "stage": stage,
        "step": 0,
        "total_steps": 0,
        "tokens": 0,
        "lineage_tokens": old["lineage_tokens"],
        "finished": False,
        "adam_step": old["adam_step"] if job.moments else 0.0,
        "data": {**data, "position": 0, "domain_offsets": data["next_domain_offsets"]},
        "ramps": ramps(job),
        "new_tensors": {
            "names": list(dict.fromkeys(job.table[name].memory_name for name in names)),
            "warmup_steps": NEW_TENSOR_WARMUP_STEPS,
        },
        "seed": old["seed"],
        "lineage": [*old["lineage"], *([_trained_stage(old)] if old["step"] else [])],
        "skipped_steps": 0,
    }


def _trained_stage(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entry in the lineage of a stage that has trained."""
    return {
        "stage": state["stage"],
        "steps": state["step"],
        "tokens": state["tokens"],
        "recipe_sha256": state.get("recipe_sha256"),
    }


def ramps(job: GrowthJob) -> dict[str, Any]:
    """The step sizes that still have to rise: those of the plan, else what the source's own ramp has left."""
    if job.plan.step_size_ramp is not None:
        return {"step_size": job.plan.step_size_ramp}
    old = job.reader.trainer_state["ramps"].get("step_size")
    left = old["steps"] - job.reader.trainer_state["step"] if old else 0
    if left <= 0:
        return {}
    return {"step_size": {"from": list(job.plan.config.step_sizes), "to": old["to"], "steps": left}}


def starts_fresh(job: GrowthJob, name: str) -> bool:
    """Whether a trained tensor needs a warm-up: without moments by the rule, or made of one whose own is not over."""
    origin = job.plan.origins[name]
    old = job.reader.trainer_state
    warming = old["new_tensors"]["names"] if old["step"] < old["new_tensors"]["warmup_steps"] else ()
    return origin.moment() is None or any(job.source.table[parent].memory_name in warming for parent in origin.sources)


def failure(receipt: Mapping[str, Any]) -> str:
    """What a receipt that did not pass says, in one sentence."""
    measured, tolerance = receipt["measured"], receipt["tolerance"]
    jumps = ", ".join(f"{d} {v['before']:.6f} -> {v['after']:.6f}" for d, v in measured["heldout"].items())
    return (
        f"{receipt['operator']} ({receipt['strategy']}) missed its tolerance and was not committed: relative logit "
        f"difference {measured['logits']['relative']:.3e} (allowed {tolerance['relative_logit_difference']}), held-out "
        f"loss {jumps} (allowed change {tolerance['heldout_loss']})"
    )


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's raw bytes, as in a checkpoint's manifest."""
    return hashlib.sha256(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())).hexdigest()


class transfer_bar:
    """A progress bar over bytes on standard error; as a context manager it gives a function to call with bytes done."""

    def __init__(self, total: int, what: str, shown: bool):
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)
        self.task = self.progress.add_task(what, total=total)

    def __enter__(self):
        self.progress.start()
        return lambda count: self.progress.advance(self.task, count)

    def __exit__(self, *exc_info) -> None:
        self.progress.stop()


def _nbytes(info) -> int:
    return torch.Size(info.shape).numel() * info.dtype.itemsize
