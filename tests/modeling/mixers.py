"""What the tests of the two mixers share: a tiny configuration, contexts, and running a sequence piece by piece."""

import torch

from lightninglm.modeling.cache import LightningLMCache
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.rotary import RotaryEmbedding

H = 32


def mixer_config(**changes) -> LightningLMConfig:
    """Four layers of width 32; sparse attention keeps 4 to 12 of the keys, 2 of them sinks."""
    values = {
        "vocab_size": 64, "hidden_size": H, "num_hidden_layers": 4, "intermediate_size": 24, "linear_num_heads": 4,
        "linear_head_dim": 8, "num_attention_heads": 2, "head_dim": 16, "sparse_key_budget": 6, "sparse_min_keys": 4,
        "sparse_max_keys": 12, "sparse_sink_keys": 2, "indexer_num_heads": 3, "indexer_head_dim": 8,
    }  # fmt: skip
    return LightningLMConfig(**values | changes)


def randomized(module, seed=0, scale=0.4):
    """The module with every parameter drawn anew, so that nothing is zero or one by initialization."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


def hidden(rows, length, seed=0):
    """[rows, length, H] inputs of a mixer."""
    return torch.randn(rows, length, H, generator=torch.Generator().manual_seed(seed))


def positions(keep):
    """Position of each token: real tokens before it."""
    return (keep.cumsum(1) - 1).clamp(min=0)


def context(config, rows, length, keep=None, documents=None, cache=None, **fields) -> LayerContext:
    """The context of `length` new tokens; positions follow the mask and restart in each document."""
    mask = torch.ones(rows, length, dtype=torch.bool) if keep is None else keep
    past = 0
    if cache is not None:
        past = cache.get_seq_length()
        cache.extend(mask, documents)
        mask = cache.keep_mask
    place = positions(mask)
    all_documents = documents if cache is None else cache.document_ids
    if all_documents is not None:
        same = (all_documents.unsqueeze(1) == all_documents.unsqueeze(2)) & mask.unsqueeze(1)
        place = (same.tril().sum(-1) - 1).clamp(min=0)
    place = place[:, past:]
    return LayerContext(
        place, keep_mask=keep, document_ids=documents, rotary=RotaryEmbedding(config)(place), cache=cache, **fields
    )


@torch.no_grad()
def in_pieces(mixer, config, x, pieces, keep=None, documents=None):
    """The outputs of consecutive forward passes over `pieces` tokens each, through one cache, concatenated."""
    cache, outputs, start = LightningLMCache(config), [], 0
    for length in pieces:
        part = slice(start, start + length)
        ctx = context(
            config, len(x), length, None if keep is None else keep[:, part],
            None if documents is None else documents[:, part], cache,
        )  # fmt: skip
        outputs.append(mixer(x[:, part], ctx)[0])
        start += length
    return torch.cat(outputs, dim=1)
