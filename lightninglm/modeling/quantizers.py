"""
Quantizers of weight matrices: int8, packed 4-bit, the published codebooks, and the rotation that precedes them.

A weight W [.., out, in] is rotated along its input dimension, W_rot = W R^T with R = H diag(s) / sqrt(in) (H Hadamard,
s random signs), which makes its entries close to Gaussian; W_rot is then stored as codes and scales. Scales are rounded
to bf16 first and codes chosen for them as rounded: it costs nothing that shows, and weights of any size have a scale.
"""

import functools
import hashlib
import math
from typing import NamedTuple

import torch

LLOYD_MAX_HALF = (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590)
LLOYD_MAX_LEVELS = tuple(-level for level in reversed(LLOYD_MAX_HALF)) + LLOYD_MAX_HALF
"""The 16 levels that minimize the squared error on N(0, 1) (Lloyd, 1982; Max, 1960); code 0 is the most negative."""

MINIMUM_BLOCK_DB = 3.0
"""A block whose weights stand less above the noise is refused (`lost_block`); storing zeros for them gives 0 dB."""


class Quantized(NamedTuple):
    """A stored matrix: integer codes and their scales."""

    codes: torch.Tensor
    scales: torch.Tensor


def random_signs(seed: int, layer_idx: int, kind: str, size: int) -> torch.Tensor:
    """int8 [size] of +1 and -1, a function of its arguments alone: the bits of a hash."""
    digest = hashlib.shake_256(f"{seed}/{layer_idx}/{kind}".encode()).digest(math.ceil(size / 8))
    bits = [byte >> i & 1 for byte in digest for i in range(8)]
    return torch.tensor(bits[:size], dtype=torch.int8) * 2 - 1


def hadamard_block(size: int, minimum: int) -> int:
    """
    The block length of the rotation: the largest power of two that divides `size`.

    Raises:
        ValueError: it is shorter than `minimum`, the length of a quantization group.
    """
    block = size & -size
    if block < minimum:
        raise ValueError(
            f"cannot rotate a dimension of {size}: its largest power-of-two divisor {block} is shorter than {minimum}"
        )
    return block


