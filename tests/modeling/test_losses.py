"""The chunked linear cross-entropy equals the naive one and never holds all logits."""

import pytest
import torch

from lightninglm.modeling.losses import linear_cross_entropy, naive_linear_cross_entropy, softcap_logits


def inputs(tokens, vocabulary, hidden=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    w = torch.randn(vocabulary, hidden, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[::4] = -100
    return h, w, targets


def value_and_gradients(loss, h, w):
    return (loss.detach(), *torch.autograd.grad(loss * 0.37, (h, w)))


@pytest.mark.parametrize("vocabulary", [7, 131, 512])
@pytest.mark.parametrize("softcap", [0.0, 15.0, 2.0])
@pytest.mark.parametrize("chunk", [None, 1, 13])
def test_chunked_equals_naive(vocabulary, softcap, chunk):
    h, w, targets = inputs(50, vocabulary)
    expected = value_and_gradients(naive_linear_cross_entropy(h, w, targets, softcap), h, w)
    found = value_and_gradients(linear_cross_entropy(h, w, targets, softcap, chunk_tokens=chunk), h, w)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_gradients_equal_finite_differences():
    h, w, targets = inputs(5, 6, hidden=3)
    h, w = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()

    def loss(h, w):  # the function computes in fp32: a wide step, a loose tolerance
        return linear_cross_entropy(h, w, targets, 3.0)

    assert torch.autograd.gradcheck(loss, (h, w), eps=1e-2, atol=2e-3, rtol=1e-2)


def test_no_target_gives_zero_and_zero_gradients():
    h, w, targets = inputs(8, 16)
    for found in value_and_gradients(linear_cross_entropy(h, w, torch.full_like(targets, -100), 15.0), h, w):
        assert not found.any()


def test_only_the_gradients_asked_for_are_computed():
    h, w, targets = inputs(8, 16)
    frozen = w.detach()
    loss = linear_cross_entropy(h, frozen, targets, 15.0)
    assert loss.grad_fn.saved_tensors[1] is None
    _, expected, _ = value_and_gradients(linear_cross_entropy(h, w, targets, 15.0), h, w)
    assert torch.allclose(torch.autograd.grad(loss * 0.37, h)[0], expected)


def test_bf16_stays_close_and_keeps_dtypes():
    h, w, targets = inputs(64, 100)
    expected = value_and_gradients(naive_linear_cross_entropy(h, w, targets, 15.0), h, w)
    h16, w16 = (t.detach().bfloat16().requires_grad_() for t in (h, w))
    found = value_and_gradients(linear_cross_entropy(h16, w16, targets, 15.0), h16, w16)
    assert found[1].dtype == found[2].dtype == torch.bfloat16
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


def test_nothing_of_all_tokens_by_vocabulary_is_allocated():
    tokens, vocabulary, chunk = 256, 300, 32
    h, w, targets = inputs(tokens, vocabulary)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        linear_cross_entropy(h, w, targets, 15.0, chunk_tokens=chunk).backward()
    assert largest <= max(chunk * vocabulary, tokens * 24, vocabulary * 24) < tokens * vocabulary


def test_softcap_bounds_the_logits_and_zero_leaves_them():
    h, w, _ = inputs(8, 16)
    assert softcap_logits(h * 100, w, 15.0).abs().max() <= 15
    assert torch.equal(softcap_logits(h, w, 0.0), h @ w.t())


def test_liger_without_the_package_says_what_to_install():
    with pytest.raises(ImportError, match=r"requirements-gpu\.txt"):
        linear_cross_entropy(*inputs(4, 8), 15.0, backend="liger")
