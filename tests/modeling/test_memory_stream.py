"""The memory stream: the formula, where its gradient goes, which tokens it reaches, decoding."""

import pytest
import torch

from lightninglm.modeling.memory_stream import MemoryStream, continued_document, last_real_token
from tests.modeling.tiny_models import (
    assert_same_but_for_rounding,
    random_ids,
    spread_weights,
    tiny_config,
    tiny_model,
)


def test_injection_is_the_formula():
    module = MemoryStream(tiny_config("dense"))
    x, memory = torch.randn(2, 5, 64), torch.randn(2, 64)
    normed = (memory - memory.mean(-1, keepdim=True)) / (memory.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    gate = torch.sigmoid(x @ module.gate.weight.T + module.gate.bias)
    expected = x + torch.log1p(module.scale.exp()) * gate * normed[:, None]
    assert torch.allclose(module(x, memory), expected, atol=1e-6)


def test_memory_reaches_its_parameters_and_not_the_previous_chunk():
    model = tiny_model("dense").train()
    ids, memory = random_ids(2, 16), torch.randn(2, 64, requires_grad=True)
    model(ids, labels=ids, prev_memory=memory).loss.backward()
    assert all(parameter.grad.any() for parameter in model.model.memory.parameters())
    assert memory.grad is None


def test_memory_out_is_the_last_real_token():
    hidden = torch.randn(3, 4, 8)
    keep = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    assert torch.equal(last_real_token(hidden, keep), hidden[torch.arange(3), torch.tensor([3, 1, 2])])
    assert torch.equal(last_real_token(hidden, None), hidden[:, -1])


def test_only_the_continued_document_is_injected():
    documents = torch.tensor([[4, 4, 5, 5], [9, 7, 7, 8]])
    keep = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
    expected = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    assert torch.equal(continued_document(documents, keep), expected)
    model = spread_weights(tiny_model("dense", document_boundaries=True)).eval()
    ids, memory = random_ids(1, 12), torch.randn(1, 64)
    documents = (torch.arange(12) >= 5).long()[None]
    with torch.no_grad():
        plain = model(ids, document_ids=documents).logits
        carried = model(ids, document_ids=documents, prev_memory=memory).logits
    assert not torch.equal(plain[:, :5], carried[:, :5])
    assert torch.equal(plain[:, 5:], carried[:, 5:])


def test_decoding_with_a_memory_equals_the_full_forward():
    model = spread_weights(tiny_model("dense", frac_bits=20)).eval()
    ids, memory = random_ids(2, 14), torch.randn(2, 64)
    with torch.no_grad():
        full = model(ids, prev_memory=memory)
        start = model(ids[:, :9], prev_memory=memory, use_cache=True)
        rest = [model(ids[:, t : t + 1], cache=start.cache, prev_memory=memory, use_cache=True) for t in range(9, 14)]
    assert_same_but_for_rounding(torch.cat([out.logits for out in rest], 1), full.logits[:, 9:], frac_bits=20)
    assert_same_but_for_rounding(rest[-1].memory, full.memory, frac_bits=20)


def test_memory_without_the_stream_is_refused():
    with pytest.raises(ValueError, match=r"config\.memory_stream"):
        tiny_model("dense", memory_stream=False)(random_ids(1, 4), prev_memory=torch.zeros(1, 64))
