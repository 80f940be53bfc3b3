"""
The gated sparse-attention mixer: softmax attention over the few keys that an indexer picks for each query.

Shapes: B batch, T queries, S keys (cached ones first), H hidden size, J heads, D head dim, Z = B * J, I indexer heads,
U indexer head dim, C queries of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .documents import document_starts, fill_padding
from .layer_context import LayerContext
from .rotary import apply_rotary

INDEXER_TEMPERATURE = 4.0  # kappa: the indexer's scores lie in (0, I), a softmax over them needs sharpening
EMA_DECAY = 0.99
UNSET_EMA = 1.0  # variance_ema before its first update
BLOCK_LENGTH = 128
MAX_STORED_KEYS = 1024  # above, blocks are recomputed in the backward pass: O(C S) memory instead of O(T S)


class Indexer(nn.Module):
    """
    Scores every key for every query, without rotary embedding:

        c[t, s] = sum_i sigmoid(w_ti) sigmoid(q_ti . k_s / sqrt(U) + gate_bias_i)

    Args:
        config: reads hidden_size, indexer_num_heads (I), indexer_head_dim (U).
    """

    def __init__(self, config):
        super().__init__()
        H, I, U = config.hidden_size, config.indexer_num_heads, config.indexer_head_dim
        self.num_heads, self.head_dim = I, U
        self.q_proj = nn.Linear(H, I * U, bias=False)
        self.k_proj = nn.Linear(H, U, bias=False)
        self.w_proj = nn.Linear(H, I, bias=False)
        self.gate_bias = nn.Parameter(torch.zeros(I))

    def forward(self, x_BTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Returns queries [B, T, I, U + 1], head weights sigmoid(w) [B, T, I] and keys [B, T, U], all fp32. A query is
        scaled by U^(-1/2) and ends with its head's gate_bias, which thus costs no pass over [C, I, S] of its own.
        """
        q = self.q_proj(x_BTH).float().unflatten(-1, (self.num_heads, self.head_dim)) * self.head_dim**-0.5
        bias = self.gate_bias.float().expand(*q.shape[:-1]).unsqueeze(-1)
        return torch.cat([q, bias], dim=-1), self.w_proj(x_BTH).float().sigmoid(), self.k_proj(x_BTH).float()

    @staticmethod
    def score(q_BCIU: torch.Tensor, weight_BCI: torch.Tensor, k_BSU: torch.Tensor) -> torch.Tensor:
        """c [B, C, S] fp32 from what `forward` returns; needs no parameter (ZeRO-3 may have let go of them)."""
        keys = nn.functional.pad(k_BSU, (0, 1), value=1.0)
        gates_BCIS = (q_BCIU.flatten(1, 2) @ keys.mT).sigmoid().unflatten(1, q_BCIU.shape[1:3])
        return (gates_BCIS * weight_BCI.unsqueeze(-1)).sum(-2)


@dataclass
class KeyColumns:
    """
    The keys that a forward pass can see.

    Attributes:
        past: number of cached columns in front of the first query.
        keep: [B, S] bool, False at padding; None when all are real.
        documents: [B, S] int64, None without document boundaries.
        sinks: [B or 1, S] bool, the first keys of each document.
    """

    past: int
    keep: torch.Tensor | None
    documents: torch.Tensor | None
    sinks: torch.Tensor

    @classmethod
    def build(cls, ctx: LayerContext, length: int, num_sinks: int) -> KeyColumns:
        """The columns of `ctx` (those of its cache included) for `length` queries."""
        source = ctx if ctx.cache is None else ctx.cache
        keep, documents = source.keep_mask, source.document_ids
        total = length if ctx.cache is None else ctx.cache.get_seq_length()
        rank = torch.arange(1, total + 1, device=ctx.position_ids.device).unsqueeze(0)
        if keep is not None:
            rank = keep.cumsum(1)
        if documents is not None:  # ranks count from the start of the document
            starts = document_starts(fill_padding(documents, keep))
            rank = rank - torch.where(starts, rank - 1, 0).cummax(dim=1).values
        return cls(total - length, keep, documents, rank <= num_sinks)

    def valid(self, start: int, stop: int) -> torch.Tensor:
        """[B or 1, stop - start, past + stop] bool: key s may be used by query t. Every query may use itself."""
        rows = torch.arange(self.past + start, self.past + stop, device=self.sinks.device).unsqueeze(-1)
        columns = torch.arange(self.past + stop, device=self.sinks.device)
        valid = (columns <= rows).unsqueeze(0)
        if self.keep is not None:
            valid = valid & (self.keep[:, None, : self.past + stop] | (columns == rows))
        if self.documents is not None:
            documents = self.documents[:, : self.past + stop]
            valid = valid & (documents.unsqueeze(1) == documents[:, self.past + start :].unsqueeze(2))
        return valid


