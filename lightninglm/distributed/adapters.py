"""
Adapters of quantized experts in a run: which of them an optimizer step moved, and merging them into their base.

Merging rewrites the base, the adapters' fp32 master copies and their moments together. Rewriting the weights alone is
not enough: the next optimizer step copies the master copies over them, and the old adapters would act a second time,
on top of the base that has absorbed them.
"""

import math
import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from lightninglm.checkpoint.layout import MASTER
from lightninglm.distributed.optimizer_state import MOMENTS, OptimizerState, whole_weight
from lightninglm.distributed.process_group import raise_together
from lightninglm.modeling.moe import MoEBlock
from lightninglm.modeling.quantized_experts import PROJECTIONS, QuantizedExperts, merge_expert, quantize_expert

ADAPTER_PARTS = ("A", "B")


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedExperts]]:
    """(name, experts) of every layer with quantized experts, in the order of the routers."""
    for name, module in model.named_modules():
        if isinstance(module, MoEBlock) and isinstance(module.experts, QuantizedExperts):
            yield name, module.experts


class AdapterMovement:
    """
    Counts the adapters that one optimizer step changes: make it before the step, ask it afterwards.

    With A = 0 the gradient of B is zero, so the first step moves A of every expert that had a token and no B; from the
    second step on both move. An expert without a token in a layer has a zero gradient.
    """

    def __init__(self, model: nn.Module):
        self.layers = list(quantized_layers(model))
        self.before = [
            {
                (projection, part): _rows(experts, projection, part)
                for projection in PROJECTIONS
                for part in ADAPTER_PARTS
            }
            for _, experts in self.layers
        ]

    def counts(self, picks: Sequence[torch.Tensor]) -> dict[str, int]:
        """
        Adapters (one per expert, projection and layer) of the whole model. Collective.

        Args:
            picks: per layer with experts, the picks [E] of the step, summed over ranks.
        Returns:
            {"with_tokens": adapters of experts that had a token, "A": those whose A moved, "B": whose B moved,
            "without_tokens": adapters whose expert had no token and that moved all the same}.
        """
        totals = torch.zeros(4, dtype=torch.int64)
        for (_, experts), before, of_layer in zip(self.layers, self.before, picks, strict=True):
            here = slice(experts.expert_start, experts.expert_start + experts.expert_count)
            seen = of_layer[here].cpu() > 0
            for projection in PROJECTIONS:
                moved = {}
                for part in ADAPTER_PARTS:
                    change = _rows(experts, projection, part) != before[projection, part]
                    moved[part] = change.flatten(1).any(1).cpu()
                idle = (moved["A"] | moved["B"]) & ~seen
                totals += torch.stack([flag.sum() for flag in (seen, moved["A"] & seen, moved["B"] & seen, idle)])
        # every expert is held by the same number of ranks
        held = sum(experts.expert_count for _, experts in self.layers)
        held = torch.cat((totals, torch.tensor([held]))).to(_device(self.layers))
        dist.all_reduce(held)
        copies = int(held[-1]) // sum(experts.num_experts for _, experts in self.layers)
        return dict(zip(("with_tokens", "A", "B", "without_tokens"), (held[:-1] // copies).tolist(), strict=True))


def _rows(experts: QuantizedExperts, projection: str, part: str) -> torch.Tensor:
    """A copy of one adapter of the real local experts."""
    parameter = getattr(getattr(experts, projection), part)
    with whole_weight(parameter):
        return parameter.detach()[: experts.expert_count].clone()


def _device(layers) -> torch.device:
    return layers[0][1].hidden_signs.device


@torch.no_grad()
def merge_adapters(engine: DeepSpeedEngine) -> dict[str, float]:
    """
    Merges all adapters into their bases and starts them anew. Collective; call it between optimizer steps.

    The matrix trained so far, M = W + A B (from the fp32 master copies), is quantized to a new base W', and A B starts
    again at the closest rank-r matrix to M - W'. Plain A = 0 would lose every change smaller than half a quantization
    step, which most are; so started, the function changes by no more than the entries whose codes changed account for.
    Master copies and weights get the new adapters, both moments become zero, Adam's step stays (the caller warms the
    adapters' learning rate up again).

    Returns:
        {"signal_to_noise_db": of W' against M, the lowest; "relative_change": |W' + A'B' - M| / |M|, the largest}, over
        all matrices.
    Raises ValueError, naming layer, expert and projection, when a matrix cannot be quantized.
    """
    state = OptimizerState(engine)
    lowest, largest = math.inf, 0.0
    for name, experts in quantized_layers(engine.module):
        parameters = {f"{p}.{part}": getattr(getattr(experts, p), part) for p in PROJECTIONS for part in ADAPTER_PARTS}
        masters = {key: state.gather(parameter, MASTER) for key, parameter in parameters.items()}
        with raise_together():
            for row in range(experts.expert_count):
                snr, change = _merge_one(experts, masters, row, _layer_idx(name, experts))
                lowest, largest = min(lowest, snr), max(largest, change)
        for key, parameter in parameters.items():
            _write(state, parameter, masters[key])
    state.publish()
    worst = torch.tensor([-lowest, largest], dtype=torch.float64, device=engine.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"signal_to_noise_db": -worst[0].item(), "relative_change": worst[1].item()}


def _merge_one(experts: QuantizedExperts, masters: dict[str, torch.Tensor], row: int, layer_idx: int):
    """Rewrites the base of one local expert, and its rows of `masters`; (lowest dB, largest relative change)."""
    adapters = {key: master[row] for key, master in masters.items()}
    base = {f"{p}.{part}": getattr(getattr(experts, p), part)[row] for p in PROJECTIONS for part in ("codes", "scales")}
    shared, config, expert = experts.shared(), experts.config, experts.expert_start + row
    trained = merge_expert(base | adapters, shared, config)
    restarted, snr = quantize_expert(trained, shared, config, layer_idx=layer_idx, expert=expert, residual_init=True)
    for key, tensor in (base | adapters).items():
        tensor.copy_(restarted[key])
    now = merge_expert(restarted, shared, config)
    changes = [float((now[p] - trained[p]).norm() / trained[p].norm().clamp(min=1e-30)) for p in PROJECTIONS]
    return min(snr.values()), max(changes)


def _write(state: OptimizerState, parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Gives this rank's part of a parameter's master copy its new value, and resets its moments."""
    start, master = state.fragment(parameter, MASTER)
    if master is None:
        return
    master.copy_(value.view(-1)[start : start + master.numel()])
    for key in MOMENTS:
        _, moment = state.fragment(parameter, key)
        if moment is not None:
            moment.zero_()


def _layer_idx(block: str, experts: QuantizedExperts) -> int:
    """Number of the layer; the second-token layer counts behind the last one."""
    match = re.search(r"\.layers\.(\d+)\.", block)
    return int(match[1]) if match else experts.config.num_hidden_layers
