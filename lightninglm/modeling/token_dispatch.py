"""
Moving tokens to their experts and back, deterministically: permutations and ordered sums, no atomics.

The layer sees a `TokenDispatcher`; whether the experts are local or on other ranks is hidden behind it.
T tokens, K picks per token, R rows (the picks of real experts), H hidden size, E local experts.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable


class SortedPicks(NamedTuple):
    """
    The picks of T tokens, sorted by expert and, within one, by token.

    Attributes:
        order: [R] int64, row -> flat pick t * K + k.
        rows: [T, K] int64, pick -> row; 0 for a null pick.
        is_null: [T, K] bool, True where the pick has no row; None when every pick has one.
        counts: [E] int64, rows of each expert.
    """

    order: torch.Tensor
    rows: torch.Tensor
    is_null: torch.Tensor | None
    counts: torch.Tensor

    def without_null(self, num_rows: int) -> "SortedPicks":
        """The first `num_rows` rows, those of real picks: null picks are sorted last."""
        if num_rows == self.order.numel():
            return self
        is_null = self.rows >= num_rows
        return self._replace(order=self.order[:num_rows], rows=self.rows.masked_fill(is_null, 0), is_null=is_null)


def sort_picks(experts_TK: torch.Tensor, num_experts: int, null_picks: bool = True) -> SortedPicks:
    """
    Sorts picks by expert, stably.

    Args:
        experts_TK: [T, K] int64, expert numbers below num_experts; -1 for a null pick.
        num_experts: E.
        null_picks: whether null picks are taken off here; for that the host reads how many there are.
    """
    picks = experts_TK.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=picks.device)
    keys = torch.where(picks < 0, num_experts, picks)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    order = keys.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.numel(), device=order.device)
    sorted_picks = SortedPicks(order, rows.view_as(experts_TK), None, counts[:num_experts])
    return sorted_picks.without_null(int(sorted_picks.counts.sum())) if null_picks else sorted_picks


class _GatherTokens(torch.autograd.Function):
    """rows[r] = x[order[r] // K]; the backward pass sums the K rows of a token in pick order."""

    @staticmethod
    def forward(ctx, x_TH, picks: SortedPicks):
        ctx.picks = picks
        return x_TH.index_select(0, picks.order // picks.rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RH):
        picks = ctx.picks
        grad_TH = grad_RH.new_zeros(picks.rows.shape[0], grad_RH.shape[1], dtype=torch.float32)
        if grad_RH.shape[0]:
            for k in range(picks.rows.shape[1]):
                term_TH = grad_RH.index_select(0, picks.rows[:, k])
                if picks.is_null is not None:
                    term_TH = term_TH.masked_fill(picks.is_null[:, k, None], 0)
                grad_TH += term_TH
        return grad_TH.to(grad_RH.dtype), None


class _WeightedSum(torch.autograd.Function):
    """
    y[t] = sum over k, in pick order, of w[t, k] * rows[row of (t, k)].

    fp32 rows are added up in fp64 and rounded once, so that equal rows whose weights sum to 1 give that row, bit for
    bit: a group of identical experts computes exactly what one of them would (growth of experts relies on it).
    """

    @staticmethod
    def forward(ctx, y_RH, weights_TK, picks: SortedPicks):
        ctx.picks = picks
        ctx.save_for_backward(y_RH, weights_TK)
        dtype = torch.float64 if y_RH.dtype == torch.float32 else torch.float32
        scales_TK = weights_TK.to(dtype)
        sum_TH = y_RH.new_zeros(weights_TK.shape[0], y_RH.shape[1], dtype=dtype)
        if y_RH.shape[0]:
            for k in range(weights_TK.shape[1]):
                sum_TH.addcmul_(y_RH.index_select(0, picks.rows[:, k]).to(dtype), scales_TK[:, k, None])
        return sum_TH.float()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH):
        y_RH, weights_TK = ctx.saved_tensors
        picks = ctx.picks
        grad_y = grad_weights = None
        if ctx.needs_input_grad[0]:
            scale_R = weights_TK.flatten().index_select(0, picks.order).to(grad_TH.dtype)
            grad_y = grad_TH.index_select(0, picks.order // weights_TK.shape[1]).mul_(scale_R[:, None]).to(y_RH.dtype)
        if ctx.needs_input_grad[1]:
            grad_weights = torch.zeros_like(weights_TK)
            if y_RH.shape[0]:
                for k in range(weights_TK.shape[1]):
                    y_TH = y_RH.index_select(0, picks.rows[:, k]).float()
                    grad_weights[:, k] = (y_TH * grad_TH).sum(-1)
            if picks.is_null is not None:
                grad_weights.masked_fill_(picks.is_null, 0)
        return grad_y, grad_weights, None


class _PermuteRows(torch.autograd.Function):
    """y[r] = x[order[r]] for a permutation; the backward pass is the inverse permutation."""

    @staticmethod
    def forward(ctx, x_RH, order_R, inverse_R):
        ctx.inverse_R = inverse_R
        return x_RH.index_select(0, order_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RH):
        return grad_RH.index_select(0, ctx.inverse_R), None, None


def gather_tokens(x_TH: torch.Tensor, picks: SortedPicks) -> torch.Tensor:
    """One row per real pick, [R, H], in the order of `picks`."""
    return _GatherTokens.apply(x_TH, picks)


def weighted_sum(y_RH: torch.Tensor, weights_TK: torch.Tensor, picks: SortedPicks) -> torch.Tensor:
    """
    The weighted sum of each token's rows, [T, H] fp32, added in pick order.

    Args:
        y_RH: [R, H], rows in the order of `picks`.
        weights_TK: [T, K], fp64 as routers give them (or fp32); the weight of a null pick must be 0.
    """
    return _WeightedSum.apply(y_RH, weights_TK, picks)


def permute_rows(x_RH: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor) -> torch.Tensor:
    """Reorders rows by a permutation, given with its inverse (inverse[order] = 0, 1, 2, ...)."""
    return _PermuteRows.apply(x_RH, order_R, inverse_R)


class TokenDispatcher(ABC):
    """
    Brings the tokens to the experts that this process holds, and their outputs back to the tokens.

    In three calls, so that what does not depend on the experts can be computed while the tokens are on their way:
    `dispatch` sends them, `receive` waits for those that arrive, `combine` returns the outputs of the experts.
    """

    @abstractmethod
    def dispatch(self, x_TH: torch.Tensor, experts_TK: torch.Tensor) -> Any:
        """
        Args:
            x_TH: [T, H] tokens of this process.
            experts_TK: [T, K] int64, global expert numbers, -1 for a null pick.
        Returns:
            The state that `receive`, once, and `combine` take.
        """

    @abstractmethod
    def receive(self, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (rows [R, H] sorted by local expert, rows per local expert [E_local] int64)."""

    @abstractmethod
    def combine(self, y_RH: torch.Tensor, weights_TK: torch.Tensor, state: Any) -> torch.Tensor:
        """The sum over picks of weight times expert output, [T, H] fp32, added in pick order."""


class LocalDispatcher(TokenDispatcher):
    """
    All experts are in this process: a permutation there and an ordered sum back.

    Args:
        num_experts: experts of the layer.
        null_picks: whether the router has null slots, see `sort_picks`.
    """

    def __init__(self, num_experts: int, null_picks: bool = True):
        self.num_experts = num_experts
        self.null_picks = null_picks

    def dispatch(self, x_TH, experts_TK):
        return x_TH, sort_picks(experts_TK, self.num_experts, self.null_picks)

    def receive(self, state):
        x_TH, picks = state
        return gather_tokens(x_TH, picks), picks.counts

    def combine(self, y_RH, weights_TK, state):
        return weighted_sum(y_RH, weights_TK, state[1])
