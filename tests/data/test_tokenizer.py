"""The tokenizer is lossless, fits the byte embedding, and is what `AutoTokenizer` loads."""

import json

import pytest
from transformers import AutoTokenizer

from lightninglm.data.corpus import DataError
from lightninglm.data.packing import pack
from lightninglm.data.tokenizer import END_OF_TEXT, MAX_TOKEN_BYTES, TokenizerFolder, train_tokenizer

TEXTS = [
    "def function(argument):\n        return argument + 1\n" * 3,
    "# " + "=" * 4000 + "\n" + " " * 300 + "x\n",
    "The quick brown fox doesn't jump over 12345 lazy dogs.\n\n" * 3,
    "हिन्दी भाषा में लिखा हुआ एक वाक्य। தமிழ் மொழியில் ஒரு வாக்கியம்.\n" * 3,
    "Nicht-ASCII: naïve café \U0001f980 \u200b\r\n\ttabs",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_tokenizer(TEXTS, 400, tmp_path_factory.mktemp("tokenizer") / "t")


def byte_values() -> dict[str, int]:
    """Character of the byte-level alphabet -> byte: printable Latin-1 stands for itself, the rest follows from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def pieces(trained) -> list[bytes]:
    values = byte_values()
    vocabulary = trained.tokenizer.get_vocab(with_added_tokens=True)
    return [bytes(values[c] for c in piece) for piece, i in sorted(vocabulary.items()) if i != trained.end_id]


def test_decoding_undoes_encoding(trained):
    for text in [*TEXTS, "never seen: \u0dc4 ᚠ \x00\x7f", ""]:
        ids = trained.tokenizer.encode(text, add_special_tokens=False).ids
        assert trained.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokens_are_distinct_and_at_most_32_bytes(trained):
    tokens = pieces(trained)
    assert len(set(tokens)) == len(tokens) == trained.vocab_size - 1
    assert max(map(len, tokens)) == MAX_TOKEN_BYTES  # the text has long runs that would merge further
    assert {bytes([byte]) for byte in range(256)} <= set(tokens)


def test_no_token_spans_words(trained):
    for token in pieces(trained):
        text = token.decode("utf-8", "ignore")
        if any(c.isalpha() for c in text):
            assert not any(c.isspace() for c in text[1:])


def test_training_is_deterministic(trained, tmp_path):
    assert train_tokenizer(iter(TEXTS), 400, tmp_path / "again").sha256 == trained.sha256


def test_auto_tokenizer_gives_the_same_ids(trained):
    loaded = AutoTokenizer.from_pretrained(trained.path)
    assert loaded.eos_token == loaded.pad_token == END_OF_TEXT
    assert loaded.eos_token_id == trained.end_id
    assert len(loaded) == trained.vocab_size == 400
    for text in TEXTS:
        assert loaded(text)["input_ids"] == trained.tokenizer.encode(text).ids
        assert loaded.decode(loaded(text)["input_ids"]) == text


def test_the_end_token_written_in_a_document_does_not_end_it(trained):
    (block,) = pack([f"a{END_OF_TEXT}b"], trained, len(trained.tokenizer.encode(f"a{END_OF_TEXT}b").ids) + 1)
    assert list(block).count(trained.end_id) == 1 and block[-1] == trained.end_id


def test_too_large_and_too_small_vocabularies_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"vocab_size = 5000.* only enough for \d+"):
        train_tokenizer(["a few words"], 5000, tmp_path / "large")
    with pytest.raises(DataError, match="vocab_size = 100"):
        train_tokenizer(["a few words"], 100, tmp_path / "small")


def test_a_folder_without_an_end_token_is_refused(trained, tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        TokenizerFolder.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((trained.path / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(DataError, match="eos_token = '</s>'"):
        TokenizerFolder.load(tmp_path)
