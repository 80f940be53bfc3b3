"""dense_to_moe: every dense FFN becomes a shared expert plus routed experts made of its units.

Exact: the shared expert is the dense FFN and the down projection of every routed expert is zero, so the routed output
is zero whatever the router does; the down projections have a gradient from the first step, gate and up from the second.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from growth.errors import GrowthError
from growth.operator import (
    EXACT_LOSS_TOLERANCE,
    EXACT_TOLERANCE,
    OperatorOptions,
    Origin,
    Plan,
    Source,
    balanced_draw,
    copied,
    fill,
    generator,
    initial,
    redraw,
    redrawn_units,
    split_expert,
    split_ffn,
    target_config,
)
from growth.tensor_table import TensorSpec, tensor_table


class DenseToMoEOptions(OperatorOptions):
    """
    num_experts (E), experts_per_token (K): routed experts and picks per token.
    expert_size: width F of a routed expert, at most the dense width S; by default the source's
        config.moe_intermediate_size (half of S in all published sizes).
    strategy:
        exact           balanced draw of F units per expert, down projection zero
        paper           an independent random set of F units per expert, down columns copied (output about 1.5 x)
        scaled_halves   as paper, shared output times 1/2 and routed output times S / 2F: the expected sum is the
            dense FFN
        clones          every expert the same F units (the field's sparse upcycling; arXiv 2212.05055)
        drop_upcycling  as clones, `drop_ratio` of the units of each expert redrawn (arXiv 2502.19261)
        random          experts freshly initialised
    """

    num_experts: Annotated[int, Field(ge=2)]
    experts_per_token: Annotated[int, Field(ge=2)] = 2
    expert_size: Annotated[int, Field(ge=1)] | None = None
    strategy: Literal["exact", "paper", "scaled_halves", "clones", "drop_upcycling", "random"] = "exact"
    drop_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5


def plan(source: Source, options: DenseToMoEOptions, seed: int) -> Plan:
    if source.config.num_experts:
        raise GrowthError(
            f"dense_to_moe needs a dense source; this one has num_experts = {source.config.num_experts} "
            "(multiply_experts grows a mixture of experts)"
        )
    dense_size = source.config.intermediate_size
    size = options.expert_size or source.config.moe_intermediate_size
    if size > dense_size:
        raise GrowthError(
            f"expert_size = {size}: an expert is made of units of the dense FFN, which has {dense_size}; half is usual"
        )
    config = target_config(
        source,
        num_experts=options.num_experts,
        num_experts_per_tok=options.experts_per_token,
        moe_intermediate_size=size,
        router_layout="flat",
    )
    gates = [name for name in tensor_table(config) if ".experts." in name and name.endswith("gate_proj.weight")]
    experts = Counter(split_ffn(name)[0] for name in gates)
    units = _Units(options.strategy, experts, dense_size, size, seed)

    def origin_of(name: str, spec: TensorSpec) -> Origin | None:
        ffn = split_ffn(name)
        if ffn is None:
            return copied(name)
        block, rest = ffn
        if rest.startswith("shared_expert."):
            return _shared(f"{block}.{rest.removeprefix('shared_expert.')}", options.strategy)
        if rest.startswith("router."):
            return initial(name, spec, config, seed)
        expert, matrix, _ = split_expert(rest)
        parent, is_down = f"{block}.{matrix}.weight", matrix == "down_proj"
        if options.strategy == "random":
            return initial(name, spec, config, seed, like=parent)
        if options.strategy == "exact" and is_down:
            return Origin("zero", value=lambda: torch.zeros(spec.shape), like=parent)
        dim = 1 if is_down else 0

        def take(weight: Tensor) -> Tensor:
            return weight.index_select(dim, units.of(block)[expert])

        if options.strategy == "scaled_halves" and is_down:
            factor = dense_size / (2 * size)
            return Origin("scaled_slice", (parent,), lambda weight: take(weight) * factor, carry=take)
        if options.strategy == "drop_upcycling":

            def take_and_redraw(weight: Tensor) -> Tensor:
                dropped = redrawn_units(size, options.drop_ratio, generator(seed, block, str(expert), "dropped"))
                return redraw(take(weight), dropped, dim, generator(seed, name))

            return Origin("derived", (parent,), take_and_redraw)
        return Origin("slice", (parent,), take)

    exact = options.strategy == "exact"
    return Plan(
        config,
        fill(config, origin_of),
        tolerance=EXACT_TOLERANCE if exact else None,
        loss_tolerance=EXACT_LOSS_TOLERANCE if exact else None,
    )


def _shared(parent: str, strategy: str) -> Origin:
    if strategy == "scaled_halves" and parent.endswith("down_proj.weight"):
        return Origin("scaled_slice", (parent,), lambda weight: weight * 0.5, carry=lambda moment: moment)
    return copied(parent)


class _Units:
    """Which dense units each expert of a block takes: int64 [E, F], the same for gate, up and down."""

    def __init__(self, strategy: str, experts: Mapping[str, int], dense_size: int, size: int, seed: int):
        self.strategy, self.experts, self.dense_size, self.size, self.seed = strategy, experts, dense_size, size, seed
        self.drawn: dict[str, Tensor] = {}

    def of(self, block: str) -> Tensor:
        if block not in self.drawn:
            self.drawn[block] = self._draw(self.experts[block], generator(self.seed, block, "units"))
        return self.drawn[block]

    def _draw(self, experts: int, random: torch.Generator) -> Tensor:
        if self.strategy in ("exact", "scaled_halves"):
            return balanced_draw(experts, self.size, self.dense_size, random)
        draws = 1 if self.strategy in ("clones", "drop_upcycling") else experts
        rows = [torch.randperm(self.dense_size, generator=random)[: self.size].sort().values for _ in range(draws)]
        return torch.stack(rows).expand(experts, self.size) if draws == 1 else torch.stack(rows)
