"""Names and shapes of every tensor that a checkpoint of a given configuration holds, taken from the model itself.

The model is built on the meta device (no memory, no values), so the table cannot forget a tensor that the model has.
Experts,
stacked in memory, appear as on disk: one tensor per expert.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from lightninglm.checkpoint import TensorInfo, is_stacked, to_disk_name
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM


@dataclass(frozen=True)
class TensorSpec:
    """
    One tensor on disk.

    shape, dtype: in a fp32 model; a checkpoint of a bf16 run stores most parameters in bf16.
    memory_name: the parameter or buffer of the model that it is, or is one row of.
    trainable: whether the optimizer keeps state for it.
    fixed_dtype: it has `dtype` in a bf16 run too: buffers, and the parameters that the model keeps in fp32 (routers,
        ...).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory_name: str
    trainable: bool
    fixed_dtype: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def tensor_table(config: LightningLMConfig) -> dict[str, TensorSpec]:
    """{name on disk: TensorSpec} of `LightningLMForCausalLM(config)`, in the order of its state dict."""
    return _tensor_table(json.dumps(config.to_dict(), sort_keys=True))


@lru_cache(maxsize=4)
def _tensor_table(config_json: str) -> dict[str, TensorSpec]:
    config = LightningLMConfig.from_dict(json.loads(config_json))
    with torch.device("meta"):
        model = LightningLMForCausalLM(config)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = {name for name, _ in model.named_parameters()}
    keeps_fp32 = re.compile("|".join(model._keep_in_fp32_modules_strict))
    table = {}
    for name, tensor in model.state_dict().items():
        fixed = name not in parameters or keeps_fp32.search(name) is not None
        if is_stacked(name):
            spec = TensorSpec(tuple(tensor.shape[1:]), tensor.dtype, name, name in trainable, fixed)
            table |= {to_disk_name(name, expert): spec for expert in range(tensor.shape[0])}
        else:
            table[name] = TensorSpec(tuple(tensor.shape), tensor.dtype, name, name in trainable, fixed)
    return table


def table_problems(stored: Mapping[str, TensorInfo], config: LightningLMConfig) -> list[tuple[str, str, str]]:
    """(tensor, found, expected) of every stored weight that is not what a model of `config` holds."""
    table = tensor_table(config)
    problems = [(name, "missing", "a tensor of the model of config.json") for name in table if name not in stored]
    problems += [(name, "a tensor unknown to the model of config.json", "none") for name in stored if name not in table]
    for name in table.keys() & stored.keys():
        spec, info = table[name], stored[name]
        if info.shape != spec.shape:
            problems.append((name, f"shape {info.shape}", f"shape {spec.shape}"))
        elif info.dtype != spec.dtype if spec.fixed_dtype else not info.dtype.is_floating_point:
            problems.append((name, str(info.dtype), str(spec.dtype)))
    return sorted(problems)
