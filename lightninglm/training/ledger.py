"""
The ledger: bytes of weights, quantized bases, adapters and optimizer state, per rank and per expert, before a run.

Counted on the model built on the meta device, with the shapes and dtypes that the ranks of a run will hold. It covers
what stays: parameters, persistent buffers and Adam's state; not gradients, activations or the tokenizer's byte table.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from lightninglm.checkpoint import is_base, is_stacked
from lightninglm.distributed.expert_parallel import dispatch_rows
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM
from lightninglm.modeling.parameter_roles import ADAPTERS, role

FP32 = 4
EXPERTS, BASES, REST = "routed experts", "quantized bases", "rest"
PARTS = (EXPERTS, BASES, ADAPTERS, REST)


@dataclass(frozen=True)
class LedgerRow:
    """
    One part of the model.

    Attributes:
        trained: parameters that the optimizer updates, of the whole model; padding slots not counted.
        weight_bytes: of parameters and persistent buffers, on each rank. Ranks with fewer experts hold zero padding.
        optimizer_bytes: of master copies and moments, on all ranks together, padding slots included. ZeRO divides them
            evenly over the ranks and adds at most 2 * ranks elements of alignment per parameter group.
    """

    trained: int
    weight_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class Ledger:
    """
    The bytes of a run.

    Attributes:
        world_size: ranks.
        rows: by part of `PARTS`; parts that the model does not have are absent.
        expert_bytes: of one routed expert: "weights", "adapters", "optimizer" (master and moments of what is trained).
        routed_weights: weights of all routed experts, quantized or not.
    """

    world_size: int
    rows: dict[str, LedgerRow]
    expert_bytes: dict[str, int]
    routed_weights: int

    @property
    def optimizer_saving(self) -> float:
        """Optimizer state of all routed weights over that of their adapters; 1 when there are none."""
        return self.routed_weights / self.rows[ADAPTERS].trained if ADAPTERS in self.rows else 1.0

    def lines(self) -> list[str]:
        """A short table for people."""
        lines = [f"{'bytes':<16}{'each rank, weights':>20}{'each rank, optimizer':>22}{'all ranks, optimizer':>22}"]
        for part, row in self.rows.items():
            share = math.ceil(row.optimizer_bytes / self.world_size)
            lines.append(f"{part:<16}{row.weight_bytes:>20,}{share:>22,}{row.optimizer_bytes:>22,}")
        if self.expert_bytes:
            of_expert = ", ".join(f"{name} {size:,}" for name, size in self.expert_bytes.items())
            lines.append(f"one expert: {of_expert}")
        if ADAPTERS in self.rows:
            lines.append(f"optimizer state of the routed experts: 1/{self.optimizer_saving:.1f} of full training's")
        return lines

    def compare(self, weights: Mapping[str, int], optimizer: Mapping[str, int]) -> str:
        """One line: what was measured (bytes by part, as `measured_bytes` gives them), and where it differs."""
        differences = []
        for part, row in self.rows.items():
            for what, planned, found in (
                ("weights", row.weight_bytes, weights.get(part, 0)),
                ("optimizer", row.optimizer_bytes, optimizer.get(part, 0)),
            ):
                if planned != found:
                    differences.append(f"{part}, {what}: {found:,} where the ledger has {planned:,}")
        if differences:
            return "measured otherwise: " + "; ".join(differences)
        return (
            f"measured as the ledger says: {sum(weights.values()):,} bytes of weights on this rank, "
            f"{sum(optimizer.values()):,} of optimizer state on all"
        )


def part_of(name: str) -> str:
    """The part of `PARTS` that a parameter or buffer belongs to, by its name in memory."""
    if role(name) == ADAPTERS:
        return ADAPTERS
    return BASES if is_base(name) else EXPERTS if is_stacked(name) else REST


def ledger(
    config: LightningLMConfig,
    *,
    world_size: int = 1,
    expert_parallel: int = 1,
    zero_stage: int = 1,
    dtype: str = "fp32",
) -> Ledger:
    """
    The ledger of a model trained by `world_size` ranks.

    Args:
        expert_parallel: ranks that share one set of experts.
        zero_stage: of DeepSpeed, 0 to 3.
        dtype: `"fp32"` or `"bf16"`, of the weights; master copies and moments are fp32.
    """
    totals = {part: [0, 0, 0] for part in PARTS}
    expert_bytes = {"weights": 0, ADAPTERS: 0, "optimizer": 0}
    routed_weights, first_layer = 0, None
    for tensor in _tensors(config, dtype):
        stacked = is_stacked(tensor.name)
        part = part_of(tensor.name)
        local, holders = tensor.numel, world_size
        if stacked:
            experts = tensor.experts
            local = tensor.numel // experts * -(-experts // expert_parallel)
            holders = world_size // expert_parallel
        if tensor.trained:
            totals[part][0] += tensor.numel
            # without ZeRO every holder has two moments and the fp32 weight is its own master copy
            each = 2 * FP32 * holders if zero_stage == 0 else 3 * FP32
            totals[part][2] += local * each * (world_size // holders)
        partitioned = zero_stage == 3 and tensor.is_parameter
        totals[part][1] += (-(-local // holders) if partitioned else local) * tensor.itemsize
        if stacked:
            layer = tensor.name.rpartition(".experts.")[0]
            first_layer = first_layer or layer
            routed_weights += tensor.dense_numel
            if layer == first_layer:
                kind = ADAPTERS if part == ADAPTERS else "weights"
                each = tensor.numel // tensor.experts
                expert_bytes[kind] += each * tensor.itemsize
                if tensor.trained:
                    expert_bytes["optimizer"] += each * (2 if zero_stage == 0 else 3) * FP32
    rows = {part: LedgerRow(*total) for part, total in totals.items() if any(total)}
    return Ledger(world_size, rows, {name: size for name, size in expert_bytes.items() if size}, routed_weights)


def dispatch_line(config: LightningLMConfig, *, tokens: int, expert_parallel: int, dtype: str = "fp32") -> str:
    """
    One line: the buffers of a layer's rows on their way to the experts of other ranks, which the load decides.

    Args:
        tokens: of one rank, per micro-batch.
        expert_parallel, dtype: as in `ledger`.
    """
    rows = dispatch_rows(tokens, config.num_experts_per_tok, config.num_experts, expert_parallel)
    itemsize = FP32 if dtype == "fp32" else torch.bfloat16.itemsize
    balanced, most = (count * config.hidden_size * itemsize for count in rows)
    return (
        f"rows of one MoE layer on their way: {balanced:,} bytes on each rank when the load is balanced, "
        f"{most:,} at most, on a rank whose experts get every token"
    )


@dataclass(frozen=True)
class _Tensor:
    """A parameter or persistent buffer. dense_numel: weights of the matrices that a stack stands for, each once."""

    name: str
    numel: int
    itemsize: int
    is_parameter: bool
    trained: bool
    experts: int
    dense_numel: int


def _tensors(config: LightningLMConfig, dtype: str) -> Iterator[_Tensor]:
    with torch.device("meta"):
        model = LightningLMForCausalLM(config)
    parameters = dict(model.named_parameters())
    keeps_fp32 = re.compile("|".join(model._keep_in_fp32_modules_strict))
    matrix = config.hidden_size * config.moe_intermediate_size
    for name, tensor in model.state_dict().items():
        is_parameter = name in parameters
        shrinks = dtype == "bf16" and is_parameter and not keeps_fp32.search(name)
        yield _Tensor(
            name,
            tensor.numel(),
            torch.bfloat16.itemsize if shrinks else tensor.element_size(),
            is_parameter,
            is_parameter and parameters[name].requires_grad,
            tensor.shape[0] if is_stacked(name) else 0,
            tensor.shape[0] * matrix if re.search(r"_proj\.(weight|codes)$", name) and is_stacked(name) else 0,
        )