def hadamard_matrix(size: int, device: torch.device | None = None) -> torch.Tensor:
    """Sylvester's Hadamard matrix, fp32 [size, size], entries +1 and -1; size a power of two."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def hadamard_transform(x: torch.Tensor, block: int) -> torch.Tensor:
    """
    Multiplies each block of the last dimension by H / sqrt(block), in fp32.

    H of size a * b is H_a (x) H_b, so two small products, with a and b near sqrt(block), do the work of the dense one.
    """
    a = 1 << ((block.bit_length() - 1) // 2)
    b = block // a
    h_a = hadamard_matrix(a, x.device) / math.sqrt(block)
    h_b = hadamard_matrix(b, x.device)
    with torch.autocast(x.device.type, enabled=False):
        return (h_a @ (x.float().unflatten(-1, (-1, a, b)) @ h_b)).view(x.shape)


def rotate(x: torch.Tensor, signs: torch.Tensor, block: int) -> torch.Tensor:
    """x R^T for rows x of the last dimension, fp32: rotated activations, or a weight along its inputs."""
    return hadamard_transform(x.float() * signs, block)


def unrotate(x_rot: torch.Tensor, signs: torch.Tensor, block: int) -> torch.Tensor:
    """The inverse, x_rot R, fp32."""
    return hadamard_transform(x_rot, block) * signs


def rotation_matrix(signs: torch.Tensor, block: int) -> torch.Tensor:
    """The readable reference: R dense, fp32 [n, n], block-diagonal when n is not a power of two."""
    blocks = [hadamard_matrix(block) / math.sqrt(block)] * (signs.numel() // block)
    return torch.block_diag(*blocks) * signs


def snr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal-to-noise ratio of an approximation in decibels; infinite when it is exact."""
    reference = reference.double()
    noise = (reference - approximation.double()).square().sum().item()
    signal = reference.square().sum().item()
    if noise == 0:
        return math.inf
    if not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def lost_block(
    reference: torch.Tensor, approximation: torch.Tensor, block: int, minimum_db: float = MINIMUM_BLOCK_DB
) -> tuple[int, int, float] | None:
    """
    The block of a row that keeps the least of its weights, where its signal-to-noise ratio is below a minimum.

    The largest 1/32 of the weights of a block, at least one, count no more than the next one. The ratio of a whole
    matrix does not show a huge weight: it is itself stored well, but sets the step of all that share its scale.

    Args:
        reference, approximation: [out, in].
        block: consecutive weights of a row that are rotated together, and so share the noise. One in which all other
            weights are zero has nothing to lose and counts as exact.
    Returns:
        None, or its row, its first column and its ratio in dB.
    """
    weights, errors = reference.unflatten(-1, (-1, block)), (reference - approximation).unflatten(-1, (-1, block))
    largest, least = max(1, block // 32), 10 ** (minimum_db / 10)
    noise = errors.square().sum(-1)
    at_least = weights.square().sum(-1) - largest * weights.abs().amax(-1).square()  # of the signal below
    doubtful = ~((at_least > least * noise) & noise.isfinite())
    if not doubtful.any():
        return None
    squares, noise = weights[doubtful].double().square(), errors[doubtful].double().square().sum(-1)
    limit = squares.topk(min(largest + 1, block)).values[:, -1:]
    signal = squares.minimum(limit).sum(-1)
    nothing_to_lose = (noise == 0) | (signal == 0) & noise.isfinite()
    ratio = torch.where(nothing_to_lose, math.inf, signal / noise).nan_to_num(nan=0.0, posinf=math.inf)
    worst, which = ratio.min(0)
    if worst >= least:
        return None
    row, column = doubtful.nonzero()[which].tolist()
    return row, column * block, 10 * math.log10(worst) if worst > 0 else -math.inf


def _checked(weight: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(weight).all():
        raise ValueError("the weight has non-finite entries")
    return weight.float()


def _no_overflow(scales: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(scales).all():
        raise ValueError("the weight is too large: sums over its entries overflow fp32")
    return scales


class Int8Quantizer:
    """
    Signed 8-bit codes with one scale per group of consecutive entries: w = code * scale, scale = max|w| / 127.

    Args:
        group_size: entries per scale (G); must divide the input dimension.
    """

    code_dtype, scale_dtype = torch.int8, torch.bfloat16

    def __init__(self, group_size: int):
        self.group_size = group_size

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns // self.group_size

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """
        Quantizes [.., out, in].

        Raises:
            ValueError: non-finite weights.
        """
        groups = _checked(weight).unflatten(-1, (-1, self.group_size))
        scales = (groups.abs().amax(-1) / 127).to(self.scale_dtype)
        step = scales.float()[..., None]
        codes = torch.where(step > 0, groups / step, 0.0).round_().clamp_(-127, 127)
        return Quantized(codes.flatten(-2).to(torch.int8), scales)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [.., out, in]: code times scale in fp32, one rounding to dtype."""
        groups = codes.unflatten(-1, (-1, self.group_size)).float()
        return groups.mul_(scales.float()[..., None]).flatten(-2).to(dtype)


class Int4Quantizer:
    """
    4-bit codes of the Gaussian Lloyd-Max levels, two per byte (even column in the low nibble), one scale per group.

    The scale is fitted by least squares to the levels that the group's rms picks, then the codes are picked again.

    Args:
        group_size: entries per scale (G); must divide the input dimension and be even.
    """

    code_dtype, scale_dtype = torch.uint8, torch.bfloat16

    def __init__(self, group_size: int):
        if group_size % 2:
            raise ValueError(f"group_size = {group_size}: must be even, two codes share a byte")
        self.group_size = group_size

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // 2

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns // self.group_size

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """As `Int8Quantizer.quantize`."""
        groups = _checked(weight).unflatten(-1, (-1, self.group_size))
        levels = torch.tensor(LLOYD_MAX_LEVELS, device=weight.device)
        rms = _no_overflow(groups.square().mean(-1, keepdim=True).sqrt())
        fitted = levels[self._nearest(groups, rms, levels)]
        scales = ((groups * fitted).sum(-1) / fitted.square().sum(-1)).to(self.scale_dtype)
        codes = self._nearest(groups, scales.float()[..., None], levels).flatten(-2).to(torch.uint8)
        return Quantized(codes[..., 0::2] | codes[..., 1::2] << 4, scales)

    @staticmethod
    def _nearest(groups: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        edges = (levels[:-1] + levels[1:]) / 2
        return torch.bucketize(torch.where(scale > 0, groups / scale, 0.0), edges)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [.., out, in]: level times scale in fp32, one rounding to dtype."""
        levels = torch.tensor(LLOYD_MAX_LEVELS, device=codes.device)
        byte = torch.arange(256, device=codes.device)
        pairs = torch.complex(levels[byte & 15], levels[byte >> 4])  # a byte's two entries, looked up as one number
        entries = torch.view_as_real(pairs.index_select(0, codes.flatten().int()))
        groups = entries.view(*scales.shape, self.group_size)
        return groups.mul_(scales.float()[..., None]).flatten(-2).to(dtype)


class CodebookQuantizer:
    """
    The published format: an 8-bit index into a table of 256 levels, times the norm of the row. For imported weights.

    Args:
        levels: fp32 [256], ascending.
    """

    code_dtype, scale_dtype = torch.uint8, torch.float32

    def __init__(self, levels: torch.Tensor):
        self.levels = levels

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows,)

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """As `Int8Quantizer.quantize`; scales are fp32, which also holds the published bf16 norms exactly."""
        weight = _checked(weight)
        scales = _no_overflow(weight.norm(dim=-1))
        unit = torch.where(scales[..., None] > 0, weight / scales[..., None], 0.0)
        levels = self.levels.float()
        codes = torch.bucketize(unit, (levels[:-1] + levels[1:]) / 2)
        return Quantized(codes.to(torch.uint8), scales)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [.., out, in]: level times row norm in fp32, one rounding to dtype."""
        entries = self.levels.float().index_select(0, codes.flatten().int()).view(codes.shape)
        return entries.mul_(scales.float()[..., None]).to(dtype)


def published_codebook(dimension: int, bits: int = 8) -> torch.Tensor:
    """
    The published levels: quantile midpoints (k + 1/2) / 2^bits of one coordinate of a uniform point on the sphere in
    `dimension` dimensions, whose density is proportional to (1 - x^2)^((dimension - 3) / 2).

    Returns:
        fp32 [256], ascending; a table of fewer levels is padded with its largest one.
    """
    return _published_codebook(dimension, bits).clone()  # a buffer that loading may overwrite


@functools.cache
def _published_codebook(dimension: int, bits: int) -> torch.Tensor:
    reach = min(1.0, 12 / math.sqrt(dimension))
    x = torch.linspace(-reach, reach, 200_001, dtype=torch.float64, device="cpu")  # real inside torch.device("meta")
    density = (1 - x.square()).clamp(min=0).pow((dimension - 3) / 2)
    cdf = torch.cumulative_trapezoid(density, x)
    cdf = torch.cat((cdf.new_zeros(1), cdf)) / cdf[-1]
    count = 2**bits
    target = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    right = torch.searchsorted(cdf, target).clamp(1, x.numel() - 1)
    fraction = (target - cdf[right - 1]) / (cdf[right] - cdf[right - 1])
    levels = (x[right - 1] + fraction * (x[right] - x[right - 1])).float()
    return torch.cat((levels, levels[-1:].expand(256 - count)))


def unwrap_indices(indices: torch.Tensor) -> torch.Tensor:
    """Published indices as stored, int8 with 128..255 wrapped to negative numbers, as uint8."""
    return indices.view(torch.uint8)


def signs_of_rotation(rotation: torch.Tensor) -> torch.Tensor:
    """
    The signs s, int8 [n], of a published dense rotation R = H diag(s) / sqrt(n).

    Raises:
        ValueError: R is not of this form.
    """
    n = rotation.shape[-1]
    signs = rotation[0].float().sign().to(torch.int8)
    if rotation.shape != (n, n) or n & (n - 1) or not bool((signs != 0).all()):
        raise ValueError(f"a rotation of shape {tuple(rotation.shape)} is not a signed Hadamard matrix")
    error = (rotation.float() - rotation_matrix(signs, n)).abs().max().item()
    if error > 2**-8 / math.sqrt(n):  # bf16 rounding of 1 / sqrt(n)
        raise ValueError(f"the rotation differs from H diag(s) / sqrt({n}) by up to {error:.3g}")
    return signs
