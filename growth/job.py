"""A growth to be done: a checked plan together with its source, which yields the target's tensors one at a time.

Only the tensors of the step at hand are in memory, whatever the size of the checkpoint. The source is only read.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from growth import (
    carry_over,
    deepen,
    dense_to_moe,
    flatten_router,
    merge_experts,
    multiply_experts,
    quantize_experts,
    resize_vocabulary,
    switch_stack,
)
from growth.errors import GrowthError
from growth.moments import EXP_AVG, EXP_AVG_SQ, MASTER, RULES
from growth.operator import OperatorOptions, Origin, Plan, Source, listed, unused
from growth.source_checks import check_optimizer_state, read_source
from growth.tensor_table import TensorSpec, tensor_table
from lightninglm.checkpoint import CheckpointReader, TensorInfo
from lightninglm.checkpoint.writer import all_finite

KEPT_TENSORS, KEPT_BYTES = 4, 32 * 2**20
"""Of the source the last tensors read stay in memory, unless large: those of a parent serve all of its clones."""

OPERATORS = {
    "dense_to_moe": (dense_to_moe.DenseToMoEOptions, dense_to_moe.plan),
    "deepen": (deepen.DeepenOptions, deepen.plan),
    "multiply_experts": (multiply_experts.MultiplyExpertsOptions, multiply_experts.plan),
    "quantize_experts": (quantize_experts.QuantizeExpertsOptions, quantize_experts.plan),
    "merge_experts": (merge_experts.MergeExpertsOptions, merge_experts.plan),
    "flatten_router": (flatten_router.FlattenRouterOptions, flatten_router.plan),
    "switch_stack": (switch_stack.SwitchStackOptions, switch_stack.plan),
    "resize_vocabulary": (resize_vocabulary.ResizeVocabularyOptions, resize_vocabulary.plan),
    "carry_over": (carry_over.CarryOverOptions, carry_over.plan),
}


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
        self._recent: dict[str, Tensor] = {}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """
        Yields (name on disk, tensor) of everything the target holds, weights and optimizer state.

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

    def _one(self, name: str, origin: Origin) -> Iterator[tuple[str, Tensor]]:
        spec, dtype = self.table[name], self._dtype(self.table[name], origin)
        read = self._read if RULES[origin.kind].identical else self._read_master
        value = origin.value(*map(read, origin.sources))
        if tuple(value.shape) != spec.shape:
            made = f"made from {listed(origin.sources)} it has shape {tuple(value.shape)}"
            raise GrowthError(f"{name}: {made}, the target's model needs {spec.shape}")
        yield name, value.to(dtype)
        if spec.trainable and dtype != torch.float32:
            if read == self._read:
                value = origin.value(*map(self._read_master, origin.sources))
            yield f"{name}.{MASTER}", value.float()
        del value
        if not spec.trainable:
            return
        for part, divisor in ((EXP_AVG, origin.clones), (EXP_AVG_SQ, origin.clones**2)):
            moment = origin.moment(part) if self.moments else None
            if moment is None:
                yield f"{name}.{part}", torch.zeros(spec.shape)
            else:
                state = moment(*(self._read(f"{parent}.{part}") for parent in origin.sources))
                yield f"{name}.{part}", state if divisor == 1 else state / divisor

    def _dtype(self, spec: TensorSpec, origin: Origin) -> torch.dtype:
        """The dtype on disk: that of the source tensor it comes from, unless plan or model fix another."""
        if origin.dtype is not None:
            return origin.dtype
        like = origin.like or (origin.sources[0] if origin.sources else None)
        if spec.fixed_dtype or like is None:
            return spec.dtype
        return self.reader.weights[like].dtype

    def _read_master(self, name: str) -> Tensor:
        """The fp32 master copy of a source weight; the weight itself where that is fp32 or a buffer."""
        master = f"{name}.{MASTER}"
        return self._read(master if self.moments and master in self.reader.optimizer else name)

    def _read(self, name: str) -> Tensor:
        """A source tensor, its hash compared with the manifest the first time. It must not be changed."""
        if name in self._recent:
            return self._recent[name]
        tensor = self.reader.read(name)
        if tensor.nbytes <= KEPT_BYTES:
            while len(self._recent) >= KEPT_TENSORS:
                del self._recent[next(iter(self._recent))]
            self._recent[name] = tensor
        if name not in self._verified:
            found = tensor_sha256(tensor)
            if found != self.reader.sha256(name):
                raise GrowthError(
                    f"{self.reader.folder}: {name} was damaged after it was saved: its SHA-256 is {found[:16]}..., the "
                    f"manifest says {self.reader.sha256(name)[:16]}..."
                )
            if not all_finite(tensor):
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
    plan.dropped |= dict.fromkeys(reader.published, "kept by an import; a grown model has no published form")
    return GrowthJob(reader, source, operator, options, seed, moments, plan, table)


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's raw bytes, as in a checkpoint's manifest."""
    return hashlib.sha256(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())).hexdigest()


def _nbytes(info: TensorInfo) -> int:
    return torch.Size(info.shape).numel() * info.dtype.itemsize
