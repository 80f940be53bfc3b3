"""Quantizers: the promised signal-to-noise ratios and bytes, exact scales, rotations equal to the dense matrix."""

import math

import pytest
import torch

from lightninglm.modeling.quantizers import (
    LLOYD_MAX_LEVELS,
    MINIMUM_BLOCK_DB,
    CodebookQuantizer,
    Int4Quantizer,
    Int8Quantizer,
    hadamard_block,
    hadamard_matrix,
    published_codebook,
    random_signs,
    rotate,
    rotation_matrix,
    signs_of_rotation,
    snr_db,
    unrotate,
    unwrap_indices,
    worst_block,
)

QUANTIZERS = {
    "int8": Int8Quantizer(128),
    "int4": Int4Quantizer(128),
    "codebook": CodebookQuantizer(published_codebook(1024)),
}
PROMISES = {"int8": (43.0, 1.04), "int4": (20.0, 0.54)}


def gaussian(rows=256, columns=1024, std=0.02, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * std


def heavy_tailed(rows=256, columns=1024):
    """Weights with outliers and columns of very different sizes, as trained ones have."""
    return gaussian(rows, columns) * (1 + 4 * gaussian(rows, columns, 1.0, 1).relu() ** 2) * torch.rand(columns) ** 2


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", PROMISES)
@pytest.mark.parametrize("make_weight", [gaussian, heavy_tailed])
def test_signal_to_noise_and_bytes_are_as_promised(make_weight, kind, scale_dtype):
    snr, bytes_per_weight = PROMISES[kind]
    weight = rotate(make_weight(), random_signs(0, 0, "hidden", 1024), 1024)
    stored = QUANTIZERS[kind].quantize(weight, scale_dtype)
    assert stored.scales.dtype == scale_dtype
    assert snr_db(weight, QUANTIZERS[kind].dequantize(*stored)) >= snr
    assert sum(tensor.nbytes for tensor in stored) / weight.numel() <= bytes_per_weight


def test_rotation_is_what_makes_the_promise_hold():
    weight = heavy_tailed()
    for kind, (snr, _) in PROMISES.items():
        stored = QUANTIZERS[kind].quantize(weight, torch.float32)
        assert snr_db(weight, QUANTIZERS[kind].dequantize(*stored)) < snr - 1


def test_published_codebooks_have_their_published_quality():
    weight = gaussian(64, 4096)
    for bits, expected in [(8, 31.1), (4, 16.3)]:
        levels = published_codebook(4096, bits)
        quantizer = CodebookQuantizer(levels)
        assert snr_db(weight, quantizer.dequantize(*quantizer.quantize(weight))) == pytest.approx(expected, abs=0.25)
        assert (levels[: 2**bits].diff() > 0).all()
        torch.testing.assert_close(levels[: 2**bits], -levels[: 2**bits].flip(0), atol=1e-8, rtol=1e-5)
    assert published_codebook(4096)[255] * math.sqrt(4096) == pytest.approx(2.88, abs=0.01)  # it clips there


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_shapes_and_dtypes_are_those_announced(kind):
    quantizer = QUANTIZERS[kind]
    stored = quantizer.quantize(gaussian(8, 1024))
    assert stored.codes.shape == quantizer.code_shape(8, 1024) and stored.codes.dtype == quantizer.code_dtype
    assert stored.scales.shape == quantizer.scale_shape(8, 1024)
    assert quantizer.dequantize(*stored).shape == (8, 1024)
    assert quantizer.dequantize(*stored, torch.bfloat16).dtype == torch.bfloat16
    batch = quantizer.quantize(torch.stack((gaussian(8, 1024), gaussian(8, 1024, seed=1))))
    assert torch.equal(batch.codes[0], stored.codes) and torch.equal(batch.scales[0], stored.scales)
    assert torch.equal(quantizer.dequantize(*batch)[0], quantizer.dequantize(*stored))


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_dequantize_equals_the_naive_lookup(kind):
    quantizer = QUANTIZERS[kind]
    codes, scales = quantizer.quantize(gaussian(4, 1024))
    actual = quantizer.dequantize(codes, scales)
    for row, column in [(0, 0), (1, 1), (2, 513), (3, 1023)]:
        scale = scales[row].float() if kind == "codebook" else scales[row, column // 128].float()
        if kind == "int8":
            level = codes[row, column].float()
        elif kind == "int4":
            byte = codes[row, column // 2].item()
            level = LLOYD_MAX_LEVELS[byte >> 4 if column % 2 else byte & 15]
        else:
            level = quantizer.levels[codes[row, column].long()]
        assert actual[row, column].item() == (level * scale).item()


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_codes_are_the_nearest_levels_for_the_stored_scales(kind):
    quantizer = QUANTIZERS[kind]
    weight = gaussian(4, 1024)
    codes, scales = quantizer.quantize(weight)
    error = (weight - quantizer.dequantize(codes, scales)).abs()
    for step in (-1, 1):
        if kind == "int4":
            low, high = (codes & 15).int(), (codes >> 4).int()
            moved = ((low + step).clamp(0, 15) | (high + step).clamp(0, 15) << 4).to(torch.uint8)
        else:
            limits = (-127, 127) if kind == "int8" else (0, 255)
            moved = (codes.int() + step).clamp(*limits).to(codes.dtype)
        assert (error <= (weight - quantizer.dequantize(moved, scales)).abs() + 1e-9).all()


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_zero_rows_stay_zero(kind):
    weight = gaussian(4, 1024)
    weight[1] = 0
    codes, scales = QUANTIZERS[kind].quantize(weight)
    assert scales[1].abs().sum() == 0
    assert QUANTIZERS[kind].dequantize(codes, scales)[1].abs().sum() == 0


@pytest.mark.parametrize("kind", PROMISES)
def test_scales_outside_of_fp16_are_fp32_or_refused(kind):
    quantizer = QUANTIZERS[kind]
    assert quantizer.quantize(gaussian()).scales.dtype == torch.float16
    for weight in (gaussian(std=1e-7), gaussian(std=1e8)):
        stored = quantizer.quantize(weight)
        assert stored.scales.dtype == torch.float32
        assert snr_db(weight, quantizer.dequantize(*stored)) >= PROMISES[kind][0]
        with pytest.raises(ValueError, match="do not fit float16"):
            quantizer.quantize(weight, torch.float16)


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_refused(kind, bad):
    weight = gaussian(4, 1024)
    weight[2, 17] = bad
    with pytest.raises(ValueError, match="non-finite"):
        QUANTIZERS[kind].quantize(weight)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_wild_but_finite_weight_is_kept(kind):
    weight = gaussian(4, 1024)
    weight[0, 0] = 1e4
    stored = QUANTIZERS[kind].quantize(weight, torch.float32)
    other = QUANTIZERS[kind].quantize(gaussian(4, 1024), torch.float32)
    assert torch.equal(stored.codes[1:], other.codes[1:])
    assert QUANTIZERS[kind].dequantize(*stored)[0, 0] > (5e3 if kind == "int8" else 10)


def quantized_rotated(weight, kind, block):
    """The weight after its way through rotation and quantizer, in fp32."""
    signs = random_signs(0, 0, "hidden", weight.shape[-1])
    stored = QUANTIZERS[kind].quantize(rotate(weight, signs, block), torch.float32)
    return unrotate(QUANTIZERS[kind].dequantize(*stored), signs, block)


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("size", [3e3, 1e6, 1e15])
@pytest.mark.parametrize("columns", [[700], [700, 701, 900]])
def test_the_block_that_a_huge_weight_swamps_is_found_though_the_whole_ratio_looks_excellent(kind, size, columns):
    """Quantized without a word, such a row would keep nothing but its huge weights."""
    weight, block = gaussian(), 1024 if kind == "codebook" else 512  # its norm is that of the whole row
    weight[5, columns] = size
    kept = quantized_rotated(weight, kind, block)
    assert snr_db(weight, kept) > 20
    row, column, ratio = worst_block(weight, kept, block)
    assert (row, column) == (5, 700 // block * block) and ratio < MINIMUM_BLOCK_DB


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("make_weight", [gaussian, heavy_tailed])
def test_no_block_of_weights_as_training_makes_them_comes_near_the_limit(make_weight, kind):
    weight = make_weight()
    weight[1] = 0  # nothing to lose
    weight[2, 1:] = 0  # its only weight is kept
    weight[3, :8] = 0.02 * 20  # outliers
    _, _, ratio = worst_block(weight, quantized_rotated(weight, kind, 1024), 1024)
    assert ratio > 2 * MINIMUM_BLOCK_DB


def test_a_block_whose_approximation_is_not_finite_is_the_worst():
    weight = gaussian(4, 64)
    for bad in (math.inf, math.nan):
        kept = weight.clone()
        kept[2, 40] = bad
        assert worst_block(weight, kept, 32) == (2, 32, -math.inf)
    assert worst_block(weight, weight, 32)[2] == math.inf


@pytest.mark.parametrize("kind", ["int4", "codebook"])
def test_weights_whose_squares_overflow_are_refused(kind):
    with pytest.raises(ValueError, match="overflow fp32"):
        QUANTIZERS[kind].quantize(torch.full((1, 1024), 1e25))


@pytest.mark.parametrize(("size", "block"), [(64, 64), (96, 32), (1, 1), (2048, 2048), (48, 16)])
def test_fast_rotation_equals_the_dense_matrix(size, block):
    assert hadamard_block(size, minimum=1) == block
    signs = random_signs(3, 1, "hidden", size)
    dense = rotation_matrix(signs, block)
    torch.testing.assert_close(dense @ dense.T, torch.eye(size), atol=1e-5, rtol=0)
    x = gaussian(6, size, std=1.0)
    torch.testing.assert_close(rotate(x, signs, block), x @ dense.T, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(unrotate(x, signs, block), x @ dense, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(unrotate(rotate(x, signs, block), signs, block), x)


def test_rotation_is_differentiable_and_fp32():
    signs = random_signs(0, 0, "hidden", 64)
    x = gaussian(5, 64, 1.0).bfloat16().requires_grad_()
    y = rotate(x, signs, 64)
    assert y.dtype == torch.float32
    grad = torch.randn(5, 64)
    y.backward(grad)
    torch.testing.assert_close(x.grad.float(), unrotate(grad, signs, 64), atol=2e-2, rtol=1e-2)


def test_a_dimension_without_a_large_power_of_two_is_refused():
    with pytest.raises(ValueError, match=r"dimension of 96.*32 is shorter than 64"):
        hadamard_block(96, minimum=64)


def test_signs_depend_on_seed_layer_and_kind_alone():
    signs = random_signs(7, 3, "hidden", 1000)
    torch.manual_seed(123)
    assert torch.equal(signs, random_signs(7, 3, "hidden", 1000))
    assert signs[:12].tolist() == [-1, 1, -1, 1, -1, -1, -1, -1, 1, 1, -1, 1]  # a saved base depends on them
    assert signs.dtype == torch.int8 and set(signs.tolist()) == {-1, 1} and abs(signs.float().mean()) < 0.1
    for other in (
        random_signs(8, 3, "hidden", 1000),
        random_signs(7, 4, "hidden", 1000),
        random_signs(7, 3, "up", 1000),
    ):
        assert 400 < (signs == other).sum() < 600


def test_all_256_wrapped_indices_are_read_back():
    codes = torch.arange(256, dtype=torch.uint8)
    wrapped = codes.view(torch.int8)
    assert wrapped.min() == -128
    assert torch.equal(unwrap_indices(wrapped), codes)
    quantizer = CodebookQuantizer(published_codebook(64))
    norms = torch.tensor([2.0], dtype=torch.bfloat16)
    row = quantizer.dequantize(unwrap_indices(wrapped)[None], norms)
    assert torch.equal(row[0], quantizer.levels * 2)


def test_published_rotations_are_reduced_to_their_signs():
    signs = random_signs(0, 0, "hidden", 64)
    rotation = rotation_matrix(signs, 64)
    assert torch.equal(signs_of_rotation(rotation), signs)
    assert torch.equal(signs_of_rotation(rotation.bfloat16()), signs)
    for bad in (rotation.roll(1, 0), torch.linalg.qr(torch.randn(64, 64)).Q, hadamard_matrix(64)[:32]):
        with pytest.raises(ValueError, match="rotation"):
            signs_of_rotation(bad)
