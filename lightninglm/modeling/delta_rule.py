"""
The gated delta rule (Yang et al., 2024, arXiv 2412.06464): a readable recurrence and the same function in chunks.

Per head, with the state S [D, E] (key x value), the decay exp(l_t) and the writing strength beta_t:

    S~_t = exp(l_t) S_{t-1}        u_t = beta_t (v_t - S~_t^T k_t)        S_t = S~_t + k_t u_t^T        o_t = S_t^T q_t

Shapes: B batch, T tokens, J heads, D key dim, E value dim; N chunks of C tokens, Z = B * J.
"""

import importlib.metadata
import importlib.util

import torch
from packaging.version import Version
from torch import nn
from transformers.utils import logging

from .documents import document_starts

logger = logging.get_logger(__name__)

CHUNK_LENGTH = 32
"""Tokens of a chunk: the fastest of 16, 32 and 64 on a CPU for head dims 32 to 128."""


def naive_gated_delta_rule(
    q_BTJD: torch.Tensor,
    k_BTJD: torch.Tensor,
    v_BTJE: torch.Tensor,
    log_decay_BTJ: torch.Tensor,
    beta_BTJ: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    initial_document: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence above, one token at a time. Arguments and results are those of `chunk_gated_delta_rule`."""
    state = _initial_state(initial_state, k_BTJD, v_BTJE)
    if document_ids is not None:
        starts = document_starts(document_ids, initial_document).unsqueeze(-1)
        log_decay_BTJ = log_decay_BTJ.masked_fill(starts, float("-inf"))
    outputs = []
    for q, k, v, log_decay, beta in zip(
        *(tensor.unbind(1) for tensor in (q_BTJD, k_BTJD, v_BTJE, log_decay_BTJ, beta_BTJ)), strict=True
    ):
        state = state * log_decay.exp()[..., None, None]
        update = (v - (k.unsqueeze(-2) @ state).squeeze(-2)) * beta.unsqueeze(-1)
        state = state + k.unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1), state


def chunk_gated_delta_rule(
    q_BTJD: torch.Tensor,
    k_BTJD: torch.Tensor,
    v_BTJE: torch.Tensor,
    log_decay_BTJ: torch.Tensor,
    beta_BTJ: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    initial_document: torch.Tensor | None = None,
    chunk_length: int = CHUNK_LENGTH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The gated delta rule with matrix products over chunks of tokens; a token that must leave no trace (padding) has
    k = v = 0, beta = 0 and log decay 0.

    Args:
        q_BTJD, k_BTJD, v_BTJE: queries, keys, values, all of one floating type, in which everything is computed.
        log_decay_BTJ: l <= 0.
        beta_BTJ: writing strengths.
        initial_state: [B, J, D, E]; zeros if None.
        document_ids: [B, T] int64, equal inside a document; the state does not cross from one to the next.
        initial_document: [B] int64, the document that `initial_state` belongs to; None: the first token's.
        chunk_length: C; the result does not depend on it, but for rounding.
    Returns:
        outputs [B, T, J, E] and the last state [B, J, D, E].
    """
    B, T, J, _ = k_BTJD.shape
    N, C = -(-T // chunk_length), chunk_length

    def chunks(tensor: torch.Tensor) -> torch.Tensor:  # [B, T, J, ...] -> [N, B * J, C, ...], zeros at the end
        tensor = nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, N * C - T))
        return tensor.unflatten(1, (N, C)).transpose(2, 3).transpose(0, 1).flatten(1, 2).contiguous()

    same_document = visible = None
    if document_ids is not None:
        run = document_starts(document_ids, initial_document).cumsum(1)  # 0 while the initial state's document lasts
        run = torch.cat([run, run[:, -1:].expand(B, N * C - T)], dim=1).unflatten(1, (N, C)).transpose(0, 1)
        run = run.repeat_interleave(J, dim=1)
        entering = torch.cat([torch.zeros_like(run[:1, :, :1]), run[:-1, :, -1:]])
        same_document = run.unsqueeze(-1) == run.unsqueeze(-2)
        visible = run == entering

    state = _initial_state(initial_state, k_BTJD, v_BTJE).flatten(0, 1)
    outputs, state = _ChunkedDeltaRule.apply(
        *map(chunks, (q_BTJD, k_BTJD, v_BTJE, log_decay_BTJ, beta_BTJ)), state, same_document, visible
    )
    outputs = outputs.unflatten(1, (B, J)).transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, :T]
    return outputs, state.unflatten(0, (B, J))


