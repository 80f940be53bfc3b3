"""The byte embedding: closed form equals dense codes, distinct codes for all ids, tokenizers checked."""

import json
from pathlib import Path

import pytest
import torch

from lightninglm.modeling.byte_embedding import (
    ByteEmbedding,
    ByteProjection,
    byte_alphabet,
    byte_table,
    code_values,
    decoded_text,
    dense_codes,
    token_bytes,
    tokens_sha256,
)
from tests.modeling.tiny_models import TOKENS, save_tokenizer, tiny_config

X = 32


def random_tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = {}
    while len(tokens) < count:
        length = int(torch.randint(1, X + 1, (), generator=generator))
        tokens[bytes(torch.randint(0, 256, (length,), generator=generator).tolist())] = None
    return list(tokens)


def projection(hidden, dtype=torch.float32):
    module = ByteProjection(X, hidden)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    return module.to(dtype)


def project(module, tokens):
    table, lengths = byte_table(tokens, X, "raw_bytes")
    return module(table, lengths, *code_values(X))


def write_tokenizer(path: Path, vocabulary: dict[str, int], added=(), kind="BPE") -> Path:
    path.write_text(json.dumps({"model": {"type": kind, "vocab": vocabulary}, "added_tokens": list(added)}))
    return path


def byte_level_pieces(count):
    """Distinct pieces: all single bytes, then pairs and triples."""
    alphabet = list(byte_alphabet())
    pieces = list(alphabet) + [a + b for a in alphabet for b in alphabet]
    pieces += [a + a + b for a in alphabet for b in alphabet][: max(0, count - len(pieces))]
    return pieces[:count]


@pytest.mark.parametrize(
    "n, hot, cold",
    [(1, 90.490, -0.01105), (5, 40.459, -0.02471), (18, 21.307, -0.04692), (32, 15.966, -0.06261)],
)
def test_code_values_are_those_of_the_specification(n, hot, cold):
    values = code_values(X)
    assert values[0][n].item() == pytest.approx(hot, abs=1e-3)
    assert values[1][n].item() == pytest.approx(cold, abs=1e-5)


def test_gather_equals_the_dense_product_forward_and_backward():
    tokens, module = random_tokens(200), projection(48)
    codes = dense_codes(tokens, X)
    grad = torch.randn(200, 48, generator=torch.Generator().manual_seed(2))
    out = project(module, tokens)
    out.backward(grad)
    expected = codes @ module.weight.double().t()
    expected_grad = grad.double().t() @ codes
    assert (out - expected).abs().max() < 1e-6 * expected.abs().max()
    assert (module.weight.grad - expected_grad).abs().max() < 1e-6 * expected_grad.abs().max()


def test_gradient_is_bitwise_repeatable_and_in_the_dtype_of_the_weight():
    module = projection(16, torch.bfloat16)
    tokens = random_tokens(300)
    grads = []
    for _ in range(2):
        module.weight.grad = None
        project(module, tokens).sum().backward()
        grads.append(module.weight.grad)
    assert grads[0].dtype == torch.bfloat16 and torch.equal(*grads)


def test_published_codes_are_rounded_to_bf16():
    tokens, module = random_tokens(50), projection(16)
    table, lengths = byte_table(tokens, X, "raw_bytes")
    out = module(table, lengths, *code_values(X, rounded=True))
    expected = dense_codes(tokens, X).bfloat16().double() @ module.weight.double().t()
    assert (out - expected).abs().max() < 1e-6 * expected.abs().max()


def test_all_ids_of_a_byte_level_vocabulary_have_distinct_codes(tmp_path):
    pieces = byte_level_pieces(131_072)
    tokens = token_bytes(write_tokenizer(tmp_path / "tokenizer.json", {piece: i for i, piece in enumerate(pieces)}))
    table, lengths = byte_table(tokens, X, "raw_bytes")
    assert table.shape == (131_072, X) and table.dtype == torch.uint8 and lengths.dtype == torch.int16
    assert len(torch.cat([table.int(), lengths[:, None].int()], dim=1).unique(dim=0)) == 131_072


def test_token_bytes_agrees_with_the_tokenizer(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    tokens = token_bytes(tmp_path / "tokenizer.json")
    text = "été, नमस्ते — 'rest' eats\n\t\0"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(tokens[i] for i in ids) == text.encode()
    assert tokens[tokenizer.pad_token_id] == b"<pad>" and len(tokens) == len(tokenizer)


def test_published_text_of_incomplete_characters_collapses():
    assert decoded_text(7, b"\xe0\xa4", X) == decoded_text(8, b"\xc3", X) == "�".encode()
    assert decoded_text(9, b"", X) == b"<unk_9>"
    long = "é".encode() * 20
    assert decoded_text(0, long[:-1], X) == "é".encode() * 16
    table, _ = byte_table([b"\xe0\xa4", b"\xc3"], X, "decoded_text")
    assert torch.equal(table[0], table[1])


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([b"a", b"b", b"a"], "tokens 0 and 2 have the same bytes b'a'"),
        ([b"a", b""], "token 1 b'' has 0 bytes"),
        ([b"x" * 33], "has 33 bytes: must have 1 to 32"),
    ],
)
def test_tokens_that_have_no_code_of_their_own_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        byte_table(tokens, X, "raw_bytes")


def test_tokenizers_that_are_not_byte_level_bpe_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"model\.type is not BPE"):
        token_bytes(write_tokenizer(path, {}, kind="Unigram"))
    with pytest.raises(ValueError, match="token 1 '▁the'"):
        token_bytes(write_tokenizer(path, {"a": 0, "▁the": 1}))
    with pytest.raises(ValueError, match="2 tokens, but no token has id 1"):
        token_bytes(write_tokenizer(path, {"a": 0, "b": 2}))


def test_embedding_checks_its_tokenizer():
    module = ByteEmbedding(tiny_config("dense"))
    with pytest.raises(RuntimeError, match="load_token_bytes"):
        module(torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"the tokenizer has 3 ids, but config\.vocab_size = 512"):
        module.set_tokens(TOKENS[:3])
    module.set_tokens(TOKENS)
    assert module.config.tokenizer_sha256 == tokens_sha256(TOKENS)
    with pytest.raises(ValueError, match="trained with another tokenizer"):
        module.set_tokens(TOKENS[::-1])
    assert not any("token_" in name for name in module.state_dict())
