"""
Runs a checkpoint on tokens with one layer's weights in memory at a time.

The model is built on the meta device. A layer gets its weights from the checkpoint when its turn comes, takes the rows
of the batch piece by piece, and gives the weights back. Every number is, bit for bit, what the whole model computes for
each piece: nothing between the layers mixes rows. Layers of step size 0 are neither evaluated nor read.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.model_tensors import model_tensors
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.initialization import allocate_model
from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.losses import softcap_logits
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM

TOKENS_PER_CALL = 2**12
"""Tokens of a piece: what a layer sees at once. It bounds what the inside of a layer needs."""
TOKENS_PER_PASS = 2**16
"""Tokens that go through the stack together: each pass reads all weights, and holds its tokens' states."""
READERS = 4
"""Files of a layer that are read at once."""


class LayerwiseModel:
    """
    The model of a checkpoint folder in fp32, for evaluation.

    Args:
        folder: needs weights, configuration and tokenizer, no manifest: a checkpoint before its commit is enough.
        on_read: called with the bytes of every tensor that was read.
    """

    def __init__(self, folder: Path, on_read: Callable[[int], None] = lambda count: None):
        self.folder, self.on_read = folder, on_read
        self.files: dict[str, str] = json.loads((folder / layout.INDEX["model"]).read_bytes())["weight_map"]
        self.config = LightningLMConfig.from_dict(json.loads((folder / layout.CONFIG).read_bytes()))
        with torch.device("meta"):
            self.causal = LightningLMForCausalLM(self.config).eval()
        model = self.causal.model
        layers = {f"model.layers.{i}": layer for i, layer in enumerate(model.layers)}
        model.layers = nn.ModuleList(_ByPieces(partial(self._loaded, *layer)) for layer in layers.items())
        self._load("model", model)  # all that is no layer: it is small
        self.causal.load_token_bytes(folder)
        model.embed_tokens = _ByPieces(partial(nullcontext, model.embed_tokens))

    @torch.no_grad()
    def hidden_states(self, ids: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """
        What the head turns into logits of the next token, and of the second one if the model has that layer.

        Args:
            ids: [B, S] int64.
            keep: [B, S] bool, False for padding.
        Returns:
            Hidden states [B, S, H] after the final norm, for each of the two.
        """
        rows = _rows(ids) * max(1, TOKENS_PER_PASS // TOKENS_PER_CALL)
        masks = [None] * len(ids) if keep is None else keep.split(rows)
        first, second = zip(*map(self._one_pass, ids.split(rows), masks), strict=True)
        return torch.cat(first), None if self.causal.mtp is None else torch.cat(second)

    def _one_pass(self, ids: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
        model, mtp = self.causal.model, self.causal.mtp
        out = model(input_ids=ids, attention_mask=keep, use_cache=False)
        hidden = out.last_hidden_state
        if mtp is None:
            return hidden, None
        rows = _rows(ids)
        pieces = zip(hidden.split(rows), out.embeddings.split(rows), _split(out.context, rows), strict=True)
        with self._loaded("mtp", mtp):
            return hidden, model.norm(torch.cat([mtp(*piece)[0] for piece in pieces]))

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """While it lasts: the function from hidden states [..., H] to logits [..., V]."""
        with self._loaded("lm_head", self.causal.lm_head) as head, torch.no_grad():
            yield lambda hidden: softcap_logits(hidden, head.weight, self.config.logit_softcap)

    @contextmanager
    def _loaded(self, name: str, module: nn.Module) -> Iterator[nn.Module]:
        self._load(name, module)
        yield module
        module.to("meta")

    @torch.no_grad()
    def _load(self, prefix: str, module: nn.Module) -> None:
        """Fills a module that is on the meta device; `prefix` is its name in the model."""
        allocate_model(module)
        wanted: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
        for item in model_tensors(module):
            for name, value in item.split(item.tensor):
                full = f"{prefix}.{name}"
                wanted[self.files[full]].append((full, value))

        def read(file: str) -> None:
            with safe_open(self.folder / file, "pt") as shard, torch.no_grad():
                for name, value in wanted[file]:
                    stored = shard.get_tensor(name)
                    value.copy_(stored)
                    self.on_read(stored.nbytes)

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, list(wanted)))


class _ByPieces(nn.Module):
    """
    A layer, or the embedding, that takes the rows of its input piece by piece.

    Args:
        loaded: gives the context in which the module has its weights.
    """

    def __init__(self, loaded: Callable[[], AbstractContextManager[nn.Module]]):
        super().__init__()
        self.loaded = loaded

    def forward(self, x: Tensor, ctx: LayerContext | None = None):
        """Embeddings [B, S, H] of ids [B, S]; or of a layer, its streams and, not computed, zero as auxiliary loss."""
        rows = _rows(x)
        with self.loaded() as module:
            if ctx is None:
                return torch.cat([module(ids) for ids in x.split(rows)])
            pieces = zip(x.split(rows), _split(ctx, rows), strict=True)
            return torch.cat([module(*piece)[0] for piece in pieces]), x.new_zeros(())


def _rows(batch: Tensor) -> int:
    """Rows of a piece of a batch [B, S, ...]."""
    return max(1, TOKENS_PER_CALL // batch.shape[1])


def _split(ctx: LayerContext, rows: int) -> list[LayerContext]:
    """The context of each piece."""

    def part(tensor: Tensor | None, start: int) -> Tensor | None:
        return None if tensor is None else tensor[start : start + rows]

    return [
        replace(
            ctx,
            position_ids=part(ctx.position_ids, start),
            keep_mask=part(ctx.keep_mask, start),
            document_ids=part(ctx.document_ids, start),
            rotary={size: (part(cos, start), part(sin, start)) for size, (cos, sin) in ctx.rotary.items()},
        )
        for start in range(0, len(ctx.position_ids), rows)
    ]
