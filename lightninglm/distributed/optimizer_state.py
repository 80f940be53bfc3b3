"""
The fp32 state of training, per parameter, in and out of a DeepSpeed 0.19 engine: master copy, Adam moments, Adam step.

ZeRO keeps this state in flat partitions, one range of a flattened parameter on each rank of its data-parallel group.
Here that range is a view (`fragment`): writing to it is local, and a whole parameter is assembled on the one rank that
saves it. DeepSpeed's own `safe_get/set_full_*` calls are not used: their fragments of the moments are linked once, in
the first parameter group's first step, so that they fail for every other group; they hang before the first step; and
they add zeros to the values, which turns -0.0 into 0.0. Adam-like optimizers only.
"""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.layout import EXP_AVG, EXP_AVG_SQ, MASTER

MOMENTS = (EXP_AVG, EXP_AVG_SQ)


class OptimizerState:
    """
    Reads and writes the optimizer state of an engine: ZeRO 0 in fp32, ZeRO 1, 2 and 3 in fp32 and bf16.

    Raises CheckpointError for an engine whose state has another form (bf16 under ZeRO 0, an optimizer that is not
    Adam-like).
    """

    def __init__(self, engine: DeepSpeedEngine):
        self.engine = engine
        self.zero = engine.optimizer
        if isinstance(self.zero, DeepSpeedZeroOptimizer):
            self._flat = self.zero.single_partition_of_fp32_groups
        elif isinstance(self.zero, BF16_Optimizer):
            self._flat = self.zero.fp32_groups_flat_partition
        elif isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            self._flat = self.zero.fp32_partitioned_groups_flat
        elif isinstance(self.zero, torch.optim.Optimizer):
            self._flat = [param for group in self.zero.param_groups for param in group["params"]]
        else:
            raise CheckpointError(
                f"the optimizer state of {type(self.zero).__name__} cannot be saved; "
                "use ZeRO stage 1 (it works on one rank too) instead of stage 0 with bf16 or fp16"
            )
        self.adam = getattr(self.zero, "optimizer", self.zero)
        if "betas" not in self.adam.defaults:
            raise CheckpointError(f"optimizer {type(self.adam).__name__}: only Adam and its like can be saved")
        self._unpartitioned = {id(param) for param in self._flat} if self.zero is self.adam else set()

    def trains(self, param: torch.Tensor) -> bool:
        """Whether the optimizer updates this parameter, that is, whether it has a state. Never true for a buffer."""
        if isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            return hasattr(param, "ds_id") and self.zero.get_param_id(param) in self.zero.grad_position
        return id(param) in self._unpartitioned or hasattr(param, "_hp_mapping")

    @property
    def adam_step(self) -> float:
        """Steps that Adam has made; 0 before the first. Raises CheckpointError when parameters disagree."""
        steps = {float(state["step"]) for state in self.adam.state.values() if "step" in state}
        if len(steps) > 1:
            raise CheckpointError(f"Adam's step differs between parameters: {sorted(steps)}")
        return steps.pop() if steps else 0.0

    def create(self, adam_step: float) -> None:
        """Sets Adam's step, creating what Adam itself creates only in its first step: moments of zero."""
        on_device = self.adam.defaults.get("fused") or self.adam.defaults.get("capturable")
        for flat in self._flat:
            state = self.adam.state[flat]
            for key in MOMENTS:
                if key not in state:
                    state[key] = torch.zeros_like(flat.detach())
            if isinstance(self.adam, torch.optim.Adam):
                state["step"] = torch.tensor(adam_step, dtype=torch.float32, device=flat.device if on_device else "cpu")
            else:  # DeepSpeed's FusedAdam and CPUAdam count in a Python integer
                state["step"] = int(adam_step)

    def fragment(self, param: nn.Parameter, key: str) -> tuple[int, torch.Tensor | None]:
        """
        The part of a parameter's state that this rank keeps.

        Args:
            key: `"master"`, `"exp_avg"` or `"exp_avg_sq"`.
        Returns:
            Where it starts in the flattened parameter, and a 1-D fp32 view of the state itself. The view is None when
            there is nothing: another rank keeps all of it, or Adam has not stepped yet.
        """
        flat, start, offset, length = self._locate(param)
        if length == 0:
            return start, None
        state = flat if key == MASTER else self.adam.state[flat].get(key) if flat in self.adam.state else None
        return start, None if state is None else state.detach().view(-1)[offset : offset + length]

    def gather(self, param: nn.Parameter, key: str, destination: int | None = None) -> torch.Tensor | None:
        """
        A parameter's whole state of one kind, on one rank or on all. Zeros before Adam's first step.

        Collective over the parameter's data-parallel group. Each rank allocates the parameter once, in fp32.

        Args:
            destination: global rank, member of that group, which gets the tensor; the others get None. By default
                all of the group get it.
        """
        start, fragment = self.fragment(param, key)
        group = self._group(param)
        shape = getattr(param, "ds_shape", param.shape)
        if group is None:
            if destination not in (None, dist.get_rank()):
                return None
            return torch.zeros(shape, device=param.device) if fragment is None else fragment.view(shape)
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=param.device)
        if fragment is not None:
            whole[start : start + fragment.numel()] = fragment
        # summed as integers, in which the other ranks' zero bits leave every value as it is, -0.0 too
        if destination is None:
            dist.all_reduce(whole.view(torch.int32), group=group)
            return whole.view(shape)
        dist.reduce(whole.view(torch.int32), destination, group=group)
        return whole.view(shape) if dist.get_rank() == destination else None

    def publish(self) -> None:
        """Copies the master copies into the model's weights on all ranks. Collective; call it after writing masters."""
        if isinstance(self.zero, DeepSpeedZeroOptimizer | BF16_Optimizer):
            self.zero.update_lp_params()
        elif isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            for sub_group in range(len(self._flat)):
                self.zero._reassign_or_swap_out_partitioned_parameters(sub_group)
            for param in self.engine.module.parameters():
                if getattr(param, "ds_persist", False):  # kept gathered between steps: gather the new values
                    param.partition()
                    param.all_gather()

    def _locate(self, param: nn.Parameter) -> tuple[torch.Tensor, int, int, int]:
        """(flat partition, start in the flattened parameter, start in the partition, length) of this rank's part."""
        if id(param) in self._unpartitioned:
            return param, 0, 0, param.numel()
        if isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            group, offset, length = self.zero.grad_position[self.zero.get_param_id(param)]
            start = self.zero._get_param_partition_rank(param) * length
            return self._flat[group], start, offset, max(0, min(length, param.ds_numel - start))
        mapping = param._hp_mapping
        if mapping is None:
            return self._flat[0], 0, 0, 0
        lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
        return self._flat[mapping.param_group_index], lp.start, hp.start, hp.numel

    def _group(self, param: nn.Parameter) -> dist.ProcessGroup | None:
        """The ranks over which the parameter's state is spread; None when every rank has all of it."""
        if id(param) in self._unpartitioned:
            return None
        if isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            return self.zero._get_param_partition_group(param)
        return param._dp_group


def whole_weight(param: nn.Parameter):
    """A context in which a parameter that ZeRO-3 holds in pieces is whole; changes made inside are kept."""
    return deepspeed.zero.GatheredParameters([param], modifier_rank=0, enabled=hasattr(param, "ds_id"))
