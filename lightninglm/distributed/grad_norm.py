"""The gradient norm of one optimizer step, whole and per role, over all ranks and experts, from one all-reduce.

Every element of the global gradient is counted on exactly one rank: its owner's partition under ZeRO, and under ZeRO 0
rank 0 for dense parameters and the first replica for experts. DeepSpeed's ZeRO 0 averages the norms of ranks that hold
different experts, and takes non-finite gradients into the weights; both are replaced here. Its ZeRO 1 and 2 need two
collectives per parameter group; ours gives the same number.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

CLIP_EPSILON = 1e-6  # as in DeepSpeed, so that all ZeRO stages clip alike


class GradientNorm:
    """
    Measures the gradient of every optimizer step of an engine, before the clip.

    Created by `build_engine` as `engine.gradient_norm`. The norm is that of the gradient averaged over ranks and
    micro-batches, equal on all ranks and equal to a one-process run. A step with a non-finite norm is skipped on all
    ranks under every ZeRO stage, and counted in `engine.skipped_steps`.
    """

    def __init__(self, engine):
        self.engine = engine
        self.roles = sorted({group["role"] for group in engine.optimizer.param_groups})
        self._squares = torch.zeros(len(self.roles), dtype=torch.float64, device=engine.device)
        self._step = engine.optimizer.step
        engine.optimizer.step = self._measured_step
        if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
            engine.optimizer.scaled_global_norm = self.total  # without a loss scale in bf16 and fp32
        elif engine.zero_optimization_stage() == 0:
            engine.clip_fp32_gradients = lambda: None  # clipped in the step

    def total(self) -> torch.Tensor:
        """The norm of the last step's whole gradient, a fp32 scalar on the device."""
        return self._squares.sum().sqrt().float()

    def values(self) -> dict[str, float]:
        """The norm of the last step: `"total"` and one value per role. One host read."""
        squares = self._squares.tolist()
        return {"total": sum(squares) ** 0.5, **{role: s**0.5 for role, s in zip(self.roles, squares, strict=True)}}

    def set_limit(self, limit: float) -> None:
        """Changes the largest norm that the next steps let through; 0 for no clipping."""
        self.engine._config.gradient_clipping = limit
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = limit

    @torch.no_grad()
    def discard(self) -> None:
        """Makes the coming optimizer step one that is skipped: called on all ranks after the last backward pass."""
        for _, gradient in owned_gradients(self.engine):
            gradient.fill_(torch.nan)

    @torch.no_grad()
    def _measured_step(self) -> None:
        self._squares.zero_()
        for role, gradient in owned_gradients(self.engine):
            self._squares[self.roles.index(role)] += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        dist.all_reduce(self._squares)
        if self.engine.zero_optimization_stage() == 0:
            self._clipped_step()
        else:
            self._step()

    def _clipped_step(self) -> None:
        """ZeRO 0: clips and updates, or skips the step as DeepSpeed's other optimizers do."""
        optimizer, norm, limit = self.engine.optimizer, self.total(), self.engine.gradient_clipping()
        self.engine._global_grad_norm = norm
        optimizer.overflow = not bool(norm.isfinite())
        if optimizer.overflow:
            return
        if limit > 0:
            factor = 1 / ((norm + CLIP_EPSILON) / limit).clamp(min=1)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
        self._step()


def owned_gradients(engine) -> Iterator[tuple[str, torch.Tensor]]:
    """(role, gradient) of what this rank owns after the last backward pass of a step; the ranks' parts are disjoint."""
    optimizer = engine.optimizer
    match optimizer:
        case BF16_Optimizer():
            for group, gradient in zip(
                optimizer.param_groups, optimizer.fp32_groups_gradient_flat_partition, strict=True
            ):
                yield group["role"], gradient
        case DeepSpeedZeroOptimizer_Stage3():
            for sub_group, gradients in optimizer.averaged_gradients.items():
                role = optimizer.param_groups[optimizer.sub_group_to_group_id[sub_group]]["role"]
                yield from ((role, gradient) for gradient in gradients)
        case DeepSpeedZeroOptimizer():
            for i, group in enumerate(optimizer.param_groups):
                yield from ((group["role"], gradient) for gradient in optimizer.averaged_gradients[i])
        case _:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and _is_first_replica(parameter):
                        yield group["role"], parameter.grad


def _is_first_replica(parameter: torch.nn.Parameter) -> bool:
    if is_moe_param(parameter):
        return dist.get_rank(groups._get_expert_data_parallel_group(parameter.group_name)) == 0
    return dist.get_rank() == 0