class _ChunkedDeltaRule(torch.autograd.Function):
    """
    With the inclusive cumulative log decay g_i of a chunk and the state S that enters it:

        G_ij = exp(g_i - g_j) for j <= i, else 0          L = strictly lower part of diag(beta) (G * K K^T)
        (I + L) U = R = diag(beta) V - K_w S              K_w = diag(beta e^g) K           Q_r = diag(e^g) Q
        O = Q_r S + (G * Q K^T) U                         S' = e^{g_C} S + K_e^T U         K_e = diag(e^{g_C - g}) K

    Everything that does not need S is computed for all chunks at once; one product reads S for Q_r and -K_w together.
    All exponents are <= 0, and differences of g are taken in fp64, so that strong decays early in a chunk cost the
    later ones no digits.
    """

    @staticmethod
    def forward(ctx, q, k, v, log_decay, beta, state, same_document, visible):
        """q, k, v [N, Z, C, D or E]; log_decay, beta, visible [N, Z, C]; state [Z, D, E]; same_document [N, Z, C, C]"""
        N, Z, C, D = k.shape
        E = v.shape[-1]
        g = log_decay.double().cumsum(-1)
        decay = _exp(g.unsqueeze(-1) - g.unsqueeze(-2), k.dtype).tril_()  # G
        since_start, until_end = _exp(g, k.dtype), _exp(g[..., -1:] - g, k.dtype)  # e^g, e^{g_C - g}
        if same_document is not None:
            decay, since_start = decay * same_document, since_start * visible
            until_end = until_end * same_document[..., -1, :]
        since_start, until_end, beta = since_start.unsqueeze(-1), until_end.unsqueeze(-1), beta.unsqueeze(-1)

        kk = (k @ k.mT).mul_(decay).tril_(-1)
        qk = (q @ k.mT).mul_(decay)
        eye = torch.eye(C, dtype=k.dtype, device=k.device).expand(N, Z, C, C)
        # From the right, on the transpose: twice as fast in LAPACK's column-major order.
        inverse = torch.linalg.solve_triangular((kk * beta).mT, eye, upper=True, unitriangular=True, left=False).mT
        readers = k.new_empty(N, Z, 2 * C, D)  # Q_r above -K_w
        torch.mul(q, since_start, out=readers[:, :, :C])
        torch.mul(k, -beta * since_start, out=readers[:, :, C:])
        k_end, r = k * until_end, beta * v

        states, u, outputs = k.new_empty(N + 1, Z, D, E), torch.empty_like(v), torch.empty_like(v)
        states[0] = state
        across = since_start[..., -1:, :]  # e^{g_C}
        chunks = (readers, r, inverse, k_end.mT, across, outputs, u, states[:N], states[1:])
        for readers_n, r_n, inverse_n, k_n, across_n, o_n, u_n, state, next_state in zip(*chunks, strict=True):
            read, written = torch.bmm(readers_n, state).split(C, dim=1)
            o_n.copy_(read)
            torch.bmm(inverse_n, r_n.add_(written), out=u_n)
            torch.mul(state, across_n, out=next_state).baddbmm_(k_n, u_n)
        _add_product(outputs, qk, u)
        ctx.save_for_backward(q, k, v, beta, since_start, until_end, decay, kk, qk, inverse, readers, k_end, u, states)
        return outputs, states[N].clone()

    @staticmethod
    def backward(ctx, d_outputs, d_state):
        q, k, v, beta, since_start, until_end, decay, kk, qk, inverse, readers, k_end, u, states = ctx.saved_tensors
        N, Z, C, E = v.shape
        across = since_start[..., -1:, :]

        d_u = qk.mT @ d_outputs
        d_read = v.new_empty(N, Z, 2 * C, E)  # of Q_r S above that of R
        d_read[:, :, :C] = d_outputs
        d_r = d_read[:, :, C:]
        d_readers, d_k_end, d_across = torch.empty_like(readers), torch.empty_like(k), k.new_empty(N, Z)
        for n in range(N - 1, -1, -1):
            d_u[n].baddbmm_(k_end[n], d_state)
            torch.bmm(inverse[n].mT, d_u[n], out=d_r[n])
            torch.bmm(u[n], d_state.mT, out=d_k_end[n])
            torch.bmm(d_read[n], states[n].mT, out=d_readers[n])
            d_across[n] = (d_state * states[n]).sum((-2, -1))
            d_state = (d_state * across[n]).baddbmm_(readers[n].mT, d_read[n])

        d_q_read, d_k_read = d_readers.split(C, dim=2)  # of Q_r and of -K_w
        d_qk = d_outputs @ u.mT
        d_lower = (d_r @ u.mT).neg_()  # of L, through its inverse
        through_kk = d_lower * kk
        along_k = -(d_k_read * k).sum(-1)
        d_beta = (d_r * v).sum(-1) + along_k * since_start.squeeze(-1) + through_kk.sum(-1)

        # Every use of a decay e^x adds (its value * its gradient) to the gradient of x.
        pairs = through_kk.mul_(beta).addcmul_(d_qk, qk)
        reads = since_start.squeeze(-1) * ((d_q_read * q).sum(-1) + beta.squeeze(-1) * along_k)
        writes = until_end.squeeze(-1) * (d_k_end * k).sum(-1)
        d_g = pairs.sum(-1) - pairs.sum(-2) + reads - writes
        d_g[..., -1] += writes.sum(-1) + d_across * across[..., 0, 0]
        d_log_decay = d_g.flip(-1).cumsum(-1).flip(-1)

        d_kk = d_lower.mul_(decay).mul_(beta).tril_(-1)
        d_qk.mul_(decay)
        d_q, d_k = d_q_read * since_start, d_k_end.mul_(until_end).addcmul_(d_k_read, beta * since_start, value=-1)
        _add_product(d_q, d_qk, k)
        _add_product(d_k, d_kk + d_kk.mT, k)
        _add_product(d_k, d_qk.mT, q)
        return d_q, d_k, d_r * beta, d_log_decay, d_beta, d_state, None, None


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a @ b for [N, Z, ...] tensors, out contiguous."""
    out.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))


def _exp(log_decay: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp of log decays. Above 0 lies only the masked half; products of what is below e^-40 are denormal and slow."""
    return log_decay.to(dtype, copy=True).clamp_(-40, 0).exp_()


