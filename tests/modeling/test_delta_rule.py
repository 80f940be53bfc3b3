"""The gated delta rule: chunks equal the recurrence, in values and gradients, with states, documents and padding."""

import pytest
import torch

from lightninglm.modeling.delta_rule import (
    chunk_gated_delta_rule,
    fla_problem,
    gated_delta_rule,
    naive_gated_delta_rule,
    triton_problem,
)

B, T, J, D, E = 2, 45, 3, 8, 6
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def inputs(dtype=torch.float64, length=T, decay=1.0, seed=0):
    """(q, k, v, log_decay, beta): unit keys and queries, decays from none to exp(-2 decay) and some near zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(B, length, J, *shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(D), dim=-1) for _ in range(2))
    log_decay = -2 * decay * torch.rand(B, length, J, generator=generator, dtype=torch.float64)
    log_decay[torch.rand(B, length, J, generator=generator) < 0.1] = -13.8
    return [t.to(dtype).requires_grad_() for t in (q, k, draw(E), log_decay, draw().sigmoid())]


def initial_state(dtype):
    return torch.randn(B, J, D, E, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def values_and_gradients(rule, tensors, **options):
    """Outputs, last state, and the gradients of a random function of both with respect to all tensors."""
    outputs, state = rule(*tensors, **options)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in (outputs, state)]
    loss = (outputs * weights[0]).sum() + (state * weights[1]).sum()
    return [outputs, state, *torch.autograd.grad(loss, tensors)]


def assert_close(actual, expected, dtype):
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= TOLERANCE[dtype] * max(1, b.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk_length", [1, 4, 16, 45, 64])
@pytest.mark.parametrize("decay", [0.0, 0.05, 3.0])
def test_chunks_equal_the_recurrence(dtype, chunk_length, decay):
    tensors = [*inputs(dtype, decay=decay), initial_state(dtype).requires_grad_()]
    expected = values_and_gradients(naive_gated_delta_rule, tensors)
    actual = values_and_gradients(chunk_gated_delta_rule, tensors, chunk_length=chunk_length)
    assert_close(actual, expected, dtype)


def test_the_recurrence_is_the_formula():
    q, k, v, log_decay, beta = (t.detach() for t in inputs())
    state = torch.zeros(D, E, dtype=torch.float64)
    for t in range(T):
        state = log_decay[1, t, 2].exp() * state
        u = beta[1, t, 2] * (v[1, t, 2] - state.T @ k[1, t, 2])
        state = state + torch.outer(k[1, t, 2], u)
        torch.testing.assert_close(naive_gated_delta_rule(q, k, v, log_decay, beta)[0][1, t, 2], state.T @ q[1, t, 2])


def test_decay_after_a_long_strong_decay_keeps_its_digits():
    """Cumulative decays in fp32 would lose the small ones behind large ones of the same chunk."""
    tensors = inputs(torch.float32, length=64)
    with torch.no_grad():
        tensors[3][:, :30] = -13.8
        tensors[3][:, 30:] = -1e-4
    exact = naive_gated_delta_rule(*(t.double() for t in tensors))[0]
    error = (chunk_gated_delta_rule(*tensors, chunk_length=64)[0] - exact).abs().max()
    assert error < 2e-6


def test_repeated_identical_keys_stay_stable():
    """The triangular system is worst conditioned here: the same key 64 times, written with full strength, no decay."""
    tensors = inputs(torch.float32, length=64)
    with torch.no_grad():
        tensors[1][:] = tensors[1][:, :1]
        tensors[3].zero_()
        tensors[4].fill_(1.0)
    exact = naive_gated_delta_rule(*(t.double() for t in tensors))[0]
    assert (chunk_gated_delta_rule(*tensors, chunk_length=64)[0] - exact).abs().max() < 1e-4


def test_cutting_a_sequence_changes_nothing():
    tensors = inputs()
    whole, last = chunk_gated_delta_rule(*tensors, chunk_length=16)
    first, state = chunk_gated_delta_rule(*(t[:, :19] for t in tensors), chunk_length=16)
    second, state = chunk_gated_delta_rule(*(t[:, 19:] for t in tensors), state, chunk_length=16)
    assert_close([torch.cat([first, second], 1), state], [whole, last], torch.float64)


@pytest.mark.parametrize("rule", [naive_gated_delta_rule, chunk_gated_delta_rule])
def test_documents_equal_separate_runs(rule):
    tensors = inputs()
    documents = torch.tensor([[3] * 20 + [4] * 1 + [9] * 24, [3] * 7 + [5] * 38])
    before = torch.tensor([3, 2])  # row 0 continues the document of the initial state, row 1 starts a new one
    state = initial_state(torch.float64)
    outputs, last = rule(*tensors, state, documents, before)
    for row, lengths in ((0, [20, 1, 24]), (1, [7, 38])):
        start = 0
        for n, length in enumerate(lengths):
            part = [t[row : row + 1, start : start + length] for t in tensors]
            expected, final = naive_gated_delta_rule(*part, state[row : row + 1] if (row, n) == (0, 0) else None)
            torch.testing.assert_close(outputs[row : row + 1, start : start + length], expected)
            start += length
        torch.testing.assert_close(last[row : row + 1], final)


@pytest.mark.parametrize("chunk_length", [4, 16])
def test_gradients_do_not_cross_documents(chunk_length):
    tensors = inputs()
    documents = torch.tensor([[0] * 10 + [1] * 35] * 2)
    options = {"document_ids": documents}
    expected = values_and_gradients(naive_gated_delta_rule, tensors, **options)
    assert_close(
        values_and_gradients(chunk_gated_delta_rule, tensors, chunk_length=chunk_length, **options),
        expected,
        torch.float64,
    )
    outputs, _ = chunk_gated_delta_rule(*tensors, document_ids=documents, chunk_length=chunk_length)
    for gradient in torch.autograd.grad(outputs[:, 10:].sum(), tensors):
        assert gradient[:, :10].abs().max() < 1e-14


def test_a_token_without_decay_and_strength_leaves_no_trace():
    tensors = [t.detach() for t in inputs()]
    tensors[3][:, 17:22] = 0
    tensors[4][:, 17:22] = 0
    outputs, state = chunk_gated_delta_rule(*tensors)
    kept = [torch.cat([t[:, :17], t[:, 22:]], dim=1) for t in tensors]
    expected, final = chunk_gated_delta_rule(*kept)
    assert_close([torch.cat([outputs[:, :17], outputs[:, 22:]], 1), state], [expected, final], torch.float64)


def test_passes_with_and_without_gradients_agree_bitwise():
    tensors = inputs(torch.float32)
    with torch.no_grad():
        expected = chunk_gated_delta_rule(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(chunk_gated_delta_rule(*tensors), expected, strict=True))


def test_backends_agree_and_an_impossible_one_is_refused():
    tensors = inputs(torch.float32)
    expected = gated_delta_rule(*tensors, backend="naive", dtype=torch.float32)[0]
    for backend in ("torch", "auto"):
        actual = gated_delta_rule(*tensors, backend=backend, dtype=torch.float32)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="need a CUDA device"):
        gated_delta_rule(*tensors, backend="fla", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="document boundaries"):
        gated_delta_rule(*tensors, document_ids=torch.zeros(B, T).long(), backend="fla", dtype=torch.bfloat16)


def test_triton_with_the_wrong_backward_pass_is_named():
    hopper, blackwell, ada = (9, 0), (10, 0), (8, 9)
    for version in ("3.4.0", "3.5.1", "3.6.0+git1234", "3.7.0"):
        assert "flash-linear-attention#640" in triton_problem(version, hopper)
        assert triton_problem(version, blackwell) is None and triton_problem(version, ada) is None
    for version in ("3.3.1", "3.7.1", "3.10.0"):
        assert triton_problem(version, hopper) is None


def test_what_the_fla_kernels_cannot_do_is_said():
    assert "need a CUDA device" in fla_problem(torch.device("cpu"), torch.bfloat16)
    assert "torch.float32" in fla_problem(torch.device("cuda"), torch.float32)


@pytest.mark.requires_gpu
def test_flash_linear_attention_equals_the_chunks():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    if problem := fla_problem(device, torch.bfloat16):
        pytest.skip(problem)
    tensors = [t.detach().to(device).repeat_interleave(8, dim=-1)[..., :64] if t.dim() == 4 else t.detach().to(device)
               for t in inputs(torch.float32, length=256)]  # fmt: skip
    tensors = [t.bfloat16().float().requires_grad_() for t in tensors]
    expected = values_and_gradients(chunk_gated_delta_rule, tensors)
    actual = values_and_gradients(
        lambda *t: gated_delta_rule(*t, backend="fla", dtype=torch.bfloat16), tensors
    )  # fmt: skip
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()
