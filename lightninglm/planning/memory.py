"""
What one rank holds through a step whatever the micro-batch: weights, gradients, optimizer state, buffers of ZeRO.

Weights and optimizer state are those of `training/ledger.py`. Gradients follow DeepSpeed 0.19.8:

    ZeRO 0          a gradient per parameter
    ZeRO 1, bf16    BF16_Optimizer: a gradient per parameter, and all of them once more in the accumulation dtype
    ZeRO 1, fp32    a gradient per parameter, and the owned part once more at the last micro-batch
    ZeRO 2          the owned part in the accumulation dtype
    ZeRO 3          the owned part

A parameter that a step does not reach has no gradient of its own, but its place in the optimizer's copies.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lightninglm.checkpoint import is_stacked
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM
from lightninglm.modeling.parameter_roles import ADAPTERS
from lightninglm.training.ledger import BASES, EXPERTS, REST, ledger

FP32 = 4
ITEM_BYTES = {"fp32": 4, "bf16": 2}
ADAM_TEMPORARIES = 2  # fp32 copies of one group's part in torch's AdamW step


@dataclass(frozen=True)
class RankBytes:
    """
    Bytes on the rank with the most experts.

    Attributes:
        weights: parameters and buffers, the table of token bytes too, without the next two.
        quantized_base: codes, scales and signs of quantized experts.
        adapters: their trained adapters.
        gradients: from the first backward pass of a step to its optimizer step.
        optimizer: master copies and Adam's moments.
        communication: buckets of ZeRO, and the largest gradient on its way into one.
        step: what the reduction and the optimizer step need for a moment, when no activations are there.
    """

    weights: int
    quantized_base: int
    adapters: int
    gradients: int
    optimizer: int
    communication: int
    step: int

    @property
    def kept(self) -> int:
        """All but `step`."""
        return self.weights + self.quantized_base + self.adapters + self.gradients + self.optimizer + self.communication


def rank_bytes(
    config: LightningLMConfig, ds_config: Mapping[str, Any], *, world_size: int, expert_parallel: int, dtype: str
) -> RankBytes:
    """
    The bytes of one rank.

    Args:
        ds_config: of `distributed.ds_config.load_ds_config`.
        dtype: `"fp32"` or `"bf16"`, of the weights.
    """
    stage = ds_config["zero_optimization"]["stage"]
    rows = ledger(config, world_size=world_size, expert_parallel=expert_parallel, zero_stage=stage, dtype=dtype).rows
    of = {part: row.weight_bytes for part, row in rows.items()}
    trained = [tensor for tensor in tensor_bytes(config, dtype) if tensor.trained]
    local = {tensor.name: tensor.local(expert_parallel) for tensor in trained}
    dense = sum(local[tensor.name] for tensor in trained if not tensor.experts)
    of_experts = sum(local.values()) - dense
    owned = -(-dense // world_size) + -(-of_experts // (world_size // expert_parallel))
    each = sum(local[tensor.name] * tensor.itemsize for tensor in trained if _is_reached(tensor.name, config))
    accumulated = ITEM_BYTES[ds_config["data_types"]["grad_accum_dtype"]]
    if stage == 0:
        gradients = each
    elif stage == 1:
        whole = dtype == "bf16" and accumulated == FP32
        gradients = each + accumulated * (dense + of_experts if whole else owned)
    else:
        gradients = accumulated * owned
    zero, sent = ds_config["zero_optimization"], ITEM_BYTES[ds_config["communication_data_type"]]
    largest = max(local[tensor.name] * tensor.itemsize for tensor in trained)
    step = ADAM_TEMPORARIES * FP32 * owned
    if stage == 1 and sent != accumulated:  # the flat gradient of the largest group, in the communication dtype
        step = max(step, sent * dense)
    return RankBytes(
        weights=of[REST] + of.get(EXPERTS, 0) + config.vocab_size * (config.max_token_bytes + 2),
        quantized_base=of.get(BASES, 0),
        adapters=of.get(ADAPTERS, 0),
        gradients=gradients,
        optimizer=sum(-(-row.optimizer_bytes // world_size) for row in rows.values()),
        communication=0 if stage < 2 else 2 * sent * zero["reduce_bucket_size"] + largest,
        step=step,
    )


def _is_reached(name: str, config: LightningLMConfig) -> bool:
    """Whether training gives the parameter a gradient: it passes no memory, and an indexer needs its own loss."""
    return not (".memory." in name or (".indexer." in name and config.indexer_kl_weight == 0))


@dataclass(frozen=True)
class TensorBytes:
    """
    A parameter or persistent buffer of the whole model.

    Attributes:
        name: in memory. experts: rows of a stack of experts, 0 for anything else.
        itemsize: bytes of an element in a run.
    """

    name: str
    numel: int
    itemsize: int
    experts: int
    trained: bool

    def local(self, expert_parallel: int) -> int:
        """Elements on the rank with the most experts."""
        return self.numel // self.experts * -(-self.experts // expert_parallel) if self.experts else self.numel


def tensor_bytes(config: LightningLMConfig, dtype: str) -> tuple[TensorBytes, ...]:
    """Everything that a run of this model holds and saves, from the model built on the meta device."""
    return _tensor_bytes(json.dumps(config.to_dict(), sort_keys=True), dtype)


@lru_cache(maxsize=16)
def _tensor_bytes(config_json: str, dtype: str) -> tuple[TensorBytes, ...]:
    with torch.device("meta"):
        model = LightningLMForCausalLM(LightningLMConfig.from_dict(json.loads(config_json)))
    parameters = dict(model.named_parameters())
    keeps_fp32 = re.compile("|".join(model._keep_in_fp32_modules_strict))
    found = []
    for name, tensor in model.state_dict().items():
        parameter = parameters.get(name)
        shrinks = dtype == "bf16" and parameter is not None and not keeps_fp32.search(name)
        found.append(
            TensorBytes(
                name,
                tensor.numel(),
                ITEM_BYTES["bf16"] if shrinks else tensor.element_size(),
                tensor.shape[0] if is_stacked(name) else 0,
                parameter is not None and parameter.requires_grad,
            )
        )
    return tuple(found)


def checkpoint_bytes(config: LightningLMConfig, dtype: str, moments: bool = True) -> int:
    """Bytes of one checkpoint's tensors (docs/checkpoints.md). moments: with the optimizer's state."""
    total = 0
    for tensor in tensor_bytes(config, dtype):
        parts = 2 + (tensor.itemsize != FP32) if moments and tensor.trained else 0  # a fp32 weight is its own master
        total += tensor.numel * (tensor.itemsize + FP32 * parts)
    return total
