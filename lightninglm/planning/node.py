"""Whether the machine at hand can hold a stage, from the ledger; asked before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightninglm.planning.devices import CPU_OVERHEAD_BYTES, GIB, OVERHEAD_BYTES, needed_bytes
from lightninglm.planning.plan import Setting, peak_bytes, smallest_change


class NodeTooSmallError(ValueError):
    """The machine has fewer GPUs or less memory than a stage needs; the message says what would fit."""


@dataclass(frozen=True)
class Machine:
    """gpus: it has, 0 when ranks run on the CPU. memory: GiB that each rank can have."""

    gpus: int
    memory: float

    @property
    def overhead(self) -> int:
        """Bytes of a rank besides its tensors."""
        return OVERHEAD_BYTES if self.gpus else CPU_OVERHEAD_BYTES


def needed_on(setting: Setting, machine: Machine) -> int:
    """Bytes that one rank of the stage needs there."""
    return needed_bytes(peak_bytes(setting.state(), setting.activations()), machine.overhead)


def check_machine(settings: Mapping[str, Setting], ranks: int, machine: Machine) -> None:
    """
    Refuses a machine that one of the stages does not fit.

    Args:
        settings: by name of the stage.
        ranks: on this machine.
    Raises NodeTooSmallError with a line for every such stage, and the fewest changes that make it fit.
    """
    if machine.gpus and ranks > machine.gpus:
        raise NodeTooSmallError(
            f"{ranks} ranks need {ranks} GPUs, this node has {machine.gpus}: --num-gpus {machine.gpus}, with a "
            "train.expert_parallel that divides it"
        )
    problems = []
    for name, setting in settings.items():
        needed = needed_on(setting, machine)
        if needed <= machine.memory * GIB:
            continue
        change = smallest_change(setting, machine.memory, machine.overhead)
        fits = (
            "nothing here makes it fit: more or larger GPUs" if change is None else f"it fits with {', '.join(change)}"
        )
        what = "each GPU" if machine.gpus else f"each of {ranks} CPU ranks"
        problems.append(
            f"stage '{name}' needs {needed / GIB:.1f} GiB per rank, {what} has {machine.memory:.1f}; {fits}"
        )
    if problems:
        raise NodeTooSmallError("\n".join(problems) + "\n--no-memory-check starts anyway")
