"""flatten_router: the grouped router becomes a flat sigmoid router over all experts.

For when specialisation has made groups needless. Not exact: picks are no longer bound to k_g groups, and weights are
normalised sigmoid scores instead of a softmax inside each group. The receipt reports the cost.

Row of expert (g, m), in logits: group row g + member row (g, m). Its selection bias: b^G_g + b^M_{g,m} / 4, because
b^M was added to a logit and the flat bias is added to a sigmoid score, whose slope is at most 1/4. Its load average:
u_g u_{m|g}.
"""

from typing import Literal

from growth.errors import GrowthError
from growth.operator import OperatorOptions, Origin, Plan, Source, copied, fill, split_ffn, target_config
from growth.tensor_table import TensorSpec

SIGMOID_SLOPE = 0.25


class FlattenRouterOptions(OperatorOptions):
    """No options of its own. The target picks as many experts per token as the source."""

    strategy: Literal["sum_of_rows"] = "sum_of_rows"


def plan(source: Source, options: FlattenRouterOptions, seed: int) -> Plan:
    if source.config.num_experts == 0 or source.config.router_layout != "grouped":
        raise GrowthError("flatten_router needs a mixture of experts with config.router_layout = 'grouped'")
    config = target_config(source, router_layout="flat", num_expert_groups=0, groups_per_token=2, members_per_group=0)

    def origin_of(name: str, spec: TensorSpec) -> Origin | None:
        ffn = split_ffn(name)
        if ffn is None or not ffn[1].startswith("router.") or name in source.table:
            return copied(name)
        router = f"{ffn[0]}.router"
        if name == f"{router}.weight":
            return Origin("derived", (f"{router}.group.weight", f"{router}.member.weight"), _rows)
        if name == f"{router}.logit_bias":
            return Origin("derived", (f"{router}.group_bias", f"{router}.member_bias"), _bias)
        if name == f"{router}.usage_ema":
            return Origin("derived", (f"{router}.group_usage_ema", f"{router}.member_usage_ema"), _usage)
        return None

    return Plan(config, fill(config, origin_of))


def _rows(group, member):
    """[P, H], [P * M, H] -> [P * M, H], rows e = g * M + m."""
    return group.repeat_interleave(member.shape[0] // group.shape[0], dim=0) + member


def _bias(group, member):
    """[P], [P, M] -> [P * M]."""
    return (group[:, None] + SIGMOID_SLOPE * member).flatten()


def _usage(group, member):
    """[P], [P, M] -> [P * M]."""
    return (group[:, None] * member).flatten()
