"""The DeepSpeed engine of a run, with its traps closed, and the parameter groups by role that it trains."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.keep_in_fp32 import keep_in_fp32_pattern
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from lightninglm.distributed.expert_parallel import mark_expert_parameters, sharded_experts
from lightninglm.distributed.grad_norm import GradientNorm
from lightninglm.modeling.parameter_roles import role


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    multipliers: Mapping[str, float],
    new: Collection[str] = (),
) -> list[dict[str, Any]]:
    """
    The trainable parameters by role, for `build_engine`.

    Each group has the keys params, name, role, lr (peak), weight_decay and new. DeepSpeed renames the groups of
    sharded experts and may split them, but keeps the other keys: schedules go by `role` and `new`.

    Args:
        model: with names of parameters as in memory.
        lr: peak learning rate, before the multiplier of the role.
        weight_decay: of matrices and adapters; vectors, scalars and biases are not decayed.
        multipliers: role -> factor of the learning rate.
        new: names of tensors that a growth step has just created; they are warmed up on their own.
    Raises:
        ValueError: a role without a multiplier, or a name in `new` that is not a trainable parameter.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    unknown = sorted(set(new) - set(trainable))
    if unknown:
        raise ValueError(f"new tensors: {unknown[0]!r} is not a trainable parameter of the model ({len(unknown)} such)")
    found: dict[tuple[str, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable.items():
        found.setdefault((role(name), is_decayed(name, parameter), name in new), []).append(parameter)
    groups = []
    for (role_, decayed, is_new), parameters in sorted(found.items(), key=lambda item: item[0]):
        if role_ not in multipliers:
            raise ValueError(f"optimizer.groups has no learning-rate factor for {role_!r}, only {sorted(multipliers)}")
        groups.append(
            {
                "params": parameters,
                "name": role_ + ("" if decayed else "_no_decay") + ("_new" if is_new else ""),
                "role": role_,
                "lr": lr * multipliers[role_],
                "weight_decay": weight_decay if decayed else 0.0,
                "new": is_new,
            }
        )
    return groups


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to weight matrices (stacked ones too) and adapters."""
    return parameter.dim() >= 2 and name.rsplit(".", 1)[-1] in ("weight", "A", "B")


class Engine(DeepSpeedEngine):
    """
    DeepSpeed's engine, with what version 0.19.8 does wrong for this model put right.

    Attributes:
        gradient_norm: the `GradientNorm` of the optimizer steps.
    """

    def __init__(self, model: nn.Module, ds_config: dict[str, Any], groups: list[dict[str, Any]]):
        config = DeepSpeedConfig(ds_config)
        with _scalars_in_zero3():
            super().__init__(args=None, model=model, model_parameters=groups, config=ds_config, config_class=config)
        self.gradient_norm = GradientNorm(self)

    def _broadcast_model(self) -> None:
        """
        Makes every tensor equal on all ranks that hold it; of a sharded expert, on its replicas.

        DeepSpeed broadcasts parameters only, so that ranks could differ in a buffer, and fails on a scalar.
        """
        sharded = {
            tensor: self.expert_data_parallel_group[marker.expert_group_name]
            for marker, stack in sharded_experts(self.module)
            for tensor in (*stack.parameters(), *stack.buffers())
        }
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            group = sharded.get(tensor, self.seq_data_parallel_group)
            dist.broadcast(tensor.data.view(-1).view(torch.uint8), dist.get_global_rank(group, 0), group=group)

    def _cast_module_mixed_precision(self, param_dtype, buffer_dtype, is_zero_init_model, keep_pattern=None) -> None:
        """Casts the parameters, except those that the model keeps in fp32; DeepSpeed spares only such buffers."""
        kept = {
            parameter: parameter.data
            for name, parameter in self.module.named_parameters()
            if keep_pattern is not None and keep_pattern.search(name)
        }
        super()._cast_module_mixed_precision(param_dtype, buffer_dtype, is_zero_init_model, keep_pattern)
        for parameter, data in kept.items():
            parameter.data = data


@contextmanager
def _scalars_in_zero3() -> Iterator[None]:
    """Lets ZeRO 3 partition scalars: as it starts it broadcasts each parameter once more, which fails on a scalar."""

    def partition(init: Init, parameter: nn.Parameter) -> None:
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    original, Init._zero_init_param = Init._zero_init_param, partition
    try:
        yield
    finally:
        Init._zero_init_param = original


def build_engine(model: nn.Module, ds_config: dict[str, Any], groups: list[dict[str, Any]]) -> Engine:
    """
    The engine that trains `model`.

    Args:
        model: materialized. Of tensors that several ranks hold, the first rank's values count.
        ds_config: from `load_ds_config`.
        groups: from `parameter_groups`.
    Raises:
        RuntimeError: the parameter groups differ between ranks.
    """
    mark_expert_parameters(model)
    if ds_config["bf16"]["enabled"]:
        groups = _split_fp32(model, groups, ds_config["data_types"].get("keep_in_fp32_modules"))
    engine = Engine(model, ds_config, groups)
    order = [(group["name"], group["role"], group["new"]) for group in engine.optimizer.param_groups]
    orders = [None] * dist.get_world_size()
    dist.all_gather_object(orders, order)
    for rank, other in enumerate(orders):
        if other != order:
            raise RuntimeError(
                f"parameter groups differ between ranks: {order} here, {other} on rank {rank}. DeepSpeed orders them "
                "by string hashes when a model has several expert-parallel sizes; start with PYTHONHASHSEED=0"
            )
    return engine


def _split_fp32(model: nn.Module, groups: list[dict[str, Any]], setting: str | list[str] | None):
    """ZeRO flattens a group into one tensor: in a bf16 run, parameters that stay in fp32 need groups of their own."""
    pattern = keep_in_fp32_pattern(model, setting, torch.bfloat16)
    kept = {parameter for name, parameter in model.named_parameters() if pattern and pattern.search(name)}
    split = []
    for group in groups:
        for suffix, in_fp32 in (("", False), ("_fp32", True)):
            parameters = [parameter for parameter in group["params"] if (parameter in kept) == in_fp32]
            if parameters:
                split.append({**group, "params": parameters, "name": group["name"] + suffix})
    return split
