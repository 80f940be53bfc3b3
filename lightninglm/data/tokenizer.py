"""A byte-level BPE tokenizer, trained on text and saved so that `AutoTokenizer` loads it."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lightninglm.data.corpus import DataError

END_OF_TEXT = "<|endoftext|>"
MAX_TOKEN_BYTES = 32  # what the byte embedding holds of a token
MIN_VOCAB_SIZE = 257  # every byte and the end token
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# GPT-4's split, with combining marks (\p{M}) kept inside words: Brahmic vowel signs are marks, not letters. A merge
# never crosses a piece, so tokens hold at most one word with the space before it, three digits, or one run of blanks.
PIECES = (
    r"'(?i:[sdmt]|ll|ve|re)"
    r"|[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer on disk: `tokenizer.json` and `tokenizer_config.json`, which names its end token."""

    path: Path
    tokenizer: Tokenizer
    end_id: int
    sha256: str

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end token included."""
        return self.tokenizer.get_vocab_size()

    @classmethod
    def load(cls, path: str | Path) -> "TokenizerFolder":
        """Reads a folder. Raises DataError when a file or the end token is missing."""
        path = Path(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (path / name).is_file():
                raise DataError(f"{path}: has no {name}, not a tokenizer folder")
        data = (path / "tokenizer.json").read_bytes()
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.encode_special_tokens = True  # the end token's name inside a document is text like any other
        end = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
        end = end["content"] if isinstance(end, dict) else end
        end_id = tokenizer.token_to_id(end) if end else None
        if end_id is None:
            raise DataError(f"{path}/tokenizer_config.json: eos_token = {end!r} is not one of its tokens")
        return cls(path, tokenizer, end_id, hashlib.sha256(data).hexdigest())


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> TokenizerFolder:
    """
    Trains a tokenizer and saves it into `folder` (which is created).

    texts: training documents. vocab_size: number of ids, at least 257 (all bytes and the end token).
    Raises DataError when the text is too little for so many tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(f"vocab_size = {vocab_size}: must be at least {MIN_VOCAB_SIZE}, all bytes and the end token")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The library's limit counts UTF-8 bytes of its byte alphabet, where all but ASCII take two: it is set so that no
    # token of 32 bytes is lost, and what is longer is dropped afterwards. Hence the spare tokens.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size + vocab_size // 50 + 64,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        max_token_length=2 * MAX_TOKEN_BYTES + 1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.model = _limited(json.loads(tokenizer.to_str())["model"]["merges"], [END_OF_TEXT, *alphabet], vocab_size)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(
            f"vocab_size = {vocab_size}: the training text has only enough for {tokenizer.get_vocab_size()} tokens; "
            "lower vocab_size or add text"
        )
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return TokenizerFolder.load(folder)


def _limited(merges: list[list[str]], first: list[str], vocab_size: int) -> models.BPE:
    """BPE with the tokens `first` and the merges, in order, that give up to MAX_TOKEN_BYTES and fill the vocabulary."""
    vocabulary, kept = {token: i for i, token in enumerate(first)}, []
    for left, right in merges:
        if len(left + right) > MAX_TOKEN_BYTES:  # one character of the byte alphabet is one byte
            continue
        if left + right not in vocabulary and len(vocabulary) == vocab_size:
            break
        vocabulary.setdefault(left + right, len(vocabulary))
        kept.append((left, right))
    return models.BPE(vocab=vocabulary, merges=kept)
