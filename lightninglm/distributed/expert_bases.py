"""Hashes the quantized bases that the ranks of a run hold in memory, as a checkpoint's manifest hashes them."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from lightninglm.checkpoint.expert_bases import base_hashes, is_base
from lightninglm.checkpoint.model_tensors import model_tensors


def hash_expert_bases(model: nn.Module) -> dict[str, str]:
    """The `base_hashes` of a model whose experts may be spread over the ranks. Collective."""
    here = {
        name: _sha256(row)
        for item in model_tensors(model)
        if is_base(item.name)
        for name, row in item.split(item.tensor)
    }
    ranks: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, here)
    return base_hashes({name: sha256 for rank in ranks for name, sha256 in rank.items()})


def _sha256(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(raw)).hexdigest()
