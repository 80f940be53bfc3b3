"""carry_over: the same model in a new stage, every tensor and all of the optimizer's state as they are.

What a recipe with `grow: {from: ..., steps: []}` does: a stage that only trains on, with other data, another length or
another schedule. Unfinished ramps of step sizes go on where they are; tensors whose own warm-up was not over warm up
again.
"""

from typing import Literal

from growth.operator import EXACT_LOSS_TOLERANCE, EXACT_TOLERANCE, OperatorOptions, Plan, Source, copied, fill


class CarryOverOptions(OperatorOptions):
    """No options of its own."""

    strategy: Literal["exact"] = "exact"


def plan(source: Source, options: CarryOverOptions, seed: int) -> Plan:
    origins = fill(source.config, lambda name, spec: copied(name))
    return Plan(source.config, origins, tolerance=EXACT_TOLERANCE, loss_tolerance=EXACT_LOSS_TOLERANCE)
