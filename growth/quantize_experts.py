"""quantize_experts: the routed experts are frozen as integer codes, and low-rank adapters take over the training.

The adapters start at A = 0 (or, with residual_init, at the closest rank-r matrix to the quantization error), so only
that error changes the function. The frozen base has no optimizer state any more; the adapters' starts fresh; all else
is carried.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from growth.errors import GrowthError
from growth.operator import OperatorOptions, Origin, Plan, Source, copied, fill, split_expert, split_ffn, target_config
from growth.tensor_table import TensorSpec
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.quantized_experts import quantize_expert, shared_tensors

TOLERANCES = {"int8": 5e-2, "int4": 0.5, "codebook": 0.2}
"""Relative logit difference that each kind declares; the receipt says what it was."""


class QuantizeExpertsOptions(OperatorOptions):
    """
    kind: int8 or int4 codes with a scale per group, or the published codebook (docs/model.md, quantized experts).
    rank: of the adapters. group_size: weights that share a scale.
    quantization_seed: of the random rotation and of the adapters; by default the growth's seed.
    residual_init: start the adapters at the quantization error's best rank-r approximation instead of at zero.
    """

    kind: Literal["int8", "int4", "codebook"] = "int8"
    rank: Annotated[int, Field(ge=1)] = 16
    group_size: Annotated[int, Field(ge=2)] = 128
    quantization_seed: int | None = None
    residual_init: bool = False

    @property
    def strategy(self) -> str:
        """What the receipt calls this way of quantizing."""
        return f"{self.kind}, residual adapters" if self.residual_init else self.kind


def plan(source: Source, options: QuantizeExpertsOptions, seed: int) -> Plan:
    if source.config.num_experts == 0:
        raise GrowthError("quantize_experts needs a mixture of experts; the source is dense")
    if source.config.expert_quantization is not None:
        raise GrowthError(
            f"the source's experts are quantized already: {source.config.expert_quantization}; "
            "quantize what `python -m growth merge_experts` makes of them"
        )
    quantization = {
        "kind": options.kind,
        "group_size": options.group_size,
        "rank": options.rank,
        "seed": seed if options.quantization_seed is None else options.quantization_seed,
    }
    config = target_config(source, expert_quantization=quantization)
    quantizer = _Quantizer(config, options.residual_init)

    def origin_of(name: str, spec: TensorSpec) -> Origin | None:
        ffn = split_ffn(name)
        if ffn is None or not ffn[1].startswith("experts."):
            return copied(name)
        block, rest = ffn
        if split_expert(rest) is None:  # signs and levels that all experts of a layer share
            return Origin("initial", value=lambda: quantizer.shared(block)[rest.removeprefix("experts.")])
        expert, matrix, part = split_expert(rest)
        adapter = "derived" if options.residual_init else "initial"
        return Origin(
            "quantized" if part in ("codes", "scales") else adapter,
            (f"{block}.experts.{expert}.{matrix}.weight",),
            lambda weight: quantizer.quantize(weight, block, expert, matrix)[part],
        )

    return Plan(
        config,
        fill(config, origin_of),
        tolerance=TOLERANCES[options.kind],
        measurements=quantizer.snr,
    )


class _Quantizer:
    """Quantizes one matrix at a time and keeps the last result, because four target tensors come from it."""

    def __init__(self, config: LightningLMConfig, residual_init: bool):
        self.config, self.residual_init = config, residual_init
        self.snr: dict[str, float | None] = {}
        self._shared: dict[str, Mapping[str, Tensor]] = {}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def shared(self, block: str) -> Mapping[str, Tensor]:
        """The tensors that all experts of a block share."""
        if block not in self._shared:
            self._shared[block] = shared_tensors(self.config, self._layer_idx(block))
        return self._shared[block]

    def quantize(self, weight: Tensor, block: str, expert: int, matrix: str) -> dict[str, Tensor]:
        """{"codes", "scales", "A", "B"} of one matrix."""
        name = f"{block}.experts.{expert}.{matrix}"
        if self._last[0] != name:
            try:
                tensors, snr = quantize_expert(
                    {matrix: weight},
                    self.shared(block),
                    self.config,
                    layer_idx=self._layer_idx(block),
                    expert=expert,
                    residual_init=self.residual_init,
                )
            except ValueError as error:
                raise GrowthError(f"{name}: {error}") from error
            self.snr[name] = snr[matrix] if math.isfinite(snr[matrix]) else None  # None: without error
            self._last = (name, {key.partition(".")[2]: tensor for key, tensor in tensors.items()})
        return self._last[1]

    def _layer_idx(self, block: str) -> int:
        """Number of the layer; the second-token layer counts behind the last one."""
        parts = block.split(".")
        return int(parts[2]) if parts[0] == "model" else self.config.num_hidden_layers
