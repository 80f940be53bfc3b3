"""What the tests of the two mixers share: a tiny configuration, contexts, and running a sequence piece by piece."""

import torch

from lightninglm.modeling.cache import LightningLMCache
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.rotary import RotaryEmbedding

H = 32


def mixer_config(**changes) -> LightningLMConfig:
    """Four layers of width 32; sparse attention keeps 4 to 12 of the keys, 2 of them sinks."""
    values = {
        "vocab_size": 64, "hidden_size": H, "num_hidden_layers": 4, "intermediate_size": 24, "linear_num_heads": 4,
        "linear_head_dim": 8, "num_attention_heads": 2, "head_dim": 16, "sparse_key_budget": 6, "sparse_min_keys": 4,
        "sparse_max_keys": 12, "sparse_sink_keys": 2, "indexer_num_heads": 3, "indexer_head_dim": 8,
    }  # fmt: skip
    return LightningLMConfig(**values | changes)


def randomized(module, seed=0, scale=0.4):
    """The module with every parameter drawn anew, so that nothing is zero or one by initialization."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


def frequencies(config, head_dim):
    """Rotary frequencies [head_dim / 2] in fp64, rounded to bf16 where the config takes them from a checkpoint."""
    exact = config.rope_theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    return exact.bfloat16().double() if config.rope_source == "checkpoint" else exact


def rotated(y, frequency):
    """y [T, J, D] fp64, its pairs (2j, 2j + 1) turned by position * frequency_j."""
    angles = torch.arange(len(y)).double()[:, None] * frequency
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = y[..., 0::2], y[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def assert_equals_definition(mixer, config, x, definition):
    """
    Outputs, auxiliary loss and all gradients of a mixer for x [1, T, H], to 1e-5 relative, against a definition.

    Args:
        definition: (parameters and buffers by name, config, x [T, H]), all fp64 -> (outputs [T, H], loss or None).
    """
    grad = hidden(1, x.shape[1], seed=3)
    x = x.detach().requires_grad_()
    y, aux = mixer(x, context(config, 1, x.shape[1]))
    exact = {name: tensor.detach().double() for name, tensor in mixer.state_dict().items()}
    inputs = {"x": x[0].detach().double()} | {name: exact[name] for name, _ in mixer.named_parameters()}
    for tensor in inputs.values():
        tensor.requires_grad_()
    expected, loss = definition(exact, config, inputs["x"])
    assert (y[0] - expected).norm() <= 1e-5 * expected.norm()
    assert (aux is None) == (loss is None)
    total, exact_total = (y * grad).sum(), (expected * grad[0]).sum()
    if aux is not None:
        assert abs(aux - loss) <= 1e-5 * loss
        total, exact_total = total + 1000 * aux, exact_total + 1000 * loss
    total.backward()
    exact_total.backward()
    for name, found in {"x": x.grad[0], **{name: p.grad for name, p in mixer.named_parameters()}}.items():
        reference = inputs[name].grad
        assert (found is None) == (reference is None), name
        assert found is None or (found - reference).norm() <= 1e-5 * reference.norm(), name


def hidden(rows, length, seed=0):
    """[rows, length, H] inputs of a mixer."""
    return torch.randn(rows, length, H, generator=torch.Generator().manual_seed(seed))


def positions(keep):
    """Position of each token: real tokens before it."""
    return (keep.cumsum(1) - 1).clamp(min=0)


def context(config, rows, length, keep=None, documents=None, cache=None, **fields) -> LayerContext:
    """The context of `length` new tokens; positions follow the mask and restart in each document."""
    mask = torch.ones(rows, length, dtype=torch.bool) if keep is None else keep
    past = 0
    if cache is not None:
        past = cache.get_seq_length()
        cache.extend(mask, documents)
        mask = cache.keep_mask
    place = positions(mask)
    all_documents = documents if cache is None else cache.document_ids
    if all_documents is not None:
        same = (all_documents.unsqueeze(1) == all_documents.unsqueeze(2)) & mask.unsqueeze(1)
        place = (same.tril().sum(-1) - 1).clamp(min=0)
    place = place[:, past:]
    return LayerContext(
        place, keep_mask=keep, document_ids=documents, rotary=RotaryEmbedding(config)(place), cache=cache, **fields
    )


@torch.no_grad()
def in_pieces(mixer, config, x, pieces, keep=None, documents=None):
    """The outputs of consecutive forward passes over `pieces` tokens each, through one cache, concatenated."""
    cache, outputs, start = LightningLMCache(config), [], 0
    for length in pieces:
        part = slice(start, start + length)
        ctx = context(
            config, len(x), length, None if keep is None else keep[:, part],
            None if documents is None else documents[:, part], cache,
        )  # fmt: skip
        outputs.append(mixer(x[:, part], ctx)[0])
        start += length
    return torch.cat(outputs, dim=1)
