"""Where the text comes from: documents per domain, each with a training and a held-out part that share nothing."""

import ast
import hashlib
import importlib.util
import json
import re
import struct
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TINY_DOMAINS = ("code", "english", "hindi", "tamil", "indic")
"""Domains of the tiny corpus. `indic` joins the languages that are too small to be measured alone."""

INDIC_LANGUAGES = {
    "hi": "hindi",
    "ta": "tamil",
    **dict.fromkeys(("as", "bn", "gu", "kn", "kok", "mai", "ml", "mr", "ne", "or", "pa", "si", "te"), "indic"),
}
"""Language code of a pycountry catalogue -> domain."""

SKIPPED_FOLDERS = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test",  # not the library itself
    "encodings", "pydoc_data",  # character tables; help topics, which are the `english` domain's
    "lib2to3", "distutils", "ensurepip",  # not in every Python, or copies of other files
}  # fmt: skip
MAX_SOURCE_BYTES = 200_000
MIN_DOCSTRING_LETTERS = 30
ENTRIES_PER_DOCUMENT = 32


class DataError(ValueError):
    """Text, tokenizer or packed data that cannot be used. The message says what was found and what to do."""


@dataclass(frozen=True)
class Corpus:
    """Documents by domain. `read(domain, heldout)` yields the texts of one part, the same ones in the same order at
    every call; no text is in both parts."""

    domains: tuple[str, ...]
    read: Callable[[str, bool], Iterator[str]]


def is_heldout(key: str, fraction: float = 0.05) -> bool:
    """Whether everything filed under `key` is held out: a fixed pseudo-random choice that depends on the key alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < fraction * 2**64


# --- the tiny corpus: text that every installation of this project already has ---


def tiny_corpus() -> Corpus:
    """
    Code, English and Indic text of the running Python and of the `pycountry` wheel; nothing is downloaded.

    code: the .py files of the standard library. english: their docstrings and the help topics of `pydoc`. hindi,
    tamil, indic: the gettext catalogues of country, currency, script and language names, English and translation
    together. A source file is held out with its docstrings; an English name is held out in all languages at once.
    """
    library = Path(sysconfig.get_path("stdlib"))
    parts: dict[tuple[str, bool], list[str]] = {(domain, part): [] for domain in TINY_DOMAINS for part in (False, True)}
    sources, seen = _library_sources(library), set()
    for part in (False, True):  # training first: a text that is in both stays there
        for name, text in sources:
            if is_heldout(name) == part:
                parts["code", part] += _new([text], seen)
                parts["english", part] += filter(None, ["\n\n".join(_new(_docstrings(text), seen))])
        parts["english", part] += _new((t for k, t in _help_topics() if is_heldout(k) == part), seen)
    for domain, heldout, text in _catalogue_documents():
        parts[domain, heldout].append(text)
    return Corpus(TINY_DOMAINS, lambda domain, heldout: iter(parts[domain, heldout]))


def _new(texts: Iterable[str], seen: set[bytes]) -> Iterator[str]:
    """The texts not yet in `seen`, which remembers them."""
    for text in texts:
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield text


def _library_sources(library: Path) -> list[tuple[str, str]]:
    """(path below the library, text) of each Python file worth reading, sorted by path."""
    sources = []
    for path in library.rglob("*.py"):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        if 0 < path.stat().st_size <= MAX_SOURCE_BYTES:
            with tokenize.open(path) as file:
                sources.append((relative.as_posix(), file.read()))
    return sorted(sources)


def _docstrings(source: str) -> Iterator[str]:
    """Docstrings of a module and of all its classes and functions, as `help` shows them, in the order of the file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text and sum(map(str.isalpha, text)) >= MIN_DOCSTRING_LETTERS:
            yield text


def _help_topics() -> list[tuple[str, str]]:
    """(name, text) of the topics that `help("topics")` lists."""
    from pydoc_data.topics import topics

    return sorted((f"pydoc topic {name}", text) for name, text in topics.items())


def _catalogue_documents() -> Iterator[tuple[str, bool, str]]:
    """(domain, held out, text) with up to 32 entries of one catalogue in each text."""
    spec = importlib.util.find_spec("pycountry")
    if spec is None:
        raise DataError("the tiny corpus reads the catalogues of pycountry: pip install -r requirements.txt")
    done = set()
    for path in sorted(Path(spec.origin).parent.glob("locales/*/LC_MESSAGES/*.mo")):
        language = path.parts[-3].partition("_")[0]
        if language not in INDIC_LANGUAGES or path.parts[-3] == "pa_PK":  # pa_PK: a few words in Arabic script
            continue
        parts = {False: [], True: []}
        for english, translation in read_catalogue(path).items():
            line = f"{english} = {translation}"
            if english != translation and (language, line) not in done:
                done.add((language, line))
                parts[is_heldout(_words(english))].append(line)
        for heldout, lines in parts.items():
            for start in range(0, len(lines), ENTRIES_PER_DOCUMENT):
                yield INDIC_LANGUAGES[language], heldout, "\n".join(lines[start : start + ENTRIES_PER_DOCUMENT])


def _words(name: str) -> str:
    """The words of a name in alphabetical order: `Arabic, Standard` and `Standard Arabic` are one entry."""
    return " ".join(sorted(re.findall(r"\w+", name.casefold())))


def read_catalogue(path: Path) -> dict[str, str]:
    """Message -> translation of a compiled gettext catalogue (.mo), sorted; without header, contexts and plurals."""
    data = path.read_bytes()
    order = {0x950412DE: "<", 0xDE120495: ">"}.get(struct.unpack_from("<I", data)[0])
    if order is None:
        raise DataError(f"{path}: not a gettext catalogue (.mo)")
    count, originals, translations = struct.unpack_from(f"{order}3I", data, 8)

    def text(table: int, i: int) -> str:
        length, start = struct.unpack_from(f"{order}2I", data, table + 8 * i)
        return data[start : start + length].decode("utf-8")

    entries = {text(originals, i): text(translations, i) for i in range(count)}
    return {m: t for m, t in sorted(entries.items()) if m and t and not {"\0", "\4"}.intersection(m)}


# --- your own text ---


def text_corpus(files: dict[str, Sequence[Path]], heldout_fraction: float = 0.05) -> Corpus:
    """
    Documents of `.txt` files (one each) and `.jsonl` files (one a line, under the key "text"), by domain.

    Which part a document belongs to depends on its text alone, so copies of a text never are on both sides; repeated
    documents of a domain are read once.
    """

    def read(domain: str, heldout: bool) -> Iterator[str]:
        texts = (text for path in files[domain] for text in _read_texts(path))
        yield from _new((text for text in texts if text and is_heldout(text, heldout_fraction) == heldout), set())

    return Corpus(tuple(files), read)


def _read_texts(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as file:
            if path.suffix == ".txt":
                yield file.read()
                return
            if path.suffix != ".jsonl":
                raise DataError(f"{path}: text is read from .txt and .jsonl files")
            for number, line in enumerate(file, 1):
                yield _text_of(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _text_of(line: str, place: str) -> str:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    if not (isinstance(document, dict) and isinstance(document.get("text"), str)):
        raise DataError(f'{place}: needs a JSON object with a string under "text"')
    return document["text"]
