"""What the ranks of a run really hold: bytes of weights, buffers and optimizer state, by part of the model."""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from lightninglm.checkpoint.layout import EXP_AVG, EXP_AVG_SQ, MASTER
from lightninglm.checkpoint.model_tensors import model_tensors
from lightninglm.distributed.optimizer_state import OptimizerState


def measured_bytes(engine: DeepSpeedEngine, part_of: Callable[[str], str]) -> tuple[Counter[str], Counter[str]]:
    """
    Bytes of weights and persistent buffers on this rank, and of optimizer state on all ranks together. Collective.

    Args:
        part_of: name of a tensor in memory -> the part it is counted under.
    Returns:
        (weights by part, optimizer by part). A weight that is its own master copy is counted as a weight. The few
        elements by which ZeRO aligns its partitions are not counted.
    """
    state = OptimizerState(engine)
    weights, optimizer = Counter(), Counter()
    for item in model_tensors(engine.module):
        part = part_of(item.name)
        weights[part] += getattr(item.tensor, "ds_tensor", item.tensor).nbytes
        for key in (MASTER, EXP_AVG, EXP_AVG_SQ) if state.trains(item.tensor) else ():
            _, fragment = state.fragment(item.tensor, key)
            if fragment is not None and fragment.data_ptr() != item.tensor.data_ptr():
                optimizer[part] += fragment.nbytes
    parts = sorted(set(weights))
    totals = torch.tensor([optimizer[part] for part in parts], dtype=torch.int64, device=engine.device)
    dist.all_reduce(totals)
    return weights, Counter(dict(zip(parts, totals.tolist(), strict=True)))
