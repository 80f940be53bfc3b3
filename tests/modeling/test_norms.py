"""RMSNorm: the formula in fp32 with its gradients, and one rounding at the end."""

import torch

from lightninglm.modeling.norms import RMSNorm


def test_values_and_gradients_equal_the_formula():
    norm, x, grad = RMSNorm(24, eps=1e-3), torch.randn(3, 5, 24).requires_grad_(), torch.randn(3, 5, 24)
    norm.weight.data.normal_()
    y = norm(x)
    y.backward(grad)
    x_64, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    expected = x_64 * (x_64.square().mean(-1, keepdim=True) + 1e-3) ** -0.5 * weight
    expected.backward(grad.double())
    for found, reference in ((y, expected), (x.grad, x_64.grad), (norm.weight.grad, weight.grad)):
        assert (found - reference).norm() <= 1e-6 * reference.norm()


def test_bf16_inputs_and_weights_are_rounded_once():
    norm, x = RMSNorm(24).bfloat16(), torch.randn(3, 24).bfloat16() * 1e-3  # eps is as large as the mean square
    norm.weight.data.normal_()
    expected = RMSNorm(24)
    expected.weight.data.copy_(norm.weight.float())
    assert torch.equal(norm(x), expected(x.float()).bfloat16())
