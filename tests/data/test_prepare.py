"""A data folder is complete or not there, the same however often it is built, and refused when its parts do not fit."""

import hashlib
import resource
import shutil

import numpy as np
import pytest
import torch

from lightninglm.data import corpus, packing
from lightninglm.data import prepare as preparation
from lightninglm.data.corpus import DataError
from lightninglm.data.loader import PackedData
from lightninglm.data.order import GlobalOrder
from lightninglm.data.packing import pack
from lightninglm.data.prepare import prepare
from lightninglm.data.tokenizer import train_tokenizer

S = 32


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two small domains of distinct numbered lines."""
    folder = tmp_path_factory.mktemp("text")
    for domain, word in (("first", "alpha"), ("second", "बीटा")):
        lines = (f'{{"text": "{" ".join(f"{word} {i}{j}" for j in range(9))}"}}\n' for i in range(400))
        (folder / f"{domain}.jsonl").write_text("".join(lines), encoding="utf-8")
    files = {domain: [folder / f"{domain}.jsonl"] for domain in ("first", "second")}
    return {"kind": "text", "files": files, "vocab_size": 400, "tokenizer": None, "heldout_fraction": 0.1}


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    return prepare(source, tmp_path_factory.mktemp("run") / "data", S)


def contents(folder) -> dict[str, str]:
    """Hash of every file that decides what is trained on (the state files of `datasets` hold a random fingerprint)."""
    files = [
        path for path in folder.rglob("*") if path.is_file() and path.name not in ("state.json", "dataset_info.json")
    ]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("at_once", [1, 3, 256])
def test_packing_lays_documents_end_to_end(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(packing, "DOCUMENTS_AT_ONCE", at_once)
    texts = [f"document {i} " * (i % 7) for i in range(50)]
    tokenizer = train_tokenizer(texts, 280, tmp_path / "tokenizer")
    stream = [t for text in texts for t in [*tokenizer.tokenizer.encode(text).ids, tokenizer.end_id]]
    blocks = list(pack(texts, tokenizer, S))
    assert len(blocks) == len(stream) // S > 10
    assert np.concatenate(blocks).tolist() == stream[: len(blocks) * S]
    assert all(block.dtype == np.int32 for block in blocks)


def test_batches_are_the_rows_of_the_order(built):
    data = PackedData(built, S)
    order = GlobalOrder(data.sizes, {"first": 0.5, "second": 0.5}, seed=1)
    batch = data.batch(order, range(10, 16))
    assert batch.shape == (6, S) and batch.dtype == torch.int64
    for row, k in zip(batch, range(10, 16), strict=True):
        domain, index = order[k]
        assert torch.equal(row, data.train(domain)[index]["input_ids"])
    assert batch.min() >= 0 and batch.max() < data.tokenizer.vocab_size == 400


def test_nothing_held_out_is_trained_on(built):
    data = PackedData(built, S)
    decode = data.tokenizer.tokenizer.decode
    for domain in data.domains:
        train = decode([t for row in range(data.sizes[domain]) for t in data.train(domain)[row]["input_ids"].tolist()])
        heldout = [decode(row.tolist()) for row in data.heldout[domain]]
        assert 0 < len(heldout) <= 32 and data.heldout[domain].dtype == torch.int32
        assert all(text not in train for text in heldout)


def test_preparing_again_changes_nothing(built, source):
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    assert prepare(source, built, S) == built
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before


@pytest.mark.parametrize("failing", ["save_blocks", "_write"])
def test_a_preparation_cut_short_is_made_good(built, source, tmp_path, monkeypatch, failing):
    real, calls = getattr(preparation, failing), []

    def killed(*args):
        calls.append(args)
        if len(calls) == (2 if failing == "save_blocks" else 1):
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(preparation, failing, killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(source, tmp_path / "data", S)
    with pytest.raises(DataError, match=r"no data\.json"):
        PackedData(tmp_path / "data", S)
    prepare(source, tmp_path / "data", S)
    assert contents(tmp_path / "data") == contents(built)


def test_a_full_disk_is_reported_and_made_good(built, source, tmp_path):
    """A limit on the size of files stands for the full disk: writing fails part of the way through a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (4_000, 50_000):  # in the tokenizer, in the sequences
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(DataError, match=r"cannot be completed .* start again"):
                prepare(source, tmp_path / "data", S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not (tmp_path / "data" / "data.json").exists()
    prepare(source, tmp_path / "data", S)
    assert contents(tmp_path / "data") == contents(built)


def test_another_length_shares_the_tokenizer(built, source, tmp_path):
    shutil.copytree(built, tmp_path / "data")
    before = contents(tmp_path / "data")
    prepare(source, tmp_path / "data", 2 * S)
    after = contents(tmp_path / "data")
    assert all(after[name] == hashed for name, hashed in before.items() if name != "data.json")
    assert PackedData(tmp_path / "data", S).sizes != PackedData(tmp_path / "data", 2 * S).sizes


def test_another_source_is_refused_and_nothing_is_touched(built, source):
    before = contents(built)
    with pytest.raises(DataError, match=r"was made from .*400.* asked for is .*300"):
        prepare(source | {"vocab_size": 300}, built, S)
    assert contents(built) == before


def test_a_tokenizer_of_your_own_is_used(built, source, tmp_path):
    own = source | {"vocab_size": None, "tokenizer": built / "tokenizer"}
    data = PackedData(prepare(own, tmp_path / "data", S), S)
    assert data.tokenizer.sha256 == PackedData(built, S).tokenizer.sha256
    assert data.batch(GlobalOrder(data.sizes, {"first": 1.0}), range(3)).equal(
        PackedData(built, S).batch(GlobalOrder(data.sizes, {"first": 1.0}), range(3))
    )


def test_packed_data_is_used_where_it_is(built, tmp_path):
    assert prepare({"kind": "packed", "path": str(built)}, tmp_path / "unused", S) == built
    assert not (tmp_path / "unused").exists()


def test_too_little_text_is_refused(source, tmp_path):
    with pytest.raises(DataError, match="domain first: its held-out text is shorter than one sequence"):
        prepare(source, tmp_path / "data", 10_000)
    with pytest.raises(DataError, match="domain first: its training text is shorter than one sequence, 5000 tokens"):
        prepare(source | {"heldout_fraction": 0.9}, tmp_path / "data", 5000)
    assert not (tmp_path / "data" / "data.json").exists()


def test_a_folder_whose_parts_do_not_fit_is_refused(built, tmp_path):
    def damaged(name, change):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        shutil.copytree(built, tmp_path / "data")
        change(tmp_path / "data" / name)
        return tmp_path / "data"

    cases = [
        (f"packed-{S}/first", shutil.rmtree, "first: missing"),
        (f"heldout-{S}.safetensors", lambda path: path.unlink(), "missing"),
        ("tokenizer/tokenizer.json", lambda path: path.write_text(path.read_text() + " "), "not the one"),
        ("data.json", lambda path: path.write_text("{"), "not JSON"),
        ("data.json", lambda path: path.write_text('{"format": 7}'), '"format": 1'),
        ("data.json", lambda path: path.write_text('{"format": 1}'), "and packed, source"),
        ("data.json", lambda path: path.unlink(), r"no data\.json"),
    ]
    for name, change, message in cases:
        with pytest.raises(DataError, match=message):
            PackedData(damaged(name, change), S)
    with pytest.raises(DataError, match=f"no sequences of length 99, only of {S}"):
        PackedData(built, 99)


def test_the_tiny_corpus_from_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_SOURCE_BYTES", 15_000)  # a part of the code is enough here
    monkeypatch.setattr(preparation, "TOKENIZER_TEXT_BYTES", 100_000)
    data = PackedData(prepare({"kind": "tiny", "vocab_size": 512}, tmp_path / "data", 256), 256)
    assert data.domains == ["code", "english", "hindi", "tamil", "indic"]
    assert all(len(data.heldout[domain]) >= 16 for domain in data.domains)
    assert data.tokenizer.vocab_size == 512
