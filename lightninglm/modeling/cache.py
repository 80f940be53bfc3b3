"""The decoding cache: recurrent states, convolution tails, sparse-attention keys, and what the model keeps per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from transformers.cache_utils import Cache

from .configuration_lightninglm import LINEAR_ATTENTION


@dataclass
class DeltaNetState:
    """
    What a gated DeltaNet layer carries from one forward pass to the next. Every tensor has the batch first.

    Attributes:
        state: [B, J, D, D] fp32, the recurrent state (key x value).
        tail: [B, kernel - 1, 3 * J * D], the last real inputs of the q, k and v convolutions, zero where there is none
            or where it belongs to an earlier document.
        document: [B] int64, the document of the last real token; None without document boundaries.
    """

    state: torch.Tensor | None = None
    tail: torch.Tensor | None = None
    document: torch.Tensor | None = None


@dataclass
class SparseAttentionKeys:
    """
    What a sparse-attention layer keeps of all tokens so far, padding included (t columns). Batch first.

    Attributes:
        keys: [B, t, J, D] after rotary embedding.
        values: [B, t, J, D] after their gate.
        indexer_keys: [B, t, U].
    """

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    indexer_keys: torch.Tensor | None = None

    def append(self, **new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Adds the new columns of `keys`, `values`, `indexer_keys` and returns all columns, in the order given."""
        for name, tensor in new.items():
            past = getattr(self, name)
            setattr(self, name, tensor if past is None else torch.cat([past, tensor], dim=1))
        return tuple(getattr(self, name) for name in new)


class LightningLMCache(Cache):
    """
    The cache behind `generate`. It grows with the tokens seen and cannot be cropped: a recurrent state keeps no past.

    The model calls `extend` once per forward pass, before the layers; each layer then reads and writes `layers[i]`.

    Args:
        config: a LightningLMConfig (reads layer_types).

    Attributes:
        keep_mask: [B, t] bool over all columns so far, those of the running forward pass included; False is padding.
        document_ids: [B, t] int64 or None, likewise.
        memory: [B, H] or None, the memory vector that the model wrote last.
    """

    is_compileable = False
    is_croppable = False
    is_initialized = True

    def __init__(self, config):
        recurrent = [kind == LINEAR_ATTENTION for kind in config.layer_types]
        super().__init__(layers=[DeltaNetState() if it_is else SparseAttentionKeys() for it_is in recurrent])
        self.reset()

    def extend(self, keep_mask: torch.Tensor, document_ids: torch.Tensor | None = None) -> None:
        """
        Registers the tokens of a forward pass.

        Args:
            keep_mask: [B, T] bool of the new tokens, True for real ones.
            document_ids: [B, T] int64 of the new tokens, on every call or on none.
        """
        if self.keep_mask is not None and (document_ids is None) != (self.document_ids is None):
            raise ValueError("document_ids must be given on every forward pass with this cache, or on none")
        if self.keep_mask is not None:
            keep_mask = torch.cat([self.keep_mask, keep_mask], dim=1)
        if self.document_ids is not None:
            document_ids = torch.cat([self.document_ids, document_ids], dim=1)
        self.keep_mask, self.document_ids = keep_mask, document_ids

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far (tokens and padding), the same for every layer."""
        return 0 if self.keep_mask is None else self.keep_mask.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the cache grows without limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns that `query_length` new tokens will see, 0)."""
        return self.get_seq_length() + query_length, 0

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward pass."""
        return -1 if self.keep_mask is None else self.keep_mask.shape[0]

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.layers)

    @property
    def is_linear(self) -> list[bool]:
        return [isinstance(layer, DeltaNetState) for layer in self.layers]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a forward pass has written to the cache."""
        return self.keep_mask is not None

    def reset(self) -> None:
        """Empties the cache."""
        self.keep_mask = self.document_ids = self.memory = None
        self.layers = [type(layer)() for layer in self.layers]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes the old row beam_idx[i] (beam search)."""
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, copies side by side."""
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices` (positions or a bool mask)."""
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Raises unless there is nothing to remove."""
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "LightningLMCache cannot be cropped: the state of a gated DeltaNet layer does not give back its last "
                "tokens, so assisted decoding is not possible; start again from the prompt instead"
            )

    def activate_past_recording(self) -> None:
        """Raises: see `crop`."""
        self.crop(-1)

    def _map_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        holders = [(layer, [field.name for field in fields(layer)]) for layer in self.layers]
        for holder, names in [*holders, (self, ["keep_mask", "document_ids", "memory"])]:
            for name in names:
                if (tensor := getattr(holder, name)) is not None:
                    setattr(holder, name, change(tensor))
