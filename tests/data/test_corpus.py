"""Nothing that is held out is in a training part, and the corpus depends on its files alone."""

import gettext
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pycountry
import pytest

from lightninglm.data import corpus
from lightninglm.data.corpus import TINY_DOMAINS, DataError, is_heldout, read_catalogue, text_corpus, tiny_corpus

LOCALES = Path(pycountry.__file__).parent / "locales"


@pytest.fixture(scope="module")
def tiny():
    made = tiny_corpus()
    return {(domain, part): list(made.read(domain, part)) for domain in made.domains for part in (False, True)}


def digest(parts) -> str:
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def test_every_domain_has_enough_text_in_both_parts(tiny):
    for domain in TINY_DOMAINS:
        assert sum(len(text.encode()) for text in tiny[domain, False]) > 300_000
        assert sum(len(text.encode()) for text in tiny[domain, True]) > 20_000


def test_no_text_is_twice_in_a_domain(tiny):
    for domain in TINY_DOMAINS:
        texts = tiny[domain, False] + tiny[domain, True]
        assert len(texts) == len(set(texts))


def test_a_held_out_name_is_held_out_in_every_language(tiny):
    def names(part):
        lines = [line for d in ("hindi", "tamil", "indic") for text in tiny[d, part] for line in text.split("\n")]
        return {corpus._words(line.partition(" = ")[0]) for line in lines if " = " in line}

    assert len(names(True)) > 300
    assert not names(True) & names(False)


def test_the_indic_domains_are_in_their_scripts(tiny):
    for domain, first, last in (("hindi", "\u0900", "\u097f"), ("tamil", "\u0b80", "\u0bff")):
        text = "".join(tiny[domain, False])
        assert sum(first <= c <= last for c in text) > 0.3 * len(text)


@pytest.mark.skipif(sys.platform == "win32", reason="locale variables are POSIX")
def test_the_corpus_is_the_same_in_another_process_and_locale(tiny):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.data.test_corpus import digest, tiny_corpus\n"
        "made = tiny_corpus()\n"
        "print(digest({(d, p): list(made.read(d, p)) for d in made.domains for p in (False, True)}))"
    )
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONHASHSEED": "77", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", script, root], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == digest(tiny)


def test_a_docstring_of_a_training_file_is_not_held_out_elsewhere(tmp_path, monkeypatch):
    heldout = next(f"a{i}.py" for i in range(1000) if is_heldout(f"a{i}.py"))
    train = next(f"b{i}.py" for i in range(1000) if not is_heldout(f"b{i}.py"))
    shared, own = (
        "A docstring that both of the files have, long enough.",
        "Only the held-out file says this about itself.",
    )
    (tmp_path / heldout).write_text(f'"""{own}"""\ndef f():\n    """{shared}"""\n')
    (tmp_path / train).write_text(f'def g():\n    """{shared}"""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text(
        '"""Tests of the library are not read, neither code nor docstring."""'
    )
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    made = tiny_corpus()
    assert (shared in list(made.read("english", False))) and (own in list(made.read("english", True)))
    assert all(shared not in text for text in made.read("english", True))
    assert [len(list(made.read("code", part))) for part in (False, True)] == [1, 1]


def test_catalogues_are_read_as_gettext_reads_them():
    path = LOCALES / "hi" / "LC_MESSAGES" / "iso3166-1.mo"
    entries = read_catalogue(path)
    with open(path, "rb") as file:
        translations = gettext.GNUTranslations(file)
    assert len(entries) > 400
    assert all(translations.gettext(message) == text for message, text in entries.items())
    with pytest.raises(DataError, match="not a gettext catalogue"):
        read_catalogue(Path(corpus.__file__))


def test_your_own_text_is_split_by_content(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "line {i}"}}\n' for i in range(200)), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("".join(f'{{"text": "line {i}"}}\n' for i in range(100, 300)), encoding="utf-8")
    (tmp_path / "c.txt").write_text("नमस्ते", encoding="utf-8")
    made = text_corpus({"mine": [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.txt")]}, heldout_fraction=0.2)
    train, heldout = (list(made.read("mine", part)) for part in (False, True))
    assert len(train) + len(heldout) == 301 and len(set(train) | set(heldout)) == 301
    assert 30 < len(heldout) < 90
    assert list(made.read("mine", False)) == train


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r'x\.jsonl:2: needs a JSON object with a string under "text"'),
        ("x.jsonl", b"not json\n", r"x\.jsonl:1: not JSON"),
        ("x.jsonl", b'{"text": 5}\n', r"x\.jsonl:1: needs"),
        ("x.txt", b"\xff\xfe", r"x\.txt: not UTF-8"),
        ("x.csv", b"a", r"x\.csv: text is read from"),
    ],
)
def test_text_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(text_corpus({"mine": [tmp_path / name]}).read("mine", False))
