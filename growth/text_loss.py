"""The loss of models with different tokenizers on the same text, in nats per byte."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from growth.errors import GrowthError
from lightninglm.modeling.byte_embedding import token_bytes
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM


def compare_text_losses(
    models: Mapping[Path, LightningLMForCausalLM], domains: Mapping[str, Tensor], batches: Path
) -> dict[str, dict[str, float]]:
    """
    {domain: {"before", "after"}} of the two models, by the folders that hold their tokenizers.

    Args:
        domains: token ids [n, S] of the text: those of the tokenizer in `tokenizer/` beside the file `batches` (where
            prepared data has it), or else of the first model's.
    """
    beside = batches.parent / "tokenizer" / "tokenizer.json"
    tokens = token_bytes(beside if beside.is_file() else next(iter(models)) / "tokenizer.json")
    result: dict[str, dict[str, float]] = {}
    for domain, ids in domains.items():
        if int(ids.max()) >= len(tokens):
            raise GrowthError(
                f"{batches}: domain {domain} has token id {int(ids.max())}, its tokenizer {len(tokens)} ids"
            )
        raw = (b"".join(tokens[i] for i in row) for row in ids.tolist())
        texts = [text.decode("utf-8", errors="ignore") for text in raw]  # a row may begin inside a character
        losses = [loss_per_byte(model, folder / "tokenizer.json", texts) for folder, model in models.items()]
        result[domain] = dict(zip(("before", "after"), losses, strict=True))
    return result


@torch.no_grad()
def loss_per_byte(model: LightningLMForCausalLM, tokenizer_json: Path, texts: list[str]) -> float:
    """Next-token loss over all texts, in nats, over the bytes of the predicted tokens (all but each text's first)."""
    tokenizer, tokens = Tokenizer.from_file(str(tokenizer_json)), token_bytes(tokenizer_json)
    loss, size = 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > 1:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            loss += F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
            size += sum(len(tokens[i]) for i in ids[1:])
    return loss / size
