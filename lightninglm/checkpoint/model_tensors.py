"""The tensors of a model in memory and the tensors they are on disk: all that is persistent, real experts only."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.layout import is_stacked, to_disk_name
from lightninglm.checkpoint.writer import CheckpointWriter


@dataclass(frozen=True)
class ModelTensor:
    """
    A parameter or persistent buffer of a model, as this process holds it.

    Attributes:
        name: its name in memory.
        tensor: the parameter or buffer. Experts are stacked, [num_local_experts, ...], padding rows last.
        experts: the module of a stacked tensor (it says which experts the rows are); None for any other tensor.
    """

    name: str
    tensor: torch.Tensor
    experts: nn.Module | None

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor, also while ZeRO-3 holds it in pieces."""
        return getattr(self.tensor, "ds_shape", self.tensor.shape)

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """Shape of each tensor on disk."""
        return tuple(self.shape if self.experts is None else self.shape[1:])

    @property
    def disk_numel(self) -> int:
        """Elements of each tensor on disk."""
        return torch.Size(self.disk_shape).numel()

    @property
    def disk_names(self) -> list[str]:
        """The tensors on disk of which this process holds the values, in the order of the rows."""
        if self.experts is None:
            return [self.name]
        start = self.experts.expert_start
        return [to_disk_name(self.name, expert) for expert in range(start, start + self.experts.expert_count)]

    @property
    def all_disk_names(self) -> list[str]:
        """The same for the whole model: the experts of all ranks."""
        if self.experts is None:
            return [self.name]
        return [to_disk_name(self.name, expert) for expert in range(self.experts.num_experts)]

    def split(self, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Pairs of disk name and value from `values`, which has the shape of `tensor`. Padding is left out."""
        rows = [values] if self.experts is None else values.unbind()
        return zip(self.disk_names, rows, strict=self.experts is None)


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Every parameter and persistent buffer of a model, each once, in the order of its modules."""
    modules = dict(model.named_modules())
    found, seen = [], set()
    for prefix, module in modules.items():
        buffers = ((k, b) for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set)
        for key, tensor in [*module._parameters.items(), *buffers]:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = f"{prefix}.{key}" if prefix else key
            experts = modules[name.rpartition(".experts.")[0] + ".experts"] if is_stacked(name) else None
            found.append(ModelTensor(name, tensor, experts))
    return found


def add_model(writer: CheckpointWriter, model: nn.Module) -> None:
    """
    Adds all weights and buffers of a model that one process holds whole. There is no optimizer state in it.

    Raises CheckpointError when the process holds a part of the experts only.
    """
    for item in model_tensors(model):
        if len(item.disk_names) != len(item.all_disk_names):
            raise CheckpointError(
                f"{item.name}: {len(item.disk_names)} of {len(item.all_disk_names)} experts are here; "
                "save a model that is spread over ranks with distributed.checkpointing.save_checkpoint"
            )
        for name, value in item.split(item.tensor):
            writer.add(name, value)
