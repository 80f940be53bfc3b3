"""Decoder layers of every kind: repeatable, exactly reversible, each parameter trained, statistics counted once."""

import pytest
import torch

from lightninglm.modeling.configuration_lightninglm import INDEXED_ATTENTION, LINEAR_ATTENTION
from lightninglm.modeling.decoder_layer import DecoderLayer, build_mixer, build_mlp
from lightninglm.modeling.feed_forward import DenseFeedForward, SwiGLU
from lightninglm.modeling.gated_deltanet import GatedDeltaNet
from lightninglm.modeling.moe import MoEBlock
from lightninglm.modeling.reversible import ReversibilityReport, reversible_stack
from lightninglm.modeling.sparse_attention import GatedSparseAttention
from tests.modeling.mixers import H, context, mixer_config

B, T = 2, 24
LAYERS = 4
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def make_layers(config):
    torch.manual_seed(0)
    return [DecoderLayer(config, i) for i in range(config.num_hidden_layers)]


def make_context(config, padding=False, **changes):
    keep = None
    if padding:
        keep = torch.ones(B, T, dtype=torch.bool)
        keep[1, -5:] = False
    return context(config, B, T, keep, **changes)


def make_streams(config):
    torch.manual_seed(1)
    return torch.randn(B, T, config.num_streams, H)


def run_stack(layers, config, ctx, **options):
    for layer in layers:
        layer.zero_grad()
    streams = make_streams(config).requires_grad_()
    out, aux = reversible_stack(layers, streams, ctx, config.step_sizes, config.blends, **options)
    ((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + aux).backward()
    grads = {f"{i}.{name}": p.grad for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    return out.detach(), aux.detach(), grads | {"streams": streams.grad}


def test_layer_types_and_experts_choose_the_sublayers():
    dense, moe = mixer_config(), mixer_config(**EXPERTS)
    assert dense.layer_types == [LINEAR_ATTENTION] * 3 + [INDEXED_ATTENTION]
    assert [type(build_mixer(dense, i)) for i in range(LAYERS)] == [GatedDeltaNet] * 3 + [GatedSparseAttention]
    assert type(build_mixer(dense, LAYERS, INDEXED_ATTENTION)) is GatedSparseAttention
    assert type(build_mlp(dense, 0)) is DenseFeedForward
    assert type(build_mlp(moe, 0)) is MoEBlock


def test_feed_forward_is_a_gated_product():
    ffn, x = SwiGLU(8, 12), torch.randn(3, 8)
    gate, up, down = (m.weight for m in (ffn.gate_proj, ffn.up_proj, ffn.down_proj))
    expected = ((x @ gate.T) * torch.sigmoid(x @ gate.T) * (x @ up.T)) @ down.T
    assert torch.allclose(ffn(x), expected, atol=1e-6)


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "moe"])
@pytest.mark.parametrize("padding", [False, True])
def test_every_layer_kind_gives_the_same_bits_without_and_with_grad(experts, padding):
    config = mixer_config(**experts)
    ctx, streams = make_context(config, padding), make_streams(config)
    for layer in make_layers(config):
        with torch.no_grad():
            without, _ = layer(streams, ctx)
        within, aux = layer(streams.clone().requires_grad_(), ctx)
        assert torch.equal(without, within)
        assert aux.shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blend", [1.0, 0.5])
@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "moe"])
def test_the_stack_of_real_layers_is_rebuilt_exactly_with_the_gradients_of_autograd(experts, blend, dtype):
    config = mixer_config(blends=[blend] * LAYERS, **experts)
    layers = [layer.to(dtype) for layer in make_layers(config)]
    ctx, report = make_context(config, padding=True), ReversibilityReport(check_every_layer=True)
    out, aux, grads = run_stack(layers, config, ctx, report=report)
    assert report.passes_verified == 1
    expected = run_stack(layers, config, ctx, backend="stored")
    assert torch.equal(out, expected[0])
    assert torch.equal(aux, expected[1])
    for name, grad in expected[2].items():
        assert (grads[name] is None) == (grad is None), name
        if grad is not None:
            assert torch.equal(grads[name], grad), name


def test_gradients_under_autocast_equal_those_of_autograd():
    config = mixer_config(**EXPERTS)
    layers, ctx, grads = make_layers(config), make_context(config), {}
    for backend in ("reversible", "stored"):
        streams = make_streams(config).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, aux = reversible_stack(layers, streams, ctx, config.step_sizes, config.blends, backend=backend)
        inputs = [streams, *(p for layer in layers for p in layer.parameters())]
        for p in inputs:
            p.grad = None
        (out.square().sum() + aux).backward()
        grads[backend] = [p.grad for p in inputs]
    for ours, expected in zip(*grads.values(), strict=True):
        assert torch.equal(ours, expected)


def test_every_parameter_is_trained():
    config = mixer_config(**EXPERTS)
    _, _, grads = run_stack(make_layers(config), config, make_context(config))
    assert [name for name, grad in grads.items() if grad is None or not grad.any()] == []


@pytest.mark.parametrize("backend", ["reversible", "stored", "checkpointed"])
def test_statistics_count_each_token_once_per_training_forward(backend):
    config = mixer_config(**EXPERTS)
    layers = make_layers(config)
    run_stack(layers, config, make_context(config, padding=True, record_statistics=True), backend=backend)
    picks = (B * T - 5) * config.num_experts_per_tok
    assert [int(layer.mlp.router.statistics()[0].sum()) for layer in layers] == [picks] * LAYERS
    assert layers[3].mixer.statistics()[0][1] == B * T - 5
    with torch.no_grad():
        reversible_stack(layers, make_streams(config), make_context(config), config.step_sizes, config.blends)
    assert [int(layer.mlp.router.statistics()[0].sum()) for layer in layers] == [picks] * LAYERS
