"""The decoding cache: row operations reach every tensor, what cannot be undone is refused."""

from dataclasses import fields

import pytest
import torch
from transformers.cache_utils import Cache

from lightninglm.modeling.cache import DeltaNetState, LightningLMCache, SparseAttentionKeys
from lightninglm.modeling.gated_deltanet import GatedDeltaNet
from lightninglm.modeling.sparse_attention import GatedSparseAttention
from tests.modeling.mixers import H, context, hidden, mixer_config, randomized

ROWS, PROMPT = 3, 12


def filled(documents=False):
    """Both mixers, and a cache that has seen a prompt with left padding in row 1."""
    config = mixer_config(document_boundaries=documents)
    mixers = [randomized(GatedDeltaNet(config, 0)), randomized(GatedSparseAttention(config, 3)).eval()]
    cache = LightningLMCache(config)
    step(mixers, config, cache, hidden(ROWS, PROMPT), documents)
    cache.memory = hidden(ROWS, 1, seed=7)[:, 0]
    return config, mixers, cache


def step(mixers, config, cache, x, documents=False):
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    if x.shape[1] == PROMPT:
        keep[1, :4] = False
    ids = (torch.arange(len(x)).unsqueeze(1) > 0).long().expand(x.shape[:2]) if documents else None
    ctx = context(config, *x.shape[:2], keep, ids, cache)
    with torch.no_grad():
        return [mixer(x, ctx)[0] for mixer in mixers]


def tensors(cache):
    """Every tensor of the cache by name."""
    found = {"keep_mask": cache.keep_mask, "document_ids": cache.document_ids, "memory": cache.memory}
    for i, layer in enumerate(cache.layers):
        found |= {f"{i}.{field.name}": getattr(layer, field.name) for field in fields(layer)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def test_layers_follow_the_configuration():
    cache = LightningLMCache(mixer_config())
    assert isinstance(cache, Cache)
    assert [type(layer) for layer in cache.layers] == [DeltaNetState] * 3 + [SparseAttentionKeys]
    assert cache.is_linear == [True, True, True, False]
    assert cache.get_seq_length() == 0 and cache.batch_size == -1 and not cache.has_previous_state()


def test_counts_columns_with_padding():
    _, _, cache = filled()
    assert cache.get_seq_length() == PROMPT and cache.batch_size == ROWS and cache.has_previous_state()
    assert cache.get_mask_sizes(1, 0) == (PROMPT + 1, 0) and cache.get_max_length() == -1
    assert cache.keep_mask.sum(1).tolist() == [12, 8, 12]
    assert set(tensors(cache)) == {
        "keep_mask", "memory", "0.state", "0.tail", "3.keys", "3.values", "3.indexer_keys",
    }  # fmt: skip
    assert cache.layers[0].tail.shape == (ROWS, 3, 3 * H) and cache.layers[0].state.dtype == torch.float32


OPERATIONS = {
    "reorder_cache": (torch.tensor([2, 0, 0]), [2, 0, 0]),
    "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    "batch_select_indices": (torch.tensor([1, 2]), [1, 2]),
}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_row_operations_commute_with_decoding(operation, documents):
    argument, rows = OPERATIONS[operation]
    config, mixers, cache = filled(documents)
    before = tensors(cache)
    getattr(cache, operation)(argument)
    for name, tensor in tensors(cache).items():
        assert torch.equal(tensor, before[name][rows]), name

    x = hidden(ROWS, 1, seed=5)
    _, _, untouched = filled(documents)
    ids = torch.tensor(rows)
    expected = [y[ids] for y in step(mixers, config, untouched, x, documents)]
    keep = torch.ones(len(rows), 1, dtype=torch.bool)
    new_documents = (ids > 0).long().unsqueeze(1) if documents else None
    ctx = context(config, len(rows), 1, keep, new_documents, cache)
    for mixer, y in zip(mixers, expected, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(mixer(x[ids], ctx)[0], y, rtol=1e-5, atol=1e-6)


def test_reset_empties_everything():
    config, mixers, cache = filled()
    fresh = step(mixers, config, LightningLMCache(config), hidden(ROWS, 5, seed=2))
    cache.reset()
    assert tensors(cache) == {} and cache.get_seq_length() == 0
    for y, expected in zip(step(mixers, config, cache, hidden(ROWS, 5, seed=2)), fresh, strict=True):
        assert torch.equal(y, expected)


def test_what_a_recurrent_state_cannot_undo_is_refused():
    _, _, cache = filled()
    assert not cache.is_croppable and not cache.is_compileable
    cache.crop(0)
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match="assisted decoding"):
        cache.activate_past_recording()


def test_documents_on_some_calls_only_are_refused():
    _, _, cache = filled()
    with pytest.raises(ValueError, match="every forward pass"):
        cache.extend(torch.ones(ROWS, 1, dtype=torch.bool), torch.zeros(ROWS, 1).long())
