"""
Routed experts with frozen quantized weights and trained low-rank adapters.

    y = x W^T + (x B^T) A^T,   W = dequantize(codes) R,   dx = g (W + A B)

The quantized base is in the gradient path. It is dequantized a block of experts at a time (or tile by tile inside the
fused Triton kernel), in the forward pass and again in the backward pass; nothing dequantized is kept.

R rows, E local experts, H hidden size, F expert width, r rank.
"""

import hashlib
import importlib.metadata
import importlib.util
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .configuration_lightninglm import LightningLMConfig
from .delta_rule import triton_problem
from .experts import Experts, choose_matmul, expert_backend, grouped_linear, naive_experts
from .quantizers import (
    MINIMUM_BLOCK_DB,
    CodebookQuantizer,
    Int4Quantizer,
    Int8Quantizer,
    Quantized,
    hadamard_block,
    lost_block,
    published_codebook,
    random_signs,
    rotate,
    snr_db,
    unrotate,
    unwrap_indices,
)

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
BLOCK_WEIGHTS = 1 << 20  # entries dequantized at once; a matrix that is larger is dequantized whole


class WeightFormat(NamedTuple):
    """How one projection is stored: rotated by signs and Hadamard blocks, then quantized."""

    quantizer: Int8Quantizer | Int4Quantizer | CodebookQuantizer
    signs: torch.Tensor
    block: int

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x R^T in fp32 for rows x [.., in]."""
        return rotate(x, self.signs, self.block)

    def encode(self, weight: torch.Tensor) -> Quantized:
        """Quantizes a dense weight [.., out, in]; raises ValueError where it cannot."""
        weight_rot = self.rotate(weight)
        if not torch.isfinite(weight_rot).all():
            if not torch.isfinite(weight).all():
                raise ValueError("the weight has non-finite entries")
            raise ValueError(f"entries up to {weight.abs().max():.3g} are too large to be rotated in fp32")
        return self.quantizer.quantize(weight_rot)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The dense weight [.., out, in] in fp32, in the original space."""
        return unrotate(self.quantizer.dequantize(codes, scales), self.signs, self.block)


def shared_tensors(config: LightningLMConfig, layer_idx: int) -> dict[str, torch.Tensor]:
    """
    The tensors that all quantized experts of a layer share, by their names under `experts.`

    `hidden_signs` int8 [H] rotates the inputs of gate and up, `intermediate_signs` int8 [F] those of down. The codebook
    kind adds its levels, fp32 [256] each, and signs of its own for up, as the published format has them.
    """
    kind, seed = config.expert_quantization["kind"], config.expert_quantization["seed"]
    hidden, width = config.hidden_size, config.moe_intermediate_size
    tensors = {
        "hidden_signs": random_signs(seed, layer_idx, "hidden", hidden),
        "intermediate_signs": random_signs(seed, layer_idx, "intermediate", width),
    }
    if kind == "codebook":
        tensors["up_signs"] = random_signs(seed, layer_idx, "up", hidden)
        tensors["hidden_levels"] = published_codebook(hidden)
        tensors["intermediate_levels"] = published_codebook(width)
    return tensors


def weight_formats(config: LightningLMConfig, shared: Mapping[str, torch.Tensor]) -> dict[str, WeightFormat]:
    """
    The format of each projection.

    Args:
        config: the model's configuration, with `expert_quantization`.
        shared: the tensors of `shared_tensors`.
    """
    kind, group_size = config.expert_quantization["kind"], config.expert_quantization["group_size"]
    formats = {}
    for name in PROJECTIONS:
        dimension = "intermediate" if name == "down_proj" else "hidden"
        size = config.moe_intermediate_size if name == "down_proj" else config.hidden_size
        signs = shared[f"{dimension}_signs"]
        if kind == "codebook":
            quantizer = CodebookQuantizer(shared[f"{dimension}_levels"])
            signs = shared["up_signs"] if name == "up_proj" else signs
            block = hadamard_block(size, size)
        else:
            quantizer = Int8Quantizer(group_size) if kind == "int8" else Int4Quantizer(group_size)
            block = hadamard_block(size, group_size)
        formats[name] = WeightFormat(quantizer, signs, block)
    return formats