def fla_gated_delta_rule(
    q_BTJD: torch.Tensor,
    k_BTJD: torch.Tensor,
    v_BTJE: torch.Tensor,
    log_decay_BTJ: torch.Tensor,
    beta_BTJ: torch.Tensor,
    initial_state: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The same by the Triton kernels of flash-linear-attention: q, k and v in `dtype`, one document per row.

    Raises:
        RuntimeError: when the kernels cannot run or are known to be wrong here (`fla_problem`).
    """
    if problem := fla_problem(q_BTJD.device, dtype):
        raise RuntimeError(f"config.delta_rule_backend = 'fla': {problem}")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel

    q, k, v = (tensor.to(dtype) for tensor in (q_BTJD, k_BTJD, v_BTJE))
    outputs, state = kernel(
        q, k, v, g=log_decay_BTJ, beta=beta_BTJ, scale=1.0, initial_state=initial_state, output_final_state=True
    )
    return outputs.to(q_BTJD.dtype), state


def fla_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flash-linear-attention cannot compute in `dtype` on `device`, and what to do about it; None when it can."""
    if device.type != "cuda":
        return f"its kernels need a CUDA device, the tensors are on {device.type!r}; use 'torch'"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels do not compute in {dtype}; train in bf16, or use 'torch'"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed; `pip install flash-linear-attention`, or use 'torch'"
    return triton_problem(importlib.metadata.version("triton"), torch.cuda.get_device_capability(device))


def triton_problem(version: str, capability: tuple[int, int]) -> str | None:
    """What is wrong with this Triton on a device of this compute capability; None if nothing is known to be."""
    if capability[0] == 9 and Version("3.4.0") <= Version(version) <= Version("3.7.0"):
        return (
            f"Triton {version} computes a wrong backward pass on Hopper (flash-linear-attention#640); install a Triton "
            "below 3.4.0 or above 3.7.0, or use 'torch'"
        )
    return None


def gated_delta_rule(
    q_BTJD: torch.Tensor,
    k_BTJD: torch.Tensor,
    v_BTJE: torch.Tensor,
    log_decay_BTJ: torch.Tensor,
    beta_BTJ: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    initial_document: torch.Tensor | None = None,
    *,
    backend: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The gated delta rule by the backend that `config.delta_rule_backend` names; the rest as `chunk_gated_delta_rule`.

    "auto" takes the recurrence for a single token, else flash-linear-attention for one document per row on a GPU
    where it runs and is right, else "torch". `dtype` is the compute dtype of the layer, which only "fla" goes down to.
    """
    arguments = (q_BTJD, k_BTJD, v_BTJE, log_decay_BTJ, beta_BTJ, initial_state)
    if backend == "fla" and document_ids is not None:
        raise ValueError("config.delta_rule_backend = 'fla': document boundaries need 'torch'")
    if backend == "auto":
        backend = "naive" if q_BTJD.shape[1] == 1 else "torch"
        if backend == "torch" and q_BTJD.is_cuda and document_ids is None:
            if problem := fla_problem(q_BTJD.device, dtype):
                logger.warning_once(
                    f"config.delta_rule_backend = 'auto' takes 'torch', not the faster 'fla': {problem}"
                )
            else:
                backend = "fla"
    if backend == "fla":
        return fla_gated_delta_rule(*arguments, dtype)
    rule = naive_gated_delta_rule if backend == "naive" else chunk_gated_delta_rule
    with torch.autocast(q_BTJD.device.type, enabled=False):  # in the dtype of its arguments, whatever surrounds it
        return rule(*arguments, document_ids, initial_document)


def _initial_state(state: torch.Tensor | None, k_BTJD: torch.Tensor, v_BTJE: torch.Tensor) -> torch.Tensor:
    B, _, J, D = k_BTJD.shape
    return k_BTJD.new_zeros(B, J, D, v_BTJE.shape[-1]) if state is None else state.to(k_BTJD.dtype)
