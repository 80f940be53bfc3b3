"""What every layer needs besides the residual streams: masks, positions, rotary tables, the decoding cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .cache import LightningLMCache
    from .selection_noise import SelectionNoise


@dataclass(frozen=True)
class LayerContext:
    """
    Built once per forward pass of the model and shared by all layers; no layer changes it.

    Attributes:
        position_ids: [B, T] int64, position of each token in its document.
        keep_mask: [B, T] bool, True for a real token and False for padding. None when every token is real.
        document_ids: [B, T] int64, tokens attend inside one document only. None when each row is one document.
        rotary: per head dim D, the tables (cos, sin), each [B, T, D / 2] fp32. Empty when rotary embedding is off.
        cache: the decoding cache, None in training.
        record_statistics: whether routers count their picks and indexers their variances. True only in a training
            forward pass: a recompute in the backward pass sees the same tokens a second time.
        selection_noise: on the scores that routers pick by, in training only. None for none.
    """

    position_ids: torch.Tensor
    keep_mask: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    rotary: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    cache: LightningLMCache | None = None
    record_statistics: bool = False
    selection_noise: SelectionNoise | None = None