def quantize_expert(
    weights: Mapping[str, torch.Tensor],
    shared: Mapping[str, torch.Tensor],
    config: LightningLMConfig,
    *,
    layer_idx: int,
    expert: int,
    residual_init: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """
    Quantizes one expert and gives it adapters that start at zero: A = 0, B ~ N(0, 1 / in).

    Args:
        weights: the dense weight [out, in] of each projection, by name; a subset is allowed.
        shared: the layer's tensors of `shared_tensors`.
        layer_idx, expert: whose weights these are; with config.expert_quantization["seed"] they seed B.
        residual_init: start A B at the best rank-r approximation of the quantization error instead, as LoftQ does.
    Returns:
        (the expert's tensors, e.g. "gate_proj.codes", "gate_proj.scales", "gate_proj.A", "gate_proj.B";
        the signal-to-noise ratio of each projection's base in dB).
    Raises:
        ValueError: non-finite weights, or a weight so large that quantizing it loses those beside it
            (`quantizers.lost_block`); names layer, expert and projection.
    """
    rank, seed = config.expert_quantization["rank"], config.expert_quantization["seed"]
    formats = weight_formats(config, shared)
    tensors, snr = {}, {}
    for name, weight in weights.items():
        try:
            codes, scales = formats[name].encode(weight)
            base = formats[name].decode(codes, scales)
            _check_kept(weight, base, formats[name].block)
        except ValueError as error:
            raise ValueError(f"layer {layer_idx}, expert {expert}, {name}: {error}") from error
        snr[name] = snr_db(weight, base)
        if residual_init:
            adapter_a, adapter_b = _residual_adapters(weight.float() - base, rank)
        else:
            key = hashlib.sha256(f"{seed}/{layer_idx}/{expert}/{name}.B".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
            inputs = weight.shape[1]
            adapter_a = torch.zeros(weight.shape[0], rank)
            adapter_b = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        tensors |= {f"{name}.codes": codes, f"{name}.scales": scales, f"{name}.A": adapter_a, f"{name}.B": adapter_b}
    return tensors, snr


def _check_kept(weight: torch.Tensor, base: torch.Tensor, block: int) -> None:
    """Raises ValueError when a block of a row loses its weights to the noise of a few huge ones."""
    lost = lost_block(weight.float(), base, block)
    if lost is None:
        return
    row, column, ratio = lost
    entries = weight[row, column : column + block].float().abs()
    raise ValueError(
        f"the largest of columns {column} to {column + block - 1} in row {row}, {entries.max().item():.3g}, takes the "
        f"whole range: the others, {entries.median().item():.3g} in the median, keep {ratio:.1f} dB above the noise "
        f"({MINIMUM_BLOCK_DB:g} dB are needed); repair this weight, or leave the experts dense"
    )


def _residual_adapters(error: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    A [out, r] and B [r, in] whose product is the closest matrix of rank r.

    The singular values are in A alone: the rows of B have norm 1, as those of a fresh B have on average, so that A goes
    on at a fresh adapter's rate. Split evenly, small values would slow both down, and a zero would end them.
    """
    u, s, vh = torch.linalg.svd(error, full_matrices=False)
    return u[:, :rank] * s[:rank], vh[:rank]


def merge_expert(
    tensors: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor], config: LightningLMConfig
) -> dict[str, torch.Tensor]:
    """
    The dense fp32 weights W + A B of one expert, or of a stack of them: exactly the matrices that were trained.

    Args:
        tensors: as `quantize_expert` returns them, each with or without a leading expert dimension; a subset of the
            projections is allowed.
        shared: the layer's tensors of `shared_tensors`.
    """
    dense = {}
    for name, weight_format in weight_formats(config, shared).items():
        if f"{name}.codes" not in tensors:
            continue
        base = weight_format.decode(tensors[f"{name}.codes"], tensors[f"{name}.scales"])
        dense[name] = base + tensors[f"{name}.A"].float() @ tensors[f"{name}.B"].float()
    return dense


def import_published(
    weight_indices: torch.Tensor,
    row_norms: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    signs: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """
    One projection from the published format, without loss: y = x_rot W_q^T + (x_rot B^T) A^T, x_rot = x R^T.

    The published adapters act on rotated inputs; since x_rot B^T = x (B R)^T, B becomes B R and A stays.

    Args:
        weight_indices: int8 [.., out, in], wrapped.
        row_norms: [.., out].
        adapter_a, adapter_b: [.., out, r] and [.., r, in].
        signs: int8 [in], by `quantizers.signs_of_rotation`.
    Returns:
        "codes", "scales", "A" and "B" of the projection.
    """
    return {
        "codes": unwrap_indices(weight_indices),
        "scales": row_norms.float(),
        "A": adapter_a.float(),
        "B": unrotate(adapter_b, signs, signs.numel()),
    }


def kernel_problem(device: torch.device) -> str | None:
    """Why the fused Triton kernel cannot run on `device`, and what to do about it; None when it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it, or use 'torch'"
    if device.type == "cuda":
        return triton_problem(importlib.metadata.version("triton"), torch.cuda.get_device_capability(device))
    if not importlib.import_module("triton").knobs.runtime.interpret:
        return (
            f"its kernel needs a CUDA device, the tensors are on {device.type!r}; use 'torch' (or TRITON_INTERPRET=1 "
            "to check the kernel in Triton's interpreter)"
        )
    return None


def base_backend(config: LightningLMConfig, backend: str, device: torch.device) -> str:
    """
    What multiplies by the quantized base: `"triton"` where the configuration names it, else `backend` and blocks.

    Raises:
        RuntimeError: the kernel is asked for and cannot run (`kernel_problem`).
    """
    if config.experts_backend != "triton":
        return backend
    if problem := kernel_problem(device):
        raise RuntimeError(f"config.experts_backend = 'triton': {problem}")
    return "triton"


def _blocks(sizes: list[int], experts_per_block: int) -> Iterator[tuple[slice, slice]]:
    """(experts, rows) slices that cover all rows; blocks of experts without rows are left out."""
    row = 0
    for start in range(0, len(sizes), experts_per_block):
        block = sizes[start : start + experts_per_block]
        rows = sum(block)
        if rows:
            yield slice(start, start + len(block)), slice(row, row + rows)
        row += rows


class _FrozenGroupedLinear(torch.autograd.Function):
    """y = x W_e^T for the rows of each expert e, W_e dequantized in both passes; the gradient is for x alone."""

    @staticmethod
    def forward(ctx, x_RI, codes, scales, counts, quantizer, backend):
        ctx.save_for_backward(codes, scales, counts)
        ctx.quantizer, ctx.backend, ctx.in_features = quantizer, backend, x_RI.shape[1]
        if backend == "triton":
            from .fused_dequantize import rows_by_base

            return rows_by_base(x_RI, codes, scales, counts, quantizer, by_transposed=True)
        y_RO = x_RI.new_empty(x_RI.shape[0], codes.shape[1])
        for x, y, weight, matmul in _FrozenGroupedLinear._dequantized(ctx, x_RI, y_RO, codes, scales, counts):
            matmul.rows_by_weight(x, weight.transpose(1, 2), out=y)
        return y_RO

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO):
        codes, scales, counts = ctx.saved_tensors
        if ctx.backend == "triton":
            from .fused_dequantize import rows_by_base

            grad_RI = rows_by_base(grad_RO, codes, scales, counts, ctx.quantizer, by_transposed=False)
            return grad_RI, None, None, None, None, None
        grad_RI = grad_RO.new_empty(grad_RO.shape[0], ctx.in_features)
        rows = _FrozenGroupedLinear._dequantized(ctx, grad_RO.contiguous(), grad_RI, codes, scales, counts)
        for grad_y, grad_x, weight, matmul in rows:
            matmul.rows_by_weight(grad_y, weight, out=grad_x)
        return grad_RI, None, None, None, None, None

    @staticmethod
    def _dequantized(ctx, source, target, codes, scales, counts):
        """Per block of experts: rows of source, rows of target, dequantized weights [e, out, in], matmul."""
        experts_per_block = max(1, BLOCK_WEIGHTS // (source.shape[1] * target.shape[1]))
        for experts, rows in _blocks(counts.tolist(), experts_per_block):
            weight = ctx.quantizer.dequantize(codes[experts], scales[experts], source.dtype)
            yield source[rows], target[rows], weight, choose_matmul(ctx.backend, source, counts[experts])


class StackedQuantizedLinear(nn.Module):
    """
    One projection of all local experts: frozen `codes` and `scales`, trained adapters A [E, out, r] and B [E, r, in].

    Fresh ones are zero but for B; `quantize_experts`, a growth step or a checkpoint fills them.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, rank: int, quantizer):
        super().__init__()
        code_shape = (num_experts, *quantizer.code_shape(out_features, in_features))
        scale_shape = (num_experts, *quantizer.scale_shape(out_features, in_features))
        self.register_buffer("codes", torch.zeros(code_shape, dtype=quantizer.code_dtype))
        self.register_buffer("scales", torch.zeros(scale_shape, dtype=quantizer.scale_dtype))
        self.A = nn.Parameter(torch.zeros(num_experts, out_features, rank))
        self.B = nn.Parameter(torch.empty(num_experts, rank, in_features))
        nn.init.normal_(self.B, std=1 / math.sqrt(in_features))

    def forward(self, x_RI, x_rot_RI, counts: torch.Tensor, matmul, quantizer, backend: str) -> torch.Tensor:
        """x W^T + (x B^T) A^T for the rows of each expert, from x and its rotation."""
        base_RO = _FrozenGroupedLinear.apply(x_rot_RI, self.codes, self.scales, counts, quantizer, backend)
        return base_RO + grouped_linear(grouped_linear(x_RI, self.B, matmul), self.A, matmul)

    def extra_repr(self) -> str:
        return f"experts, out, in = {tuple(self.A.shape[:2]) + tuple(self.B.shape[2:])}, rank={self.B.shape[1]}"


class QuantizedExperts(nn.Module):
    """
    SwiGLU experts with frozen quantized weights and trained adapters; interface and attributes of `Experts`.

    Args:
        config: sizes, `expert_quantization` and `experts_backend`; `"naive"` computes with the merged dense weights.
        layer_idx: number of the layer, which seeds the rotation signs.
        num_local_experts: experts to allocate here; all of them by default.
    """

    def __init__(self, config: LightningLMConfig, layer_idx: int, num_local_experts: int | None = None):
        super().__init__()
        self.config = config
        self.backend = expert_backend(config)
        self.num_experts = config.num_experts
        self.num_local_experts = config.num_experts if num_local_experts is None else num_local_experts
        self.expert_start, self.expert_count = 0, min(self.num_experts, self.num_local_experts)
        shared = shared_tensors(config, layer_idx)
        self.shared_names = tuple(shared)
        for name, tensor in shared.items():
            self.register_buffer(name, tensor)
        hidden, width = config.hidden_size, config.moe_intermediate_size
        sizes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
        rank = config.expert_quantization["rank"]
        for name, weight_format in weight_formats(config, shared).items():
            stack = StackedQuantizedLinear(self.num_local_experts, *sizes[name], rank, weight_format.quantizer)
            self.add_module(name, stack)

    def shared(self) -> dict[str, torch.Tensor]:
        """The tensors that all experts of this layer share, see `shared_tensors`."""
        return {name: getattr(self, name) for name in self.shared_names}

    def merged(self) -> dict[str, torch.Tensor]:
        """The dense fp32 weights W + A B of the local experts, [E_local, out, in]; differentiable in A and B."""
        names = ("codes", "scales", "A", "B")
        tensors = {f"{name}.{part}": getattr(getattr(self, name), part) for name in PROJECTIONS for part in names}
        return merge_expert(tensors, self.shared(), self.config)

    def forward(self, x_RH: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """As `Experts.forward`."""
        x_RH = x_RH.to(self.gate_proj.A.dtype)
        if self.backend == "naive":
            weights = self.merged()
            return naive_experts(x_RH, tokens_per_expert, *(weights[name].to(x_RH.dtype) for name in PROJECTIONS))
        matmul = choose_matmul(self.backend, x_RH, tokens_per_expert)
        formats = weight_formats(self.config, self.shared())
        backend = base_backend(self.config, self.backend, x_RH.device)

        def project(name, x, x_rot):
            stack = getattr(self, name)
            return stack(x, x_rot, tokens_per_expert, matmul, formats[name].quantizer, backend)

        x_rot_RH = formats["gate_proj"].rotate(x_RH).to(x_RH.dtype)
        gate_RF = project("gate_proj", x_RH, x_rot_RH)
        if "up_signs" in self.shared_names:
            x_rot_RH = formats["up_proj"].rotate(x_RH).to(x_RH.dtype)
        hidden_RF = F.silu(gate_RF) * project("up_proj", x_RH, x_rot_RH)
        return project("down_proj", hidden_RF, formats["down_proj"].rotate(hidden_RF).to(x_RH.dtype))


@torch.no_grad()
def quantize_experts(experts: Experts, config: LightningLMConfig, layer_idx: int, **options) -> QuantizedExperts:
    """Dense experts of one layer, all of them in this process, as quantized ones; options as in `quantize_expert`."""
    quantized = QuantizedExperts(config, layer_idx)
    shared = quantized.shared()
    for expert in range(experts.num_experts):
        weights = {name: getattr(experts, name).weight[expert] for name in PROJECTIONS}
        tensors, _ = quantize_expert(weights, shared, config, layer_idx=layer_idx, expert=expert, **options)
        for name, tensor in tensors.items():
            projection, part = name.split(".")
            getattr(getattr(quantized, projection), part)[expert] = tensor
    return quantized
