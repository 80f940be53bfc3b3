"""Documents to fixed blocks of tokens: joined by the end token, cut without padding, stored as Arrow."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError

from lightninglm.data.tokenizer import TokenizerFolder

DOCUMENTS_AT_ONCE = 256


def pack(texts: Iterable[str], tokenizer: TokenizerFolder, sequence_length: int) -> Iterator[np.ndarray]:
    """
    Yields blocks of `sequence_length` tokens (int32) of the documents laid end to end, the end token after each.

    A document may continue in the next block. What is left after the last full block is dropped.
    """
    texts, rest = iter(texts), np.empty(0, np.int32)
    while documents := list(islice(texts, DOCUMENTS_AT_ONCE)):
        encodings = tokenizer.tokenizer.encode_batch_fast(documents, add_special_tokens=False)
        tokens = np.concatenate([rest, *(np.array([*e.ids, tokenizer.end_id], np.int32) for e in encodings)])
        full = len(tokens) - len(tokens) % sequence_length
        yield from tokens[:full].reshape(-1, sequence_length)
        rest = tokens[full:]


def save_blocks(blocks: Iterable[np.ndarray], folder: Path, scratch: Path, sequence_length: int) -> int:
    """Writes blocks as a `datasets` folder (one column, `input_ids`) and returns how many. Arrow files that are only
    needed on the way are put under `scratch`."""
    try:
        dataset = Dataset.from_generator(
            lambda: ({"input_ids": block} for block in blocks),
            features=Features({"input_ids": List(Value("int32"), length=sequence_length)}),
            cache_dir=str(scratch),
            fingerprint=folder.name,
        )
    except DatasetGenerationError as error:  # says only that there was an error
        raise error.__cause__ from None
    dataset.save_to_disk(str(folder))
    return len(dataset)
