"""merge_experts: quantized experts and their adapters become dense experts again, exactly the matrices W + A B trained.

Nothing of the function changes but the rounding to the dtype in which the merged weights are stored. The moments of the
adapters say nothing about a dense weight: they are dropped, and the merged weights start with fresh ones. Quantizing
again is a step of its own, `quantize_experts`, with a measurement of its own.
"""

from typing import Literal

import torch
from torch import Tensor

from growth.errors import GrowthError
from growth.operator import OperatorOptions, Origin, Plan, Source, copied, fill, split_expert, split_ffn, target_config
from growth.tensor_table import TensorSpec
from lightninglm.modeling.quantized_experts import merge_expert, shared_tensors

PARTS = ("codes", "scales", "A", "B")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXACT_TOLERANCE, ROUNDED_TOLERANCE = 1e-5, 3e-2
"""Relative logit difference declared in fp32, and where bf16 rounds the merged weights or the source's adapters."""


class MergeExpertsOptions(OperatorOptions):
    """
    dtype: fp32 or bf16, of the merged weights on disk (a bf16 weight keeps its fp32 master copy).
    """

    dtype: Literal["fp32", "bf16"] = "fp32"

    @property
    def strategy(self) -> str:
        """What the receipt calls this way of merging."""
        return self.dtype


def plan(source: Source, options: MergeExpertsOptions, seed: int) -> Plan:
    if source.config.expert_quantization is None:
        raise GrowthError("merge_experts needs quantized experts with adapters; those of the source are not quantized")
    shared_names = tuple(shared_tensors(source.config, layer_idx=0))

    def origin_of(name: str, spec: TensorSpec) -> Origin | None:
        ffn = split_ffn(name)
        expert = split_expert(ffn[1]) if ffn else None
        if expert is None:
            return copied(name)
        index, matrix, _ = expert
        parts = tuple(f"{ffn[0]}.experts.{index}.{matrix}.{part}" for part in PARTS)
        shared = tuple(f"{ffn[0]}.experts.{shared_name}" for shared_name in shared_names)

        def merged(*tensors: Tensor) -> Tensor:
            own = {f"{matrix}.{part}": tensor for part, tensor in zip(PARTS, tensors, strict=False)}
            of_layer = dict(zip(shared_names, tensors[len(PARTS) :], strict=True))
            return merge_expert(own, of_layer, source.config)[matrix]

        return Origin("merged", parts + shared, merged, dtype=DTYPES[options.dtype])

    backend = source.config.experts_backend
    config = target_config(
        source, expert_quantization=None, experts_backend="auto" if backend == "triton" else backend
    )  # the kernel is for quantized weights alone
    rounded = torch.bfloat16 in (DTYPES[options.dtype], source.config.dtype)
    return Plan(config, fill(config, origin_of), tolerance=ROUNDED_TOLERANCE if rounded else EXACT_TOLERANCE)
