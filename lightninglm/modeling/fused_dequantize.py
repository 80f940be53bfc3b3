"""
Fused Triton kernel: rows times the quantized weights of their experts, dequantized tile by tile on the chip.

R rows sorted by expert, E experts, O and I the weights' output and input size. One program makes a tile of the output;
it reads codes and scales of one expert and never writes a dequantized weight to memory. Imported only when selected.
"""

import torch

from .quantizers import LLOYD_MAX_LEVELS, Int4Quantizer, Int8Quantizer

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("config.experts_backend = 'triton': Triton is not installed; use 'torch'") from error

BLOCK_R, BLOCK_N, BLOCK_K = 64, 64, 32


@triton.jit
def _multiply(
    x_ptr, codes_ptr, scales_ptr, levels_ptr, y_ptr, expert_ptr, first_row_ptr, end_row_ptr, O, I,
    GROUP: tl.constexpr, PACKED: tl.constexpr, BY_TRANSPOSED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x W^T, or y = x W when not BY_TRANSPOSED, for one tile of rows of one expert and BLOCK_N columns of y."""
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    first_row = tl.load(first_row_ptr + tile)
    end_row = tl.load(end_row_ptr + tile)
    if first_row >= end_row:
        return
    K, N = (I, O) if BY_TRANSPOSED else (O, I)
    rows = first_row + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    accumulator = tl.full((BLOCK_R, BLOCK_N), 0.0, tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = (rows < end_row)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        if BY_TRANSPOSED:
            o, i = columns[None, :], k[:, None]
        else:
            o, i = k[:, None], columns[None, :]
        w_mask = (o < O) & (i < I)
        row_of_w = expert * O + o
        if PACKED:
            byte = tl.load(codes_ptr + row_of_w * (I // 2) + i // 2, mask=w_mask, other=0).to(tl.int32)
            entries = tl.load(levels_ptr + (byte >> (i % 2 * 4) & 15))
        else:
            entries = tl.load(codes_ptr + row_of_w * I + i, mask=w_mask, other=0).to(tl.float32)
        scales = tl.load(scales_ptr + row_of_w * (I // GROUP) + i // GROUP, mask=w_mask, other=0.0).to(tl.float32)
        w = (entries * scales).to(x.dtype)
        accumulator = tl.dot(x, w, accumulator, input_precision="ieee")
    y_mask = (rows < end_row)[:, None] & (columns < N)[None, :]
    tl.store(y_ptr + rows[:, None] * N + columns[None, :], accumulator.to(y_ptr.dtype.element_ty), mask=y_mask)


def _tiles(counts: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Expert, first row and end row of every tile, int64 [T], without waiting for the device.

    No tile crosses experts, so there are at most rows / BLOCK_R + E; those that are not needed have no rows.
    """
    per_expert = (counts + BLOCK_R - 1) // BLOCK_R
    end_tile, end_row = per_expert.cumsum(0), counts.cumsum(0)
    tile = torch.arange(triton.cdiv(rows, BLOCK_R) + counts.numel(), device=counts.device)
    expert = torch.searchsorted(end_tile, tile, right=True).clamp_(max=counts.numel() - 1)
    first_row = end_row[expert] - counts[expert] + (tile - end_tile[expert] + per_expert[expert]) * BLOCK_R
    return expert, first_row, end_row[expert]


def rows_by_base(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    counts: torch.Tensor,
    quantizer: Int8Quantizer | Int4Quantizer,
    by_transposed: bool,
) -> torch.Tensor:
    """
    x W_e^T [R, O] for rows x [R, I] of each expert e, or x W_e [R, I] for rows [R, O] when not by_transposed.

    A dequantized entry is rounded to x.dtype, as `quantizer.dequantize` does; sums are fp32.

    Args:
        codes, scales: of W [E, O, I], as the quantizer stores them.
        counts: [E] int64, rows of each expert; they sum to R.
    """
    packed = isinstance(quantizer, Int4Quantizer)
    outputs, inputs = codes.shape[1], codes.shape[2] * (2 if packed else 1)
    y = x.new_empty(x.shape[0], outputs if by_transposed else inputs)
    if not x.shape[0]:
        return y
    levels = torch.tensor(LLOYD_MAX_LEVELS, device=x.device)
    expert, first_row, end_row = _tiles(counts.to(x.device), x.shape[0])
    grid = (expert.numel(), triton.cdiv(y.shape[1], BLOCK_N))
    _multiply[grid](
        x.contiguous(), codes, scales, levels, y, expert, first_row, end_row, outputs, inputs,
        GROUP=quantizer.group_size, PACKED=packed, BY_TRANSPOSED=by_transposed,
        BLOCK_R=BLOCK_R, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return y
