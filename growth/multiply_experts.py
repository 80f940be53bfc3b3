"""multiply_experts: every routed expert becomes M.

Exact: the M clones form a group behind a two-level router. The parent's router rows and bias choose the groups
exactly as they chose the parents; inside a group a new member router spreads tokens over the clones with weights that
sum to 1. Equal clones give the parent's output for any member router (docs/model.md, grouped router), so the member
router may start random, and different tokens go to different clones from the first step.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from growth.errors import GrowthError
from growth.operator import (
    EXACT_LOSS_TOLERANCE,
    EXACT_TOLERANCE,
    OperatorOptions,
    Origin,
    Plan,
    Source,
    copied,
    fill,
    generator,
    initial,
    redraw,
    redrawn_units,
    split_expert,
    split_ffn,
    target_config,
    unused,
)
from growth.tensor_table import TensorSpec, tensor_table
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig

ROUTER_NOISE = 0.05  # published: standard deviations of the parent router's weights
REDRAWN_SHARE = 0.5  # published: share of every clone's units that is redrawn
GROUP_PARENTS = {
    "router.group.weight": "router.weight",
    "router.group_bias": "router.logit_bias",
    "router.group_usage_ema": "router.usage_ema",
}


class MultiplyExpertsOptions(OperatorOptions):
    """
    num_experts: routed experts of the target, a multiple M of the source's P. The source's picks per token stay the
        number of groups (exact), so that the target picks K * members_per_group experts.
    members_per_group: k_m, clones picked in each chosen group.
    noise: standard deviation, in units of each tensor's own, of noise on gate and up of every clone but the first
        (exact only; with it the step is no longer exact, and the receipt reports the cost).
    balance, balance_speed: the balance rule of the target; by default the source's.
    strategy:
        exact      groups of clones behind the grouped router
        paper      published: flat router, clone-major order, half of every clone's units redrawn, noisy router rows,
            bias zero
        duplicate  flat router, plain clones and router rows: a baseline
    """

    num_experts: Annotated[int, Field(ge=2)]
    members_per_group: Annotated[int, Field(ge=2)] = 2
    noise: Annotated[float, Field(ge=0)] = 0.0
    balance: Literal["sign", "banded", "none"] | None = None
    balance_speed: Annotated[float, Field(gt=0)] | None = None
    strategy: Literal["exact", "paper", "duplicate"] = "exact"

    @model_validator(mode="after")
    def _noise_is_for_exact(self):
        if self.noise and self.strategy != "exact":
            raise ValueError("noise is an option of strategy exact")
        return self


def plan(source: Source, options: MultiplyExpertsOptions, seed: int) -> Plan:
    _check_source(source, options)
    parents = source.config.num_experts
    clones, rest = divmod(options.num_experts, parents)
    if rest or clones < 2:
        valid = ", ".join(str(parents * m) for m in (2, 3, 4))
        raise GrowthError(
            f"num_experts = {options.num_experts}: must be a multiple of the source's {parents} ({valid}, ...)"
        )
    grouped = options.strategy == "exact"
    config = _target_config(source, options)
    target = tensor_table(config)
    unchanged, keeping = _unchanged_blocks(source.table, target), _blocks_keeping_experts(source.table, target)

    def origin_of(name: str, spec: TensorSpec) -> Origin | None:
        ffn = split_ffn(name)
        if ffn is None or ffn[0] in unchanged or ffn[1].startswith("shared_expert."):
            return copied(name)
        block, rest = ffn
        if grouped and rest in GROUP_PARENTS:
            return copied(f"{block}.{GROUP_PARENTS[rest]}")
        if grouped and rest.startswith("router."):
            return initial(name, spec, config, seed)
        if block in keeping and (rest == "router.weight" or split_expert(rest) is not None):
            return copied(name)
        if rest == "router.weight":
            std = ROUTER_NOISE if options.strategy == "paper" else 0.0
            return Origin("derived", (name,), lambda rows: _noisy(rows.repeat(clones, 1), std * rows.std(), seed, name))
        if rest.startswith("router."):  # biases restart at zero, averages at 1 / E
            return initial(name, spec, config, seed)
        expert, matrix, _ = split_expert(rest)
        if grouped:
            return clone(name, f"{block}.experts.{expert // clones}.{matrix}.weight", expert % clones, matrix)
        parent = f"{block}.experts.{expert % parents}.{matrix}.weight"
        if options.strategy == "paper":
            return redrawn(name, parent, block, expert, matrix)
        return Origin("clone", (parent,), clones=clones)

    def clone(name: str, parent: str, member: int, matrix: str) -> Origin:
        if options.noise == 0 or member == 0 or matrix == "down_proj":
            return Origin("clone", (parent,), clones=clones)
        return Origin(
            "noisy_clone",
            (parent,),
            lambda weight: _noisy(weight, options.noise * weight.float().std(), seed, name),
            carry=lambda moment: moment,
            clones=clones,
        )

    def redrawn(name: str, parent: str, block: str, expert: int, matrix: str) -> Origin:
        def formula(weight: Tensor) -> Tensor:
            dim = 1 if matrix == "down_proj" else 0
            units = redrawn_units(weight.shape[dim], REDRAWN_SHARE, generator(seed, block, str(expert), "redrawn"))
            return redraw(weight, units, dim, generator(seed, name))

        return Origin("derived", (parent,), formula)

    origins = fill(config, origin_of)
    reason = f"strategy {options.strategy}: the flat router starts with its own biases and averages"
    if grouped:
        reason = "without null slots nothing reads it"
    dropped = {name: reason for name in unused(source, origins) if _may_drop(name, grouped)}
    exact = grouped and options.noise == 0
    return Plan(
        config,
        origins,
        dropped,
        tolerance=EXACT_TOLERANCE if exact else None,
        loss_tolerance=EXACT_LOSS_TOLERANCE if exact else None,
    )


def _may_drop(name: str, grouped: bool) -> bool:
    """Source tensors that the target has no place for: an unused null logit, and what a new flat router replaces."""
    return name.endswith("router.null_logit") if grouped else ".router." in name


def _check_source(source: Source, options: MultiplyExpertsOptions) -> None:
    config = source.config
    if config.num_experts == 0:
        raise GrowthError("multiply_experts needs a mixture of experts; the source is dense (dense_to_moe makes one)")
    if config.router_layout != "flat":
        raise GrowthError(
            f"multiply_experts needs a flat router; the source's is {config.router_layout!r} (see flatten_router)"
        )
    if config.expert_quantization is not None:
        raise GrowthError("multiply_experts needs unquantized experts; multiply first, then quantize_experts")
    if options.strategy == "exact" and (config.router_scoring != "sigmoid" or config.num_null_experts):
        raise GrowthError(
            "multiply_experts exact needs config.router_scoring = 'sigmoid' and num_null_experts = 0, which the "
            f"grouped router keeps exactly; the source has {config.router_scoring!r} and {config.num_null_experts}"
        )


def _target_config(source: Source, options: MultiplyExpertsOptions) -> LightningLMConfig:
    picks = source.config.num_experts_per_tok
    changes = {"num_experts": options.num_experts, "num_experts_per_tok": picks * options.members_per_group}
    if options.strategy == "exact":
        changes |= {
            "router_layout": "grouped",
            "num_expert_groups": source.config.num_experts,
            "groups_per_token": picks,
            "members_per_group": options.members_per_group,
        }
    else:
        changes |= {"router_scoring": "sigmoid", "num_null_experts": 0, "null_renorm": False}
        if source.config.balance == "aux":  # the published softmax router's losses; a sigmoid router has none
            changes["balance"] = "banded"
    for name in ("balance", "balance_speed"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    return target_config(source, **changes)


def _unchanged_blocks(source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]) -> set[str]:
    """FFN blocks that the target's model builds as the source's does (a second-token block may keep its experts)."""

    def blocks(table):
        result = {}
        for name, spec in table.items():
            if ffn := split_ffn(name):
                result.setdefault(ffn[0], {})[name] = spec
        return result

    before = blocks(source)
    return {block for block, specs in blocks(target).items() if before.get(block) == specs}


def _blocks_keeping_experts(source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]) -> set[str]:
    """FFN blocks with as many routed experts as before, maybe behind another kind of router (a second-token block)."""
    routers = [name for name in target if name.endswith(".router.weight")]
    return {split_ffn(name)[0] for name in routers if target[name].shape == source[name].shape}


def _noisy(weight: Tensor, std: float | Tensor, seed: int, name: str) -> Tensor:
    noise = torch.randn(weight.shape, generator=generator(seed, name, "noise"))
    return weight.float() + noise * std
