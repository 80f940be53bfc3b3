"""
The gated DeltaNet mixer (Yang et al., 2024, arXiv 2412.06464): a linear recurrence over tokens instead of attention.

Shapes: B batch, T tokens, H hidden size, J heads, D head dim (J * D = H).
"""

import math

import torch
from torch import nn

from .delta_rule import gated_delta_rule
from .documents import fill_padding
from .layer_context import LayerContext
from .norms import RMSNorm
from .rotary import apply_rotary
from .short_convolution import ShortConvolution

MIN_LOG_DECAY = math.log(1e-6)


class GatedDeltaNet(nn.Module):
    """
    x -> q, k, v (projection, short convolution, SiLU; q and k of length 1, rotated)
      -> gated delta rule with decay exp(-exp(A_log) softplus(gk + dt_bias)) and writing strength sigmoid(b)
      -> plus D (q . k) v -> RMSNorm per head, gate sigmoid(g) -> o_proj

    Decay, writing strength, norms, state and recurrence are fp32 whatever the dtype of x.

    Args:
        config: reads hidden_size, linear_num_heads, linear_head_dim, linear_conv_kernel_dim, conv_mask_inputs,
            rms_norm_eps, delta_rule_backend.
        layer_idx: position in the stack, the layer's place in the decoding cache.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.linear_num_heads, config.linear_head_dim
        self.conv_mask_inputs = config.conv_mask_inputs
        self.backend = config.delta_rule_backend
        H, J, K = config.hidden_size, self.num_heads, config.linear_conv_kernel_dim
        self.q_proj = nn.Linear(H, H, bias=False)
        self.k_proj = nn.Linear(H, H, bias=False)
        self.v_proj = nn.Linear(H, H, bias=False)
        self.g_proj = nn.Linear(H, H, bias=False)
        self.o_proj = nn.Linear(H, H, bias=False)
        self.b_proj = nn.Linear(H, J)
        self.gk_proj = nn.Linear(H, J)
        self.q_conv1d = ShortConvolution(H, K)
        self.k_conv1d = ShortConvolution(H, K)
        self.v_conv1d = ShortConvolution(H, K)
        self.A_log = nn.Parameter(torch.zeros(J))
        self.D = nn.Parameter(torch.ones(J))
        self.dt_bias = nn.Parameter(torch.zeros(J))
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x_BTH: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, None]:
        """Returns (y_BTH in x's dtype and zero at padding, None): this mixer has no auxiliary loss."""
        keep, cache = ctx.keep_mask, None if ctx.cache is None else ctx.cache.layers[self.layer_idx]
        last_document = None if cache is None else cache.document
        documents = None if ctx.document_ids is None else fill_padding(ctx.document_ids, keep, last_document)
        projected = [projection(x_BTH) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        if keep is not None and self.conv_mask_inputs:
            projected = [tensor * keep.unsqueeze(-1) for tensor in projected]
        reach = None if documents is None else self._reach(documents, last_document)
        tails = (None,) * 3 if cache is None or cache.tail is None else cache.tail.chunk(3, dim=-1)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        q, k, v = (
            convolution(tensor, tail, reach).unflatten(-1, (self.num_heads, self.head_dim))
            for convolution, tensor, tail in zip(convolutions, projected, tails, strict=True)
        )
        table = ctx.rotary.get(self.head_dim)
        q, k = (apply_rotary(nn.functional.normalize(tensor, dim=-1, eps=1e-12), table) for tensor in (q, k))

        beta = self.b_proj(x_BTH).float().sigmoid()
        step = nn.functional.softplus(self.gk_proj(x_BTH).float() + self.dt_bias.float())
        log_decay = (-self.A_log.float().exp() * step).clamp(min=MIN_LOG_DECAY)
        if keep is not None:  # padding neither writes nor decays
            beta, log_decay = beta * keep.unsqueeze(-1), log_decay * keep.unsqueeze(-1)

        state = None if cache is None else cache.state
        o, state = gated_delta_rule(
            q, k, v, log_decay, beta, state, documents, last_document, backend=self.backend, dtype=x_BTH.dtype
        )
        o = o + (q * k).sum(-1, keepdim=True) * v * self.D.float().unsqueeze(-1)
        y = self.o_norm(o).flatten(-2) * self.g_proj(x_BTH).float().sigmoid()
        if keep is not None:
            y = y * keep.unsqueeze(-1)
        if cache is not None:
            cache.state = state
            self._remember(cache, torch.cat(projected, dim=-1), keep, documents, last_document)
        return self.o_proj(y.to(x_BTH.dtype)), None

    def _reach(self, documents: torch.Tensor, last_document: torch.Tensor | None) -> torch.Tensor:
        """[B, T, K] bool: tap i of token t reads a token of t's own document."""
        before = self.q_conv1d.kernel_size - 1
        first = documents[:, 0] if last_document is None else last_document
        padded = torch.cat([first.unsqueeze(1).expand(-1, before), documents], dim=1)
        return padded.unfold(1, before + 1, 1) == documents.unsqueeze(-1)

    def _remember(self, cache, projected, keep, documents, last_document) -> None:
        """Moves the cache's convolution tail and document on to the last real tokens."""
        before = self.q_conv1d.kernel_size - 1
        past = projected.new_zeros(len(projected), before, projected.shape[-1]) if cache.tail is None else cache.tail
        window = torch.cat([past, projected], dim=1)
        if documents is not None:
            cache.document = documents[:, -1]
            first = documents[:, 0] if last_document is None else last_document
            of_window = torch.cat([first.unsqueeze(1).expand(-1, before), documents], dim=1)
            window = window * (of_window == cache.document.unsqueeze(1)).unsqueeze(-1)
        if keep is not None:  # real columns to the end, in their order
            order = nn.functional.pad(keep, (before, 0), value=True).int().argsort(dim=1, stable=True)
            window = window.gather(1, order[:, -before:].unsqueeze(-1).expand(-1, -1, window.shape[-1]))
        cache.tail = window[:, -before:]
