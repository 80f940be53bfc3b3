"""What changes from step to step: the learning rate, the warm-up of new tensors, the ramp of zero-step layers."""

import math
from typing import Any, Protocol


class ScheduleLike(Protocol):
    """The `schedule` section of a recipe."""

    kind: str
    warmup_steps: int
    warmup_from: float | str
    stable_fraction: float
    final_ratio: float


def learning_rate_factor(step: int, total_steps: int, schedule: ScheduleLike, last: float | None = None) -> float:
    """
    Multiplier of the peak learning rate for optimizer step `step` (0-based) of `total_steps`.

    Warm-up rises linearly from `warmup_from` (a fraction of the peak) and reaches 1 on step `warmup_steps`. After it:
    `constant` stays at 1; `cosine` falls to `final_ratio` at the last step (Loshchilov and Hutter, 2017); `wsd` stays
    at 1 until `stable_fraction` of all steps are done, then falls linearly to `final_ratio` (Hu et al., 2024).

    last: the parent stage's last learning rate over this peak, above 1 when it was higher; for `warmup_from: last`.
    """
    if step < schedule.warmup_steps:
        start = last if schedule.warmup_from == "last" else schedule.warmup_from
        return start + (1 - start) * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    decay_start = schedule.warmup_steps
    if schedule.kind == "wsd":
        decay_start = max(decay_start, round(schedule.stable_fraction * total_steps))
    if step < decay_start:
        return 1.0
    progress = min(1.0, (step - decay_start + 1) / max(1, total_steps - decay_start))
    if schedule.kind == "wsd":
        return 1.0 + (schedule.final_ratio - 1.0) * progress
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def new_tensor_factor(step: int, warmup_steps: int) -> float:
    """
    Extra multiplier for tensors that a growth step added: linear over their own first `warmup_steps` steps.

    Their second moment starts at zero, so the first Adam steps would be (1 - beta1) / sqrt(1 - beta2) times the
    learning rate whatever the gradient is.
    """
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def ramped_step_sizes(step: int, ramp: dict[str, Any] | None) -> list[float] | None:
    """
    Step sizes h_n of the layers for optimizer step `step` (0-based), or None when nothing ramps.

    `ramp` is `{"from": [...], "to": [...], "steps": n}` as `deepen` writes it: linear, at `to` after n steps.
    """
    if ramp is None:
        return None
    share = min(1.0, (step + 1) / ramp["steps"])
    return [a + (b - a) * share for a, b in zip(ramp["from"], ramp["to"], strict=True)]
