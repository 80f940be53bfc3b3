"""Loss-free load balancing (Wang et al., 2024): after an optimizer step, selection biases move against the load."""

import torch

USAGE_DECAY = 0.99  # of the running mean of the load, per optimizer step
MAX_BAND_STEP = 20.0  # a bias moves by at most this many times the speed in one step


def sign_rule(counts: torch.Tensor, speed: float) -> torch.Tensor:
    """
    The change of the biases: speed * sign(1/n - f), f the share of each of the n entries of the last dimension.

    Args:
        counts: int64 [..., n], picks of the whole optimizer step, over all ranks. The sign is exact.
        speed: gamma.
    """
    total = counts.sum(-1, keepdim=True)
    return speed * torch.sign(total - counts.shape[-1] * counts).float()


def banded_rule(usage: torch.Tensor, speed: float, band: tuple[float, float], gain: float) -> torch.Tensor:
    """
    The change of the biases: the sign rule inside a band of load, faster the further an entry is outside of it.

    With lo, hi = band / n, an entry below lo moves up by speed * min(20, 1 + gain * ((lo - u) / lo)^2), one above hi
    moves down by the same law of (u - hi) / hi, all others move by speed * sign(1/n - u).

    Args:
        usage: fp32 [..., n], running mean u of the load shares.
        speed: gamma.
        band: lower and upper edge as multiples of the uniform load 1/n.
        gain: kappa.
    """
    n = usage.shape[-1]
    low, high = band[0] / n, band[1] / n

    def step(excess):
        return (1 + gain * excess.square()).clamp(max=MAX_BAND_STEP)

    inside = torch.sign(1 / n - usage)
    below, above = step((low - usage) / low), -step((usage - high) / high)
    return speed * torch.where(usage < low, below, torch.where(usage > high, above, inside))


@torch.no_grad()
def update_bias(
    bias: torch.Tensor,
    usage: torch.Tensor,
    counts: torch.Tensor,
    *,
    rule: str,
    speed: float,
    band: tuple[float, float],
    gain: float,
    center: bool = True,
    min_count: int = 1,
) -> None:
    """
    Updates, in place, the biases and the running load of every row of the last dimension, from one step's counts.

    Args:
        bias: fp32 [..., n], added to the scores for selection only.
        usage: fp32 [..., n], running mean of the load, starts at 1/n.
        counts: int64 [..., n], picks of real tokens in the optimizer step, summed over micro-batches and ranks.
        rule: `"sign"`, `"banded"`, or another balance mode, which only updates `usage`.
        center: subtract the mean of the biases, which changes no selection and stops a common drift.
        min_count: a row with fewer picks keeps its bias and usage.
    """
    total = counts.sum(-1, keepdim=True)
    enough = total >= min_count
    load = (counts.double() / total.clamp(min=1)).float()
    usage.copy_(torch.where(enough, USAGE_DECAY * usage + (1 - USAGE_DECAY) * load, usage))
    if rule == "sign":
        change = sign_rule(counts, speed)
    elif rule == "banded":
        change = banded_rule(usage, speed, band, gain)
    else:
        return
    moved = bias + change
    if center:
        moved = moved - moved.mean(-1, keepdim=True)
    bias.copy_(torch.where(enough, moved, bias))
