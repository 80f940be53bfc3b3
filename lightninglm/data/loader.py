"""Packed data on disk, read by row (memory-mapped) or by position of the global order."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file

from lightninglm.data.corpus import DataError
from lightninglm.data.order import GlobalOrder
from lightninglm.data.tokenizer import TokenizerFolder

FORMAT = 1
RECORD_KEYS = {"source", "packed", "tokenizer_sha256", "vocab_size"}


class PackedData:
    """
    The packed sequences of one length S in a data folder.

        data.json                     what the folder holds; written last
        tokenizer/                    tokenizer.json, tokenizer_config.json
        packed-<S>/<domain>/          training sequences, a `datasets` folder with the column input_ids (int32 [S])
        heldout-<S>.safetensors       per domain int32 [n, S], for evaluation; never trained on

    Raises DataError when the folder is incomplete or its parts do not fit together.
    """

    def __init__(self, folder: str | Path, sequence_length: int):
        self.folder, self.sequence_length = Path(folder), sequence_length
        record = read_record(self.folder)
        if record is None:
            raise DataError(f"{self.folder}: has no data.json, not a data folder or one not yet complete")
        packed = record["packed"].get(str(sequence_length))
        if packed is None:
            raise DataError(
                f"{self.folder}: has no sequences of length {sequence_length}, only of {', '.join(record['packed'])}"
            )
        self.tokenizer = TokenizerFolder.load(self.folder / "tokenizer")
        if self.tokenizer.sha256 != record["tokenizer_sha256"]:
            raise DataError(f"{self.folder}/tokenizer/tokenizer.json: not the one the sequences were made with")
        self.sizes: dict[str, int] = {domain: entry["train_sequences"] for domain, entry in packed.items()}
        self.heldout = self._read_heldout()
        self._train = {domain: self._open(domain, rows) for domain, rows in self.sizes.items()}

    @property
    def domains(self) -> list[str]:
        """Names of the domains."""
        return list(self.sizes)

    def train(self, domain: str) -> Dataset:
        """Training sequences of a domain; `train(domain)[row]["input_ids"]` is a LongTensor [S]."""
        return self._train[domain]

    def batch(self, order: GlobalOrder, positions: Iterable[int]) -> torch.Tensor:
        """The sequences at these positions of the order, LongTensor [len(positions), S]."""
        rows = [order[k] for k in positions]
        return torch.stack([self._train[domain][row]["input_ids"] for domain, row in rows])

    def _open(self, domain: str, rows: int) -> Dataset:
        path = self.folder / f"packed-{self.sequence_length}" / domain
        if not path.is_dir():
            raise DataError(f"{path}: missing, but data.json lists the domain")
        dataset = load_from_disk(str(path))
        column = dataset.features.get("input_ids")
        if len(dataset) != rows or getattr(column, "length", None) != self.sequence_length:
            raise DataError(
                f"{path}: holds {len(dataset)} rows of {column}, data.json says {rows} sequences of "
                f"{self.sequence_length} tokens"
            )
        return dataset.with_format("torch", dtype=torch.int64)

    def _read_heldout(self) -> dict[str, torch.Tensor]:
        path = heldout_file(self.folder, self.sequence_length)
        if not path.is_file():
            raise DataError(f"{path}: missing")
        heldout = load_file(path)
        for domain in self.sizes:
            tokens = heldout.get(domain)
            shaped = tokens is not None and len(tokens) > 0 and tokens.shape[1:] == (self.sequence_length,)
            if not shaped or tokens.dtype != torch.int32:
                raise DataError(f"{path}: needs {domain} as int32 [n, {self.sequence_length}], n > 0")
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.tokenizer.vocab_size:
                raise DataError(f"{path}: {domain} has ids outside the tokenizer's 0..{self.tokenizer.vocab_size - 1}")
        return {domain: heldout[domain] for domain in self.sizes}


def heldout_file(folder: Path, sequence_length: int) -> Path:
    """Where a data folder keeps its held-out sequences of one length."""
    return folder / f"heldout-{sequence_length}.safetensors"


def read_record(folder: Path) -> dict | None:
    """Contents of data.json, or None when there is none. Raises DataError when it is not ours."""
    path = Path(folder) / "data.json"
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or not record.keys() >= RECORD_KEYS:
        raise DataError(f'{path}: needs "format": {FORMAT} and {", ".join(sorted(RECORD_KEYS))}')
    return record
