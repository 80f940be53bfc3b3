"""The short convolution: conv1d by definition, gradients, tails that continue a sequence, document boundaries."""

import torch

from lightninglm.modeling.short_convolution import ShortConvolution


def make(channels=6, kernel_size=4):
    torch.manual_seed(0)
    return ShortConvolution(channels, kernel_size), torch.randn(2, 9, channels)


def test_equals_causal_depthwise_conv1d_and_silu():
    convolution, x = make()
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = torch.nn.functional.conv1d(padded, convolution.weight, convolution.bias, groups=6)
    torch.testing.assert_close(convolution(x), torch.nn.functional.silu(expected).transpose(1, 2))


def test_gradients_with_tail_and_boundaries():
    convolution, x = make(channels=3)
    convolution.double()
    tail, reach = torch.randn(2, 3, 3).double().requires_grad_(), torch.rand(2, 9, 4) > 0.3
    weight, bias = convolution.weight.detach().requires_grad_(), convolution.bias.detach().requires_grad_()

    def run(x, tail, weight, bias):
        return torch.func.functional_call(convolution, {"weight": weight, "bias": bias}, (x, tail, reach))

    inputs = (x[..., :3].double().requires_grad_(), tail, weight, bias)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradcheck(lambda x, w, b: run(x, None, w, b), (inputs[0], weight, bias))


def test_a_tail_continues_the_sequence():
    convolution, x = make()
    later = convolution(x[:, 5:], tail=x[:, 2:5])
    torch.testing.assert_close(later, convolution(x)[:, 5:])


def test_taps_out_of_reach_read_zero():
    convolution, x = make()
    documents = torch.tensor([[0] * 4 + [1] * 5] * 2)
    padded = torch.cat([documents[:, :1].expand(-1, 3), documents], dim=1)
    reach = padded.unfold(1, 4, 1) == documents.unsqueeze(-1)
    y = convolution(x, reach=reach)
    torch.testing.assert_close(y, torch.cat([convolution(x[:, :4]), convolution(x[:, 4:])], dim=1))


def test_bf16_inputs_are_summed_in_fp32():
    convolution, x = make()
    x = x.bfloat16()
    y = convolution(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, convolution(x.float()))
