"""Hyper-connections: the formulas of docs/model.md term by term, exact derivatives, repeatable bits."""

import pytest
import torch
from torch import nn

from lightninglm.modeling.hyper_connections import HyperConnection, ProjectStreams, Sinkhorn, sinkhorn_naive
from tests.modeling.mixers import H, mixer_config

B, T, N = 2, 5, 4


def make_connection(seed=0, **changes):
    torch.manual_seed(seed)
    return HyperConnection(mixer_config(**changes))


def make_scattered_connection():
    """A connection away from its initialization, so that no term vanishes."""
    connection = make_connection()
    for p in connection.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return connection


def make_streams(seed=1):
    return torch.randn(B, T, N, H, generator=torch.Generator().manual_seed(seed))


def rms_norm(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps) ** -0.5 * weight


def hyper_connection_naive(parameters, X, sublayer, iterations=20, eps=1e-6):
    """docs/model.md, "Hyper-connections", transcribed."""
    w = parameters
    z = rms_norm(X.flatten(-2), w["stream_norm.weight"], eps)
    pre = torch.sigmoid(w["alpha_pre"] * z @ w["phi_pre.weight"].T + w["b_pre"])
    post = 2 * torch.sigmoid(w["alpha_post"] * z @ w["phi_post.weight"].T + w["b_post"])
    res = (w["alpha_res"] * z @ w["phi_res.weight"].T).unflatten(-1, (N, N)) + w["b_res"]
    K = torch.exp(res - res.amax(-1, keepdim=True))
    v = torch.full_like(K[..., 0], 1 / N)
    for _ in range(iterations):
        u = 1 / ((K @ v[..., None])[..., 0] + 1e-6)
        v = 1 / ((K.mT @ u[..., None])[..., 0] + 1e-6)
    R = u[..., :, None] * K * v[..., None, :]
    y = sublayer(rms_norm((pre[..., None] * X).sum(-2), w["norm.weight"], eps))
    return R @ X + post[..., None] * y[..., None, :]


def test_values_and_gradients_equal_the_transcribed_formulas():
    connection, mix = make_scattered_connection(), torch.randn(H, H) / H**0.5
    streams = make_streams().requires_grad_()
    out, aux = connection(streams, lambda x: (torch.tanh(x @ mix), None))
    out.backward(make_streams(2))
    assert aux is None

    parameters = {k: p.detach().double().requires_grad_() for k, p in connection.named_parameters()}
    streams_64 = make_streams().double().requires_grad_()
    expected = hyper_connection_naive(parameters, streams_64, lambda x: torch.tanh(x @ mix.double()))
    expected.backward(make_streams(2).double())
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = {"streams": (streams.grad, streams_64.grad)}
    gradients |= {k: (p.grad, parameters[k].grad) for k, p in connection.named_parameters()}
    for name, (ours, reference) in gradients.items():
        assert reference.abs().max() > 0, name
        assert (ours - reference).norm() <= 1e-5 * reference.norm(), name


def test_sinkhorn_derivative_is_that_of_the_iterations():
    kernel = torch.rand(N, N, 6, dtype=torch.float64).add_(0.05).requires_grad_()
    assert torch.equal(Sinkhorn.apply(kernel, 20), sinkhorn_naive(kernel, 20))
    assert torch.autograd.gradcheck(lambda k: Sinkhorn.apply(k, 20), kernel)
    assert torch.autograd.gradcheck(lambda k: Sinkhorn.apply(k, 1), kernel)


def test_projection_derivative_agrees_with_finite_differences():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    phi = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ProjectStreams.apply, (x, phi))


def test_the_mix_keeps_the_mean_over_the_streams():
    connection, streams = make_scattered_connection(), 10 * make_streams()
    _, _, mix = connection.coefficients(streams.flatten(0, 1))
    assert torch.allclose(mix.sum(1), torch.ones(B * T, N), atol=2e-6)
    out, _ = connection(streams, lambda x: (torch.zeros_like(x), None))
    assert torch.allclose(out.mean(2), streams.mean(2), atol=1e-4)


@pytest.mark.parametrize(("b_res", "diagonal", "beside"), [(4.0, 0.948, 0.0174), (0.0, 0.25, 0.25)])
def test_mixing_matrix_at_initialization(b_res, diagonal, beside):
    connection = make_connection(b_res_init=b_res)
    nn.init.zeros_(connection.phi_res.weight)
    _, _, mix = connection.coefficients(make_streams().flatten(0, 1))
    expected = torch.full((N, N), beside).fill_diagonal_(diagonal)
    assert torch.allclose(mix, expected.expand_as(mix), atol=1e-3)


def test_forward_without_grad_and_recompute_with_grad_have_the_same_bits():
    connection, streams = make_scattered_connection(), make_streams()
    with torch.no_grad():
        without, _ = connection(streams, lambda x: (x, None))
    within, _ = connection(streams.clone().requires_grad_(), lambda x: (x, None))
    assert torch.equal(without, within)


def test_streams_stay_fp32_and_the_sublayer_gets_the_dtype_of_the_weights():
    connection = make_scattered_connection()
    seen = []

    def sublayer(x):
        seen.append(x.dtype)
        return x, None

    expected, _ = connection(make_streams(), sublayer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast, _ = connection(make_streams(), sublayer)
    assert torch.equal(under_autocast, expected)  # no ambient autocast decides the numerics
    out, _ = connection.to(torch.bfloat16)(make_streams(), sublayer)
    assert out.dtype == torch.float32
    assert seen == [torch.float32, torch.float32, torch.bfloat16]


def test_tokens_do_not_see_each_other_and_empty_streams_are_fine():
    connection, streams = make_scattered_connection(), make_streams()
    streams[0, 0] = 0  # what padding may hold
    out, _ = connection(streams, lambda x: (x, None))
    assert torch.isfinite(out).all()
    for b in range(B):
        alone, _ = connection(streams[b : b + 1, 2:3], lambda x: (x, None))
        assert torch.allclose(alone, out[b : b + 1, 2:3], atol=1e-6)
