"""Tiny models, tokens and a tokenizer folder for the tests of the whole model."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightninglm.modeling import LightningLMConfig, LightningLMForCausalLM, preset

VOCABULARY = 512
TOKENS = [bytes([i]) for i in range(256)] + [bytes([97 + i % 26, 97 + i // 26, 65]) for i in range(256)]

ROUTERS = {
    "dense": {"name": "lightninglm-2b-tiny"},
    "flat": {"name": "lightninglm-5b-tiny"},
    "grouped": {"name": "lightninglm-120b-tiny", "num_hidden_layers": 4},
    "published softmax": {"name": "lightninglm-5b-tiny", "mode": "published"},
    "published sigmoid": {"name": "lightninglm-120b-tiny", "mode": "published", "num_hidden_layers": 4},
    "published dense": {"name": "lightninglm-2b-tiny", "mode": "published"},
}
INT8 = {"kind": "int8", "group_size": 32, "rank": 4, "seed": 0}


def tiny_config(kind: str = "flat", **overrides) -> LightningLMConfig:
    return preset(**(ROUTERS[kind] | overrides))


def tiny_model(kind: str = "flat", seed: int = 0, **overrides) -> LightningLMForCausalLM:
    torch.manual_seed(seed)
    model = LightningLMForCausalLM(tiny_config(kind, **overrides))
    model.set_token_bytes(TOKENS)
    return model


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def spread_weights(model: LightningLMForCausalLM, seed: int = 1) -> LightningLMForCausalLM:
    """
    Adds noise to every parameter: an initial model has zeros and symmetries that hide mistakes. With the variance that
    its scores then have, the number of kept keys varies; null slots are picked as often as experts.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 if parameter.dim() > 1 else 0.2
            parameter += scale * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("variance_ema"):
                buffer.fill_(1e-3)
            elif name.endswith("null_bias"):
                buffer.zero_()
    return model


def assert_same_but_for_rounding(found: torch.Tensor, expected: torch.Tensor, frac_bits: int) -> None:
    """
    Equal logits or hidden states, computed in fp32 in different ways: 1e-5 relative.

    Rounding the states of the stack turns fp32 rounding into differences of single units, so that with the default 16
    fraction bits one token may differ by more than the whole sequence does (see docs/model.md).
    """
    difference = found - expected
    assert difference.norm() <= 1e-5 * expected.norm()
    assert (difference.norm(dim=-1) <= 1e-4 * expected.norm(dim=-1)).all()
    if frac_bits >= 20:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` ids, two of them special, in `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1} | {character: 2 + i for i, character in enumerate(alphabet)}
    merges = []
    for left in "etaoinsr":
        for right in alphabet[:40]:
            if len(vocabulary) < VOCABULARY and left + right not in vocabulary:
                merges.append((left, right))
                vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    wrapped.save_pretrained(folder)
    return wrapped
