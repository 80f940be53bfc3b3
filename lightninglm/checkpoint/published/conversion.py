"""One published tensor into ours and back. Exact both ways, except for the two forms that an import keeps beside."""

import math

import torch
from torch import Tensor

from lightninglm.checkpoint.published.keys import Entry, Form
from lightninglm.modeling.quantizers import hadamard_matrix, rotate, signs_of_rotation, unrotate, unwrap_indices


def split(entry: Entry, tensor: Tensor) -> list[Tensor]:
    """The part of each of `entry.names` in the published tensor, or in a block of its experts."""
    if entry.per_expert:
        return list(tensor.unbind())
    return list(tensor.chunk(len(entry.names))) if len(entry.names) > 1 else [tensor]


def to_ours(entry: Entry, part: Tensor, signs: Tensor | None = None) -> Tensor:
    """
    One of our tensors from the published part.

    Args:
        part: as `split` gives it; for a base, with the product of its adapters added.
        signs: of `entry.rotation`.
    """
    if entry.form is Form.TRANSPOSED:
        part = part.mT
    elif entry.form is Form.CODES:
        part = unwrap_indices(part)
    elif entry.form is Form.ROTATION:
        part = signs_of_rotation(part)
    elif entry.form in (Form.ADAPTER, Form.BASE):
        part = unrotate(part, signs, signs.numel())
    part = part.reshape(entry.disk_shape)
    return part.float() if entry.in_fp32 and part.is_floating_point() else part


def to_published(entry: Entry, part: Tensor, signs: Tensor | None = None, magnitude: float | None = None) -> Tensor:
    """
    The published part from one of our tensors, in the dtype of ours.

    Args:
        signs: of `entry.rotation`.
        magnitude: of the entries of a rotation, 1 / sqrt(n) unless the original had it rounded.
    """
    if entry.form is Form.TRANSPOSED:
        return part.mT
    if entry.form is Form.CODES:
        return part.view(torch.int8)
    if entry.form is Form.ROTATION:
        return rotation_of_signs(part, magnitude)
    if entry.form is Form.ADAPTER:
        return rotate(part, signs, signs.numel())
    return part


def rotation_of_signs(signs: Tensor, magnitude: float | None = None) -> Tensor:
    """H diag(s) / sqrt(n) in fp32."""
    return hadamard_matrix(signs.numel()) * (signs * (magnitude or 1 / math.sqrt(signs.numel())))


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order, uint8 [nbytes]; not copied if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