def key_budget(
    scores: torch.Tensor, valid: torch.Tensor, ema: torch.Tensor, slots: int | None, base: int, low: int, high: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    How many keys each query keeps: k = clip(floor(base * var / max(ema, 1e-6)), low, high), at most the valid ones.

    Args:
        scores, valid: [B, C, S].
        ema: running mean of the variance.
        slots: None for the variance over the valid keys. Else their number with all others filled with zeros, which is
            the published variance p s^2 + p (1 - p) mu^2 for a valid share p.
    Returns:
        r [B, C] int64 >= 1 and the variances [B, C] fp64; sums in fp64, so that their order cannot move the floor.
    """
    count = valid.sum(-1)
    seen = scores.double().mul_(valid)
    n = count if slots is None else slots
    mean = seen.sum(-1) / n
    variance = (seen.square_().sum(-1) / n - mean * mean).clamp_(min=0)
    budget = (base * variance / ema.double().clamp(min=1e-6)).floor().clamp(low, high).long()
    return torch.minimum(count, budget.clamp(min=1)), variance


def select_keys(scores: torch.Tensor, valid: torch.Tensor, sinks: torch.Tensor, budget: torch.Tensor, high: int):
    """
    The `budget` best keys of each query by (sink first, score descending, position ascending).

    Args:
        scores, valid: [B, C, S].
        sinks: [B or 1, S] bool.
        budget: [B, C] int64, between 1 and the number of valid keys.
        high: upper bound of `budget`.
    Returns:
        [B, C, S] bool.
    """
    ranked = scores.masked_fill(sinks.unsqueeze(1), float("inf")).masked_fill_(~valid, float("-inf"))
    budget = budget.unsqueeze(-1)
    if ranked.device.type == "cpu":  # torch takes 20 times as long to sort rows
        threshold = torch.from_numpy(np.sort(ranked.numpy())).gather(-1, ranked.shape[-1] - budget)
    else:
        threshold = ranked.topk(min(high, ranked.shape[-1])).values.gather(-1, budget - 1)
    above, tied = ranked > threshold, ranked == threshold
    room = budget - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))


def naive_select_keys(scores: torch.Tensor, valid: torch.Tensor, sinks: torch.Tensor, budget: torch.Tensor, high: int):
    """The same by a stable sort of all keys."""
    ranked = scores.masked_fill(sinks.unsqueeze(1), float("inf")).masked_fill(~valid, float("-inf"))
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(order.shape[-1], device=order.device) < budget.unsqueeze(-1)
    return torch.zeros_like(first).scatter(-1, order, first)


class GatedSparseAttention(nn.Module):
    """
    Multi-head attention with gated values and outputs over the keys that the indexer keeps: the first keys of the
    document and the best-scoring ones, as many as the spread of the scores asks for. All heads share the choice.

    In training the auxiliary loss indexer_kl_weight * KL(attention || indexer) over the kept keys teaches the indexer
    where the attention looks; it reaches the indexer's parameters only. `variance_ema` is constant within an
    optimizer step; see `statistics` and `after_optimizer_step`.

    Args:
        config: reads hidden_size, num_attention_heads, head_dim, the sparse_* and indexer_* fields, attention_backend.
        layer_idx: position in the stack, the layer's place in the decoding cache.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        H = config.hidden_size
        self.q_proj = nn.Linear(H, H, bias=False)
        self.k_proj = nn.Linear(H, H, bias=False)
        self.v_proj = nn.Linear(H, H, bias=False)
        self.gv_proj = nn.Linear(H, H, bias=False)
        self.go_proj = nn.Linear(H, H, bias=False)
        self.o_proj = nn.Linear(H, H, bias=False)
        self.indexer = Indexer(config)
        self.register_buffer("variance_ema", torch.tensor(UNSET_EMA, dtype=torch.float32))
        self._variance_sums: torch.Tensor | None = None  # (sum, count) fp64 since the last optimizer step

    def forward(self, x_BTH: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns y_BTH (x's dtype, zero at padding) and, in training, the weighted indexer loss (fp32 scalar)."""
        B, T, _ = x_BTH.shape
        heads = (self.num_heads, self.head_dim)
        table = ctx.rotary.get(self.head_dim)
        q = apply_rotary(self.q_proj(x_BTH).unflatten(-1, heads), table)
        k = apply_rotary(self.k_proj(x_BTH).unflatten(-1, heads), table)
        v = (self.v_proj(x_BTH) * self.gv_proj(x_BTH).sigmoid()).unflatten(-1, heads)
        index_q, index_weight, index_k = self.indexer(x_BTH.detach())
        if ctx.cache is not None:
            k, v, index_k = ctx.cache.layers[self.layer_idx].append(keys=k, values=v, indexer_keys=index_k)
        columns = KeyColumns.build(ctx, T, self.config.sparse_sink_keys)
        q_ZTD, k_ZSD, v_ZSD = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))

        naive = self.config.attention_backend == "naive"
        length = T if naive else BLOCK_LENGTH
        recompute = torch.is_grad_enabled() and not naive and columns.past + T > MAX_STORED_KEYS
        blocks = []
        for start in range(0, T, length):
            stop = min(start + length, T)
            arguments = (
                columns, start, stop, q_ZTD[:, start:stop], k_ZSD[:, : columns.past + stop],
                v_ZSD[:, : columns.past + stop], index_q[:, start:stop], index_weight[:, start:stop],
                index_k[:, : columns.past + stop],
            )  # fmt: skip
            with torch.autocast(x_BTH.device.type, enabled=False):  # rounded scores would pick other keys
                if recompute:
                    blocks.append(checkpoint(self._attend, *arguments, use_reentrant=False, preserve_rng_state=False))
                else:
                    blocks.append(self._attend(*arguments))
        outputs, losses, rows, variances = zip(*blocks, strict=True)

        if ctx.record_statistics:
            self._record(torch.cat(variances, dim=1), ctx.keep_mask)
        o = torch.cat(outputs, dim=1).unflatten(0, (B, self.num_heads)).transpose(1, 2).flatten(-2)
        y = o * self.go_proj(x_BTH).sigmoid()
        if ctx.keep_mask is not None:
            y = y * ctx.keep_mask.unsqueeze(-1)
        aux = None
        if self._teaches_indexer:
            aux = self.config.indexer_kl_weight * sum(losses) / sum(rows).clamp(min=1)
        return self.o_proj(y), aux

    @property
    def _teaches_indexer(self) -> bool:
        # Not torch.is_grad_enabled(): the reversible stack runs its forward pass without gradients.
        return self.training and self.config.indexer_kl_weight > 0

    def _attend(self, columns: KeyColumns, start, stop, q_ZCD, k_ZSD, v_ZSD, index_q, index_weight, index_k):
        """One block of queries: outputs [Z, C, D], summed indexer loss, number of its rows, variances [B, C]."""
        config = self.config
        B = index_k.shape[0]
        valid = columns.valid(start, stop)
        sinks = columns.sinks[:, : columns.past + stop]
        scores = self.indexer.score(index_q, index_weight, index_k)
        ranked = scores.detach()
        if config.sparse_score_dtype == "bfloat16":
            ranked = ranked.bfloat16().float()
        slots = columns.sinks.shape[1] if config.sparse_variance == "zero_filled" else None
        limits = (config.sparse_key_budget, config.sparse_min_keys, config.sparse_max_keys)
        budget, variance = key_budget(ranked, valid, self.variance_ema, slots, *limits)
        if config.attention_backend == "naive":
            kept = naive_select_keys(ranked, valid, sinks, budget, config.sparse_max_keys)
        elif valid.shape[-1] <= config.sparse_min_keys:
            kept = valid
        else:
            kept = select_keys(ranked, valid, sinks, budget, config.sparse_max_keys)

        logits = torch.bmm(q_ZCD * self.head_dim**-0.5, k_ZSD.mT).float().unflatten(0, (B, self.num_heads))
        weights = logits.add_(_bias(kept).unsqueeze(1)).softmax(dim=-1)
        output = torch.bmm(weights.flatten(0, 1).to(v_ZSD.dtype), v_ZSD)
        loss = rows = None
        if self._teaches_indexer:
            every = slice((-start) % config.indexer_kl_stride, None, config.indexer_kl_stride)
            candidates = (kept & ~sinks.unsqueeze(1))[:, every].expand(B, -1, -1)
            used = candidates.sum(-1) >= 2
            if columns.keep is not None:
                used = used & columns.keep[:, columns.past + start : columns.past + stop][:, every]
            attention = weights[:, :, every].detach().mean(1)
            loss, rows = _IndexerLoss.apply(scores[:, every], attention, candidates, used), used.sum()
        return output, loss, rows, variance

    def _record(self, variance_BT: torch.Tensor, keep: torch.Tensor | None) -> None:
        if keep is not None:
            variance_BT = variance_BT * keep
            count = keep.sum()
        else:
            count = torch.tensor(variance_BT.numel(), device=variance_BT.device)
        self.statistics()[0].add_(torch.stack([variance_BT.sum(), count.double()]))

    def statistics(self) -> list[torch.Tensor]:
        """[(sum of the variances, number of real queries)], one fp64 tensor, to be summed over ranks in place."""
        if self._variance_sums is None or self._variance_sums.device != self.variance_ema.device:
            self._variance_sums = torch.zeros(2, dtype=torch.float64, device=self.variance_ema.device)
        return [self._variance_sums]

    @torch.no_grad()
    def after_optimizer_step(self, update: bool) -> None:
        """Moves `variance_ema` towards the mean variance since the last call (`update`), and forgets the sums."""
        sums = self.statistics()[0]
        if update:
            mean = (sums[0] / sums[1].clamp(min=1)).to(self.variance_ema.dtype)
            moved = torch.where(self.variance_ema == UNSET_EMA, mean, torch.lerp(mean, self.variance_ema, EMA_DECAY))
            self.variance_ema.copy_(torch.where(sums[1] > 0, moved, self.variance_ema))
        sums.zero_()


def _bias(kept: torch.Tensor) -> torch.Tensor:
    """0 where kept, else so low that softmax gives exactly 0; filling by an irregular mask takes 5 times as long."""
    return kept.to(torch.float32).sub_(1).mul_(torch.finfo(torch.float32).max)


class _IndexerLoss(torch.autograd.Function):
    """
    The sum over `used` queries of KL(P || Q), both over the candidate keys: P the attention averaged over heads, Q the
    softmax of kappa * scores. Its gradient, kappa (Q - P), costs one pass where autograd would take eight.
    """

    @staticmethod
    def forward(ctx, scores, attention, candidates, used):
        """scores, attention, candidates [B, C, S]; used [B, C] bool, queries with at least one candidate."""
        q = _bias(candidates).add_(scores, alpha=INDEXER_TEMPERATURE).softmax(-1)
        p = attention * candidates
        mass, tiny = p.sum(-1, keepdim=True), torch.finfo(p.dtype).tiny
        p /= mass.clamp(min=tiny)
        used = used.unsqueeze(-1) & (mass > 0)  # all attention on the sinks says nothing about the candidates
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward((q - p).mul_(used).mul_(INDEXER_TEMPERATURE))
        # tiny makes 0 ln(0 / 0) = 0
        return (p * ((p + tiny) / (q + tiny)).log_()).sum(-1, keepdim=True).mul_(used).sum()

    @staticmethod
    def backward(ctx, grad):
        (d_scores,) = ctx.saved_tensors
        return grad * d_scores, None, None, None
