"""The loss of models with different tokenizers on the same text, in nats per byte."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from growth.errors import GrowthError
from growth.layerwise import LayerwiseModel
from lightninglm.modeling.byte_embedding import token_bytes


def compare_text_losses(
    before: LayerwiseModel, after: LayerwiseModel, domains: Mapping[str, Tensor], batches: Path
) -> dict[str, dict[str, float]]:
    """
    {domain: {"before", "after"}} of the two models.

    Args:
        domains: token ids [n, S] of the text: those of the tokenizer in `tokenizer/` beside the file `batches` (where
            prepared data has it), or else of the first model's.
    """
    beside = batches.parent / "tokenizer" / "tokenizer.json"
    tokens = token_bytes(beside if beside.is_file() else before.folder / "tokenizer.json")
    texts = {}
    for domain, ids in domains.items():
        if int(ids.max()) >= len(tokens):
            raise GrowthError(
                f"{batches}: domain {domain} has token id {int(ids.max())}, its tokenizer {len(tokens)} ids"
            )
        raw = (b"".join(tokens[i] for i in row) for row in ids.tolist())
        texts[domain] = [text.decode("utf-8", errors="ignore") for text in raw]  # a row may begin inside a character
    old, new = losses_per_byte(before, texts), losses_per_byte(after, texts)
    return {domain: {"before": old[domain], "after": new[domain]} for domain in domains}


def losses_per_byte(model: LayerwiseModel, texts: Mapping[str, list[str]]) -> dict[str, float]:
    """Per domain, next-token loss in nats over the bytes of the predicted tokens (all but each text's first)."""
    file = model.folder / "tokenizer.json"
    tokenizer, tokens = Tokenizer.from_file(str(file)), token_bytes(file)
    encoded = [
        (domain, tokenizer.encode(text, add_special_tokens=False).ids) for domain in texts for text in texts[domain]
    ]
    batch = torch.full((len(encoded), max(2, *(len(ids) for _, ids in encoded))), -1)
    for row, (_, ids) in zip(batch, encoded, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    hidden, _ = model.hidden_states(batch.clamp(min=0), keep=batch >= 0)
    sums = {domain: [0.0, 0] for domain in texts}
    with model.head() as logits:
        for state, (domain, ids) in zip(hidden, encoded, strict=True):
            if len(ids) > 1:
                loss = F.cross_entropy(logits(state[: len(ids) - 1]), torch.tensor(ids[1:]), reduction="sum")
                sums[domain][0] += loss.item()
                sums[domain][1] += sum(len(tokens[i]) for i in ids[1:])
    return {domain: loss / size for domain, (loss, size) in sums.items()}
