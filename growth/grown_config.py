"""The configurations that growth steps lead to, from a configuration alone: no checkpoint is read or written."""

from collections.abc import Mapping, Sequence
from typing import Any

from growth.job import OPERATORS, parse_options
from growth.operator import Source
from growth.tensor_table import tensor_table
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig


def grown_configs(
    config: LightningLMConfig, steps: Sequence[Mapping[str, Mapping[str, Any]]], seed: int = 0
) -> list[LightningLMConfig]:
    """
    The configuration after each of `steps` (each `{operator: options}`, as a recipe lists them).

    Step sizes that a `deepen` lets rise are the ones at the end of the rise.

    Raises:
        GrowthError: an option is unknown, or the operator cannot be applied to such a model. `resize_vocabulary` never
            can: what it does depends on the source's tokenizer.
    """
    configs = []
    for step in steps:
        ((operator, options),) = step.items()
        source = Source(config, tensor_table(config), trainer_state={}, tokens=())
        plan = OPERATORS[operator][1](source, parse_options(operator, options), seed)
        config = plan.config
        if plan.step_size_ramp is not None:
            config.step_sizes = list(plan.step_size_ramp["to"])
        configs.append(config)
    return configs
