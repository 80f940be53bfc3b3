"""
The head and its loss: soft-capped logits, and cross-entropy computed in chunks of tokens so that no [T, V] is kept.

Shape suffixes: T tokens, C tokens of a chunk, V vocabulary, H hidden size.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100
CHUNK_ELEMENTS = 1 << 27  # of one fp32 chunk of logits: 512 MiB, 1024 tokens at a vocabulary of 131,072


def softcap_logits(hidden: torch.Tensor, weight_VH: torch.Tensor, softcap: float) -> torch.Tensor:
    """
    The head, the same in training, evaluation and generation: c * tanh(z / c) of z = hidden weight^T, in fp32.

    Args:
        hidden: [..., H]. softcap: c; 0 leaves the logits as they are.
    """
    logits = F.linear(hidden, weight_VH).float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def naive_linear_cross_entropy(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor, softcap: float
) -> torch.Tensor:
    """Reference for `linear_cross_entropy`; holds all logits."""
    logits_TV = softcap_logits(hidden_TH, weight_VH, softcap)
    return F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients chunk by chunk in the forward pass, while the logits of the chunk exist."""

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, targets_T, softcap, chunk_tokens):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.empty_like(hidden_TH) if need_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_TH.device)
        for start in range(0, len(hidden_TH), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CH, targets_C = hidden_TH[rows], targets_T[rows]
            keep_C = targets_C != IGNORED
            targets_C1 = targets_C.where(keep_C, 0)[:, None]
            logits_CV = F.linear(hidden_CH, weight_VH).float()
            if softcap:
                tanh_CV = logits_CV.div_(softcap).tanh_()
                logits_CV = tanh_CV * softcap
            picked_C = logits_CV.gather(1, targets_C1)[:, 0]
            largest_C = logits_CV.amax(1)
            exp_CV = logits_CV.sub_(largest_C[:, None]).exp_()
            sum_C = exp_CV.sum(1)
            loss += (largest_C + sum_C.log() - picked_C).where(keep_C, 0.0).sum()
            if not (need_hidden or need_weight):
                continue
            # d loss / d logits = softmax - onehot, then through the cap: 1 - tanh^2
            grad_CV = exp_CV.mul_((keep_C / sum_C)[:, None])
            grad_CV.scatter_add_(1, targets_C1, -keep_C[:, None].float())
            if softcap:
                grad_CV.mul_(tanh_CV.square_().neg_().add_(1))
            grad_CV = grad_CV.to(weight_VH.dtype)
            if need_hidden:
                grad_hidden_TH[rows] = grad_CV @ weight_VH
            if need_weight and grad_CV.dtype == torch.float32:
                grad_weight_VH.addmm_(grad_CV.t(), hidden_CH)
            elif need_weight:
                grad_weight_VH += grad_CV.t() @ hidden_CH
        ctx.save_for_backward(grad_hidden_TH, grad_weight_VH)
        ctx.weight_dtype = weight_VH.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        grad_hidden_TH, grad_weight_VH = ctx.saved_tensors
        if grad_hidden_TH is not None:
            grad_hidden_TH = grad_hidden_TH * grad_loss
        if grad_weight_VH is not None:
            grad_weight_VH = (grad_weight_VH * grad_loss).to(ctx.weight_dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None


def linear_cross_entropy(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    softcap: float,
    backend: str = "auto",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """
    Sum over tokens of the cross-entropy of `softcap_logits(hidden, weight, softcap)`.

    Args:
        hidden_TH: [T, H].
        weight_VH: [V, H], the head's parameter; it receives its gradient.
        targets_T: [T] int64, -100 where the token has no target.
        softcap: see `softcap_logits`.
        backend: `"torch"` in chunks (`"auto"` means this), `"naive"`, or `"liger"` (liger-kernel, on a GPU).
        chunk_tokens: tokens per chunk; by default as many as keep a chunk of fp32 logits within 512 MiB.
    Returns:
        fp32 scalar; 0 when no token has a target.
    """
    if backend == "naive":
        return naive_linear_cross_entropy(hidden_TH, weight_VH, targets_T, softcap)
    if backend == "liger":
        return _liger_linear_cross_entropy(hidden_TH, weight_VH, targets_T, softcap)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_ELEMENTS // len(weight_VH))
    return _LinearCrossEntropy.apply(hidden_TH, weight_VH, targets_T, softcap, chunk_tokens)


def _liger_linear_cross_entropy(hidden_TH, weight_VH, targets_T, softcap):
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise ImportError("loss_backend = 'liger' needs liger-kernel: pip install -r requirements-gpu.txt") from error
    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum", softcap=softcap or None)
    return loss(weight_VH, hidden_TH, targets_T)
