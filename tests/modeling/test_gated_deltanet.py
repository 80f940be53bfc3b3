"""The gated DeltaNet mixer: the specification token by token, padding, documents, decoding, gradients, modes."""

import math

import pytest
import torch

from lightninglm.modeling.gated_deltanet import GatedDeltaNet
from tests.modeling.mixers import (
    H,
    assert_equals_definition,
    context,
    frequencies,
    hidden,
    in_pieces,
    mixer_config,
    positions,
    randomized,
    rotated,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def make(**changes):
    config = mixer_config(**changes)
    return config, randomized(GatedDeltaNet(config, 0))


def forward(mixer, config, x, keep=None, documents=None):
    return mixer(x, context(config, *x.shape[:2], keep, documents))[0]


def by_definition(p, config, x):
    """docs/model.md, "Gated DeltaNet", in fp64 for one row of real tokens [T, H]."""
    heads, dim, length = 4, 8, len(x)
    streams = []
    for name in "qkv":
        projected = x @ p[f"{name}_proj.weight"].T
        past = torch.cat([projected.new_zeros(3, H), projected])
        y = p[f"{name}_conv1d.bias"] + sum(p[f"{name}_conv1d.weight"][:, 0, i] * past[i : i + length] for i in range(4))
        streams.append((y * y.sigmoid()).view(length, heads, dim))
    q, k, v = streams
    q, k = (rotated(y / y.norm(dim=-1, keepdim=True), frequencies(config, dim)) for y in (q, k))
    beta = (x @ p["b_proj.weight"].T + p["b_proj.bias"]).sigmoid()
    u = x @ p["gk_proj.weight"].T + p["gk_proj.bias"]
    log_decay = (-p["A_log"].exp() * torch.nn.functional.softplus(u + p["dt_bias"])).clamp(min=math.log(1e-6))
    outputs = []
    state = torch.zeros(heads, dim, dim).double()
    for t in range(length):
        state = log_decay[t].exp()[:, None, None] * state
        u_t = beta[t, :, None] * (v[t] - torch.einsum("jde,jd->je", state, k[t]))
        state = state + torch.einsum("jd,je->jde", k[t], u_t)
        read = torch.einsum("jde,jd->je", state, q[t])
        outputs.append(read + p["D"][:, None] * (q[t] * k[t]).sum(-1, keepdim=True) * v[t])
    o = torch.stack(outputs)
    o = o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * p["o_norm.weight"]
    return (o.flatten(-2) * (x @ p["g_proj.weight"].T).sigmoid()) @ p["o_proj.weight"].T, None


@pytest.mark.parametrize("mode", ["default", "published"])
@pytest.mark.parametrize("backend", ["torch", "naive", "auto"])
def test_values_and_gradients_equal_the_specification(backend, mode):
    config, mixer = make(delta_rule_backend=backend, mode=mode)
    assert_equals_definition(mixer, config, hidden(1, 70), by_definition)


@pytest.mark.parametrize("mode", ["default", "published"])
def test_every_parameter_and_the_input_get_a_gradient(mode):
    config, mixer = make(mode=mode)
    x = hidden(2, 40).requires_grad_()
    forward(mixer, config, x).square().sum().backward()
    without = [name for name, p in mixer.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == [] and x.grad.any()


def test_padding_changes_nothing():
    config, mixer = make()
    x, lengths = hidden(3, 50), [50, 33, 1]
    for side in ("left", "right"):
        keep = torch.zeros(3, 50, dtype=torch.bool)
        for row, length in enumerate(lengths):
            keep[row, slice(50 - length, None) if side == "left" else slice(length)] = True
        y = forward(mixer, config, x, keep)
        assert not y[~keep].any()
        for row in range(3):
            alone = forward(mixer, config, x[row : row + 1, keep[row]])
            torch.testing.assert_close(y[row, keep[row]], alone[0], **CLOSE)


def test_published_mode_lets_padding_into_the_convolution():
    """What `conv_mask_inputs = False` means: the first real tokens after left padding see the padding's projections."""
    x, keep = hidden(1, 30), torch.arange(30).unsqueeze(0) >= 10
    config, mixer = make(mode="published", rope_source="config")
    padded, alone = forward(mixer, config, x, keep)[:, 10:], forward(mixer, config, x[:, 10:])
    assert (padded[:, :3] - alone[:, :3]).abs().max() > 1e-2


def test_documents_equal_separate_runs_and_padding_may_lie_between():
    config, mixer = make(document_boundaries=True)
    x = hidden(2, 60)
    documents = torch.tensor([[0] * 20 + [1] * 2 + [2] * 38, [7] * 35 + [8] * 25])
    keep = torch.ones(2, 60, dtype=torch.bool)
    keep[1, :5] = keep[1, 30:35] = keep[1, 58:] = False
    documents[1, 31:35] = 5  # an id at padding means nothing
    y = forward(mixer, config, x, keep, documents)
    for row in range(2):
        for document in documents[row, keep[row]].unique():
            tokens = keep[row] & (documents[row] == document)
            alone = forward(mixer, config, x[row : row + 1, tokens])
            torch.testing.assert_close(y[row, tokens], alone[0], **CLOSE)


@pytest.mark.parametrize("pieces", [[40] + [1] * 10, [1] * 50, [2, 1, 30, 1, 16]])
def test_decoding_equals_the_full_forward(pieces):
    config, mixer = make()
    x = hidden(2, 50)
    torch.testing.assert_close(in_pieces(mixer, config, x, pieces), forward(mixer, config, x), **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_decoding_after_a_padded_prompt(side):
    config, mixer = make()
    x, lengths, prompt, new = hidden(4, 30), [20, 13, 2, 1], 20, 10
    keep = torch.ones(4, 30, dtype=torch.bool)
    for row, length in enumerate(lengths):
        keep[row, slice(prompt - length) if side == "left" else slice(length, prompt)] = False
    y = in_pieces(mixer, config, x, [prompt] + [1] * new, keep)
    for row in range(4):
        alone = forward(mixer, config, x[row : row + 1, keep[row]])
        torch.testing.assert_close(y[row, keep[row]], alone[0], **CLOSE)


@pytest.mark.parametrize("pieces", [[25] + [1] * 15, [10, 2, 1, 27]])
def test_decoding_across_documents(pieces):
    config, mixer = make(document_boundaries=True)
    x = hidden(2, 40)
    documents = torch.tensor([[0] * 11 + [1] * 17 + [2] * 12, [0] * 26 + [4] * 14])
    y = in_pieces(mixer, config, x, pieces, documents=documents)
    torch.testing.assert_close(y, forward(mixer, config, x, documents=documents), **CLOSE)


def test_pass_without_gradients_equals_the_recompute_bitwise():
    config, mixer = make()
    x, keep = hidden(2, 70), torch.ones(2, 70, dtype=torch.bool)
    keep[1, 60:] = False
    with torch.no_grad():
        expected = forward(mixer, config, x, keep)
    assert torch.equal(forward(mixer, config, x.requires_grad_(), keep), expected)


def test_decay_is_bounded_and_reaches_the_whole_range():
    """log decay lies in [ln 1e-6, 0): the strongest decay still leaves 1e-6 of the state."""
    config, mixer = make()
    with torch.no_grad():
        mixer.A_log.fill_(20.0)
    assert forward(mixer, config, hidden(1, 40)).isfinite().all()


def test_bf16_follows_fp32():
    config, mixer = make()
    x = hidden(2, 40)
    reference = forward(mixer, config, x)
    y = forward(mixer.bfloat16(), config, x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y.float() - reference).norm() < 0.03 * reference.norm()


def test_positions_follow_the_mask():
    keep = torch.tensor([[False, False, True, True], [True, True, True, False]])
    assert positions(keep).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
