"""Finds what was not finite first in a skipped step, and on which rank."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

WEIGHT, LAYER, GRADIENT = range(3)


@dataclass(frozen=True, order=True)
class Fault:
    """The first non-finite tensor of a rank. kind: a weight comes before a layer's output, that before a gradient."""

    kind: int
    rank: int
    tensor: str

    def __str__(self) -> str:
        return f"{self.tensor} on rank {self.rank}"


class GradientWatch:
    """
    Looks at every gradient as the backward pass makes it: before the sum over ranks, which spreads a NaN to all.

    Costs a read of every gradient, so it is on only while steps are being skipped. No wait for the device.
    """

    def __init__(self, model: nn.Module):
        self._seen: list[tuple[str, torch.Tensor]] = []
        self._handles = [
            parameter.register_hook(lambda gradient, name=name: self._look(name, gradient))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def _look(self, name: str, gradient: torch.Tensor) -> None:
        self._seen.append((name, gradient.isfinite().all()))

    def first(self) -> str | None:
        """The parameter whose gradient was not finite first since `clear`."""
        return next((name for name, finite in self._seen if not finite), None)

    def clear(self) -> None:
        """Forgets what was seen; to be called after every optimizer step."""
        self._seen.clear()

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()


def first_fault(model: nn.Module, watch: GradientWatch | None, layer_errors: list[str]) -> Fault | None:
    """
    The first non-finite tensor over all ranks, the same answer on each: a collective call.

    Args:
        watch: of the step's backward passes, if it was on.
        layer_errors: this rank's `ReversibilityReport.range_errors` of the step.
    """
    rank, fault = dist.get_rank(), None
    gradient = watch.first() if watch else None
    if (weight := _first_weight(model)) is not None:
        fault = Fault(WEIGHT, rank, f"weight {weight}")
    elif layer_errors:
        fault = Fault(LAYER, rank, layer_errors[0])
    elif gradient is not None:
        fault = Fault(GRADIENT, rank, f"gradient of {gradient}")
    faults = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    return min(filter(None, faults), default=None)


def _first_weight(model: nn.Module) -> str | None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((n for n, t in tensors if t.is_floating_point() and not bool(t.isfinite().all())), None)
