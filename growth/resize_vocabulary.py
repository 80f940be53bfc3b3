"""resize_vocabulary: another tokenizer; what the model knows of a token follows the token's bytes.

The embedding has no table: its input is the bytes of a token, so a token of any tokenizer is read as well as before.
The output head has a row per token: a token that both tokenizers have takes its row along, moments and all, and a new
one starts at the mean of all rows, where it is as likely as an average token (Hewitt, "Initializing New Word
Embeddings", 2021), or at random. New rows have exp_avg 0 and the mean exp_avg_sq of all rows, so that Adam's first
steps on them are no larger than on the others.

Not exact: new tokens take probability, and the same text becomes other tokens. The receipt compares losses per byte.
"""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from growth.errors import GrowthError
from growth.operator import OperatorOptions, Origin, Plan, Source, copied, fill, generator, target_config
from growth.tensor_table import TensorSpec
from lightninglm.modeling.byte_embedding import byte_table, token_bytes, tokens_sha256
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig

HEAD = "lm_head.weight"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class ResizeVocabularyOptions(OperatorOptions):
    """
    tokenizer: folder with the new tokenizer.json (byte-level BPE) and tokenizer_config.json.
    strategy:
        mean    rows of new tokens are the mean of the source's rows
        random  they are drawn as for a new model
    """

    tokenizer: str
    strategy: Literal["mean", "random"] = "mean"


def plan(source: Source, options: ResizeVocabularyOptions, seed: int) -> Plan:
    folder = Path(options.tokenizer)
    old, new = list(source.tokens), _read(folder, source.config)
    place = {token: index for index, token in enumerate(old)}
    rows = torch.tensor([place.get(token, -1) for token in new])
    kept = int((rows >= 0).sum())
    if old == new:
        raise GrowthError(f"{folder}: has the tokens of the source's tokenizer, there is nothing to change")
    if kept == 0:
        raise GrowthError(f"{folder}: none of its {len(new):,} tokens is one of the source's {len(old):,}")
    config = target_config(
        source, vocab_size=len(new), tokenizer_sha256=tokens_sha256(new), **_token_ids(source.config, old, new, folder)
    )

    def value(weight: Tensor) -> Tensor:
        if options.strategy == "mean":
            fresh = weight.float().mean(0, keepdim=True)
        else:
            fresh = torch.randn(len(new), weight.shape[1], generator=generator(seed, HEAD)) * config.initializer_range
        return _pick(weight, rows, fresh)

    def origin_of(name: str, spec: TensorSpec) -> Origin:
        if name != HEAD:
            return copied(name)
        return Origin(
            "rows",
            (HEAD,),
            value,
            carry=lambda moment: _pick(moment, rows, torch.zeros(1, 1)),
            carry_square=lambda moment: _pick(moment, rows, moment.mean(0, keepdim=True)),
        )

    return Plan(
        config,
        fill(config, origin_of),
        tokenizer=folder,
        details={"tokens_kept": kept, "tokens_new": len(new) - kept, "tokens_dropped": len(old) - kept},
    )


def _pick(matrix: Tensor, rows: Tensor, fresh: Tensor) -> Tensor:
    """Row i is row rows[i] of the matrix, or (where that is -1) row i of `fresh`, which may have a single row."""
    picked, new = matrix[rows.clamp(min=0)], rows < 0
    picked[new] = fresh.to(matrix.dtype) if len(fresh) == 1 else fresh[new].to(matrix.dtype)
    return picked


def _read(folder: Path, config: LightningLMConfig) -> list[bytes]:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise GrowthError(f"{folder}: has no {name}; `tokenizer` is the folder of the new tokenizer")
    try:
        tokens = token_bytes(folder / "tokenizer.json")
        byte_table(tokens, config.max_token_bytes, config.codec_bytes)
    except ValueError as error:
        raise GrowthError(f"{folder}: the model cannot use this tokenizer: {error}") from error
    return tokens


def _token_ids(
    config: LightningLMConfig, old: list[bytes], new: list[bytes], folder: Path
) -> dict[str, int | list[int]]:
    """The special tokens of the configuration under their new ids."""
    place = {token: index for index, token in enumerate(new)}
    ids: dict[str, int | list[int]] = {}
    for name in TOKEN_IDS:
        index = getattr(config, name)
        if index is None:
            continue
        tokens = [old[i] for i in (index if isinstance(index, list) else [index])]
        absent = [token for token in tokens if token not in place]
        if absent:
            raise GrowthError(f"{folder}: lacks {absent[0]!r}, the model's config.{name}")
        ids[name] = [place[token] for token in tokens] if isinstance(index, list) else place[tokens[0]]
    return ids
