"""Builds a data folder from a source: tokenizer, packed training sequences, held-out sequences. Safe to repeat."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save

from lightninglm.data.corpus import Corpus, DataError, text_corpus, tiny_corpus
from lightninglm.data.loader import FORMAT, heldout_file, read_record
from lightninglm.data.order import shuffled
from lightninglm.data.packing import pack, save_blocks
from lightninglm.data.tokenizer import TOKENIZER_FILES, TokenizerFolder, train_tokenizer

TOKENIZER_TEXT_BYTES = 1_500_000  # per domain, so that a large one does not take the whole vocabulary
HELDOUT_SEQUENCES = 32  # per domain, spread over all of its held-out text


def prepare(source: dict, folder: str | Path, sequence_length: int) -> Path:
    """
    Makes sure that sequences of this length are there and returns the folder that holds them (see `PackedData`).

    source: `{"kind": "tiny", "vocab_size": V}`; `{"kind": "text", "files": {domain: [path, ...]}, "vocab_size": V or
    "tokenizer": folder, "heldout_fraction": f}`; or `{"kind": "packed", "path": folder}`, which is used where it is.
    folder: where the first two are built. What is complete is left alone; what was cut short is built again. Only
    one process may prepare a folder.
    Raises DataError when the folder holds data of another source, when it cannot be written, and for too little text.
    """
    if source["kind"] == "packed":
        return Path(source["path"])
    folder, origin = Path(folder), _origin(source)
    record = read_record(folder)
    if record is not None and record["source"] != origin:
        raise DataError(
            f"{folder}: was made from {json.dumps(record['source'])}, asked for is {json.dumps(origin)}; "
            "use another run folder, or remove this one if nothing trained on it is needed"
        )
    if record is not None and str(sequence_length) in record["packed"]:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("*.building"):
        shutil.rmtree(leftover)
    console = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            _build(source, origin, folder, sequence_length, progress)
    except OSError as error:
        raise DataError(f"{folder}: cannot be completed ({error}); start again when that is solved") from error
    return folder


def _origin(source: dict) -> dict:
    """What identifies a source in data.json: for your own text, the name and size of every file."""
    if source["kind"] == "tiny":
        return {"kind": "tiny", "vocab_size": source["vocab_size"]}
    origin = {key: source[key] for key in ("kind", "vocab_size", "heldout_fraction")}
    origin["files"] = {d: [[Path(f).name, os.path.getsize(f)] for f in files] for d, files in source["files"].items()}
    origin["tokenizer"] = source["tokenizer"] and TokenizerFolder.load(source["tokenizer"]).sha256
    return origin


def _build(source: dict, origin: dict, folder: Path, sequence_length: int, progress: Progress) -> None:
    task = progress.add_task(f"reading the {source['kind']} corpus", total=None)
    if source["kind"] == "tiny":
        corpus = tiny_corpus()
    else:
        corpus = text_corpus(source["files"], source["heldout_fraction"])
    tokenizer = _build_tokenizer(source, corpus, folder, progress)
    progress.remove_task(task)

    heldout = {d: _spread(d, pack(corpus.read(d, True), tokenizer, sequence_length)) for d in corpus.domains}
    building = folder / f"packed-{sequence_length}.building"
    building.mkdir()
    packed = {d: _pack_domain(corpus, d, tokenizer, sequence_length, building, progress) for d in corpus.domains}
    for domain, entry in packed.items():
        entry["heldout_sequences"] = len(heldout[domain])
    shutil.rmtree(building / "scratch")

    target = folder / f"packed-{sequence_length}"
    shutil.rmtree(target, ignore_errors=True)  # of a preparation that was cut short before data.json listed it
    os.rename(building, target)
    _write(heldout_file(folder, sequence_length), save(heldout))
    record = read_record(folder) or {"format": FORMAT, "source": origin, "packed": {}}
    record |= {"tokenizer_sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}
    record["packed"][str(sequence_length)] = packed
    _write(folder / "data.json", (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _build_tokenizer(source: dict, corpus: Corpus, folder: Path, progress: Progress) -> TokenizerFolder:
    """The folder's tokenizer: the one already there, a copy of the one asked for, or one trained on the text."""
    target, building = folder / "tokenizer", folder / "tokenizer.building"
    if read_record(folder) is not None:
        return TokenizerFolder.load(target)
    shutil.rmtree(target, ignore_errors=True)
    if source.get("tokenizer"):
        building.mkdir()
        for name in TOKENIZER_FILES:
            if (Path(source["tokenizer"]) / name).is_file():
                shutil.copy(Path(source["tokenizer"]) / name, building)
    else:
        texts = (text for domain in corpus.domains for text in _sample(corpus, domain))
        task = progress.add_task("training the tokenizer", total=None)
        train_tokenizer(texts, source["vocab_size"], building)
        progress.remove_task(task)
        progress.console.print(f"trained a tokenizer of {source['vocab_size']:,} tokens")
    os.rename(building, target)
    return TokenizerFolder.load(target)


def _sample(corpus: Corpus, domain: str) -> Iterator[str]:
    """About TOKENIZER_TEXT_BYTES of a domain's training text, documents picked evenly over all of it."""
    total = sum(len(text.encode()) for text in corpus.read(domain, False))
    passed = taken = 0
    for text in corpus.read(domain, False):
        if taken * total <= passed * min(total, TOKENIZER_TEXT_BYTES):
            taken += len(text.encode())
            yield text
        passed += len(text.encode())


def _pack_domain(
    corpus: Corpus, domain: str, tokenizer: TokenizerFolder, sequence_length: int, building: Path, progress: Progress
) -> dict:
    """Writes the training sequences of a domain and returns what data.json says about them."""
    read = [0, 0]
    blocks = pack(_counted(corpus.read(domain, False), read), tokenizer, sequence_length)
    first = next(blocks, None)
    if first is None:
        raise DataError(f"domain {domain}: its training text is shorter than one sequence, {sequence_length} tokens")
    task = progress.add_task(f"packing {domain}", total=None)
    blocks = progress.track(chain([first], blocks), task_id=task)
    rows = _save(blocks, building / domain, building / "scratch", sequence_length)
    progress.remove_task(task)
    progress.console.print(f"packed {domain}: {rows:,} sequences of {sequence_length} tokens, {read[1]:,} bytes")
    return {"train_documents": read[0], "train_bytes": read[1], "train_sequences": rows}


def _spread(domain: str, blocks: Iterable[np.ndarray]) -> torch.Tensor:
    """At most HELDOUT_SEQUENCES of the blocks, evenly spaced, int32 [n, S]; shuffled, so that the first few of them
    stand for all of the text as well."""
    blocks = list(blocks)
    if not blocks:
        raise DataError(
            f"domain {domain}: its held-out text is shorter than one sequence; add documents or raise heldout_fraction"
        )
    count = min(HELDOUT_SEQUENCES, len(blocks))
    return torch.from_numpy(np.stack([blocks[shuffled(i, count, 0) * len(blocks) // count] for i in range(count)]))


def _counted(texts: Iterable[str], read: list[int]) -> Iterator[str]:
    """Passes texts on, adding documents and bytes to `read`."""
    for text in texts:
        read[0] += 1
        read[1] += len(text.encode())
        yield text


def _save(blocks: Iterable[np.ndarray], folder: Path, scratch: Path, sequence_length: int) -> int:
    """`save_blocks` without the library's own progress bars, which would draw over ours."""
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return save_blocks(blocks, folder, scratch, sequence_length)
    finally:
        if not hidden:
            datasets.enable_progress_bars()
