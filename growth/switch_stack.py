"""switch_stack: the layers run as another kind of stack, with the same weights and the same optimizer state.

Published: the dense seed runs its layers one after the other, every later stage as a midpoint stack. On trained weights
this changes the function much more than any growth step does; the receipt says by how much. A seed that runs as a
midpoint stack from the start never needs it.
"""

from typing import Literal

from growth.errors import GrowthError
from growth.operator import OperatorOptions, Plan, Source, copied, fill, target_config

Stack = Literal["midpoint", "sequential"]


class SwitchStackOptions(OperatorOptions):
    """
    stack: midpoint (reversible) or sequential. Step sizes and blends of the layers stay those of the configuration.
    mtp_stack: likewise of the second-token layer; by default as it is.
    """

    stack: Stack
    mtp_stack: Stack | None = None

    @property
    def strategy(self) -> str:
        """What the receipt calls it."""
        return self.stack


def plan(source: Source, options: SwitchStackOptions, seed: int) -> Plan:
    now = {"stack": source.config.stack, "mtp_stack": source.config.mtp_stack}
    changes = {name: value for name in now if (value := getattr(options, name)) is not None}
    if changes.items() <= now.items():
        raise GrowthError(f"switch_stack: the source's config has {changes} already, there is nothing to switch")
    config = target_config(source, **changes)
    return Plan(config, fill(config, lambda name, spec: copied(name)))
