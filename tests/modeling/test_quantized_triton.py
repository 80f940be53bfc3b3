"""The fused kernel in Triton's interpreter against the blocks of torch; a GPU runs it nowhere in these tests."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from lightninglm.modeling.quantized_experts import QuantizedExperts, _FrozenGroupedLinear
from lightninglm.modeling.quantizers import Int4Quantizer, Int8Quantizer, snr_db
from tests.modeling.moe_configs import moe_config, quantized_config

QUANTIZERS = {"int8": Int8Quantizer, "int4": Int4Quantizer}
COUNTS = {
    "uneven, some without rows": [3, 0, 70, 1, 0],
    "one expert": [0, 0, 0, 65, 0],
    "whole tiles": [64, 64, 0, 0, 0],
    "no rows": [0, 0, 0, 0, 0],
}
SHAPES = {"multiples of tiles": (64, 128, 32), "not multiples": (40, 72, 24), "smaller than a tile": (8, 16, 8)}

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """The kernel's module is imported in the first test that needs it, so that its kernel is interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def forward_and_gradient(backend, x, weight, counts, quantizer):
    x = x.clone().requires_grad_()
    codes, scales = quantizer.quantize(weight)
    y = _FrozenGroupedLinear.apply(x, codes, scales, torch.tensor(counts), quantizer, backend)
    generator = torch.Generator().manual_seed(2)
    return y.detach(), torch.autograd.grad(y, x, torch.randn(y.shape, generator=generator).to(x.dtype))[0]


@needs_triton
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_kernel_equals_dequantized_blocks(kind, shape, counts):
    outputs, inputs, group = shape
    inputs = inputs // group * group
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(len(counts), outputs, inputs, generator=generator)
    x = torch.randn(sum(counts), inputs, generator=generator)
    results = [forward_and_gradient(way, x, weight, counts, QUANTIZERS[kind](group)) for way in ("triton", "torch")]
    for ours, reference in zip(*results, strict=True):
        assert ours.shape == reference.shape
        assert (ours - reference).norm() <= 1e-5 * reference.norm()


@needs_triton
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_fp16_rows(kind):
    """Not bf16: the interpreter multiplies its bit patterns as integers."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3, 40, 48, generator=generator)
    quantizer, counts = QUANTIZERS[kind](16), torch.tensor([5, 0, 9])
    codes, scales = quantizer.quantize(weight)
    x = torch.randn(14, 48, generator=generator).half()
    ours, reference = (_FrozenGroupedLinear.apply(x, codes, scales, counts, quantizer, w) for w in ("triton", "torch"))
    assert ours.dtype == torch.float16
    assert snr_db(reference, ours) > 60  # fp16 keeps 11 bits


@needs_triton
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_module_computes_the_same_with_it(kind):
    """Rotation, adapters and all their gradients included."""
    results = []
    for backend in ("torch", "triton"):
        config = quantized_config(kind, experts_backend=backend)
        experts = QuantizedExperts(config, layer_idx=0)
        generator = torch.Generator().manual_seed(0)
        for name in ("gate_proj", "up_proj", "down_proj"):
            stack = getattr(experts, name)
            stack.codes.copy_(torch.randint(0, 100, stack.codes.shape, generator=generator))
            stack.scales.fill_(1e-2)
            for parameter in stack.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        x = torch.randn(32, config.hidden_size, generator=generator, requires_grad=True)
        y = experts(x, torch.tensor([3, 0, 7, 1, 0, 12, 5, 4]))
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *experts.parameters()])])
    for reference, ours in zip(*results, strict=True):
        assert reference.norm() > 0
        assert (ours - reference).norm() <= 1e-5 * reference.norm()


def test_without_cuda_and_interpreter_it_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    experts = QuantizedExperts(quantized_config("int4", experts_backend="triton"), layer_idx=0)
    counts = torch.tensor([3, 0, 7, 1, 0, 12, 5, 4])
    with pytest.raises(RuntimeError, match=r"config.experts_backend = 'triton': .*use 'torch'"):
        experts(torch.randn(32, experts.config.hidden_size), counts)


@pytest.mark.parametrize("kind", [None, "codebook"])
def test_what_has_no_kernel_is_refused_by_the_configuration(kind):
    with pytest.raises(ValueError, match="experts_backend = 'triton': needs expert_quantization of kind 'int8' or"):
        config = quantized_config if kind else lambda kind, **changes: moe_config(**changes)
        config(kind, experts_backend="triton")


def test_auto_on_the_cpu_does_not_import_triton():
    code = (
        "import sys, torch; from tests.modeling.moe_configs import quantized_config;"
        "from lightninglm.modeling.quantized_experts import QuantizedExperts;"
        "experts = QuantizedExperts(quantized_config('int4'), 0); counts = torch.tensor([4] * 8);"
        "experts(torch.randn(32, experts.config.hidden_size), counts);"
        "assert not any('fused_dequantize' in name for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
