"""The plan of a stage on a node: whether it fits and with which micro-batch, how long it takes, what it costs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from lightninglm.distributed.ds_config import load_ds_config
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.parameter_count import ParameterCount, count_parameters
from lightninglm.modeling.parameter_roles import ADAPTERS, role
from lightninglm.planning.activations import Activations, activation_bytes, stack_bytes
from lightninglm.planning.compute import training_flops
from lightninglm.planning.devices import DEVICES, GIB, OVERHEAD_BYTES, needed_bytes
from lightninglm.planning.memory import ITEM_BYTES, RankBytes, checkpoint_bytes, rank_bytes, tensor_bytes
from lightninglm.planning.stages import Stage
from lightninglm.recipe import Recipe

DEPTHS = (8, 20, 40)


@dataclass(frozen=True)
class Node:
    """
    What a plan is asked for.

    Attributes:
        gpus, memory: how many, and GiB of each.
        price: per GPU and hour, in any currency.
        utilisations: shares of a GPU's peak at which it executes a step, evaluations a second time included.
    """

    gpus: int
    memory: float
    price: float
    utilisations: tuple[float, ...]


@dataclass(frozen=True)
class Setting:
    """How one stage is trained on so many ranks: what a user may change without changing the model."""

    config: LightningLMConfig
    ds_file: Path
    length: int
    global_batch: int
    world_size: int
    micro_batch: int
    expert_parallel: int
    dtype: str

    @classmethod
    def of(cls, stage: Stage, world_size: int) -> "Setting":
        return cls.of_recipe(stage.recipe, stage.config, world_size)

    @classmethod
    def of_recipe(cls, recipe: Recipe, config: LightningLMConfig, world_size: int) -> "Setting":
        train = recipe.train
        return cls(
            config,
            recipe.deepspeed_file,
            recipe.data.sequence_length,
            train.global_batch,
            world_size,
            train.micro_batch,
            train.expert_parallel,
            train.dtype,
        )

    def ds_config(self) -> dict[str, Any]:
        """The DeepSpeed configuration. Raises DsConfigError when it cannot be used like this."""
        return load_ds_config(
            self.ds_file,
            micro_batch=self.micro_batch,
            accumulation=self.global_batch // (self.micro_batch * self.world_size),
            world_size=self.world_size,
            dtype=self.dtype,
            optimizer={"lr": 0.0, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
            gradient_clipping=1.0,
            expert_parallel=self.expert_parallel,
        )

    def state(self) -> RankBytes:
        """Bytes of the rank with the most experts, whatever the micro-batch."""
        return rank_bytes(
            self.config,
            self.ds_config(),
            world_size=self.world_size,
            expert_parallel=self.expert_parallel,
            dtype=self.dtype,
        )

    def activations(self) -> Activations:
        """Bytes of one micro-batch."""
        c = ITEM_BYTES[self.dtype]
        return activation_bytes(self.config, c, self.length, self.micro_batch, self.expert_parallel)

    def micro_batches(self) -> list[int]:
        """Micro-batches that the ranks can divide the batch into, ascending."""
        each = self.global_batch // self.world_size
        return [n for n in range(1, each + 1) if self.global_batch % (n * self.world_size) == 0]


def peak_bytes(state: RankBytes, activations: Activations) -> int:
    """The most that is allocated in a step: in a backward pass, or while gradients are reduced and Adam steps."""
    return state.kept + max(activations.peak, state.step)


def largest_micro_batch(setting: Setting, state: RankBytes, memory: float) -> int | None:
    """The largest micro-batch that fits GPUs of `memory` GiB; None when none does."""
    fitting = [
        n
        for n in setting.micro_batches()
        if needed_bytes(peak_bytes(state, replace(setting, micro_batch=n).activations())) <= memory * GIB
    ]
    return max(fitting, default=None)


def smallest_change(setting: Setting, memory: float, overhead: int = OVERHEAD_BYTES) -> list[str] | None:
    """
    The fewest changes that make the stage fit `memory` GiB a rank: none needed is [], none possible is None.

    Tried in this order: a smaller micro-batch (accumulation makes up for it), ZeRO 2, experts over more ranks, 4 bits.
    """
    for changes, changed in sorted(_variants(setting), key=lambda variant: len(variant[0])):
        if needed_bytes(peak_bytes(changed.state(), changed.activations()), overhead) <= memory * GIB:
            return changes
    return None


def _variants(setting: Setting) -> Iterator[tuple[list[str], Setting]]:
    """(changes in words, changed setting), those with a larger micro-batch first."""
    smaller = [n for n in reversed(setting.micro_batches()) if n <= setting.micro_batch]
    ds_files = [setting.ds_file]
    if setting.ds_config()["zero_optimization"]["stage"] < 2:
        ds_files.append(setting.ds_file.with_name("zero2.json"))
    spread = [setting.expert_parallel]
    if setting.config.num_experts >= setting.world_size > setting.expert_parallel:
        spread.append(setting.world_size)
    quantization = setting.config.expert_quantization
    configs = [setting.config]
    if quantization is not None and quantization["kind"] != "int4":
        values = {**setting.config.to_dict(), "expert_quantization": {**quantization, "kind": "int4"}}
        configs.append(LightningLMConfig.from_dict(values))
    for config, expert_parallel, ds_file, micro_batch in product(configs, spread, ds_files, smaller):
        changed = replace(
            setting, config=config, expert_parallel=expert_parallel, ds_file=ds_file, micro_batch=micro_batch
        )
        accumulation = setting.global_batch // (micro_batch * setting.world_size)
        words = [
            (micro_batch != setting.micro_batch, f"train.micro_batch={micro_batch} (accumulation {accumulation})"),
            (ds_file != setting.ds_file, f"deepspeed=ds_configs/{ds_file.name}"),
            (expert_parallel != setting.expert_parallel, f"train.expert_parallel={expert_parallel}"),
            (config is not setting.config, "quantize_experts with kind: int4"),
        ]
        yield [text for differs, text in words if differs], changed


def plan_stage(stage: Stage, node: Node) -> dict[str, Any]:
    """Everything about one stage, as plain data; the keys are explained in docs/plan.md."""
    recipe, config, setting = stage.recipe, stage.config, Setting.of(stage, node.gpus)
    state, activations = setting.state(), setting.activations()
    peak = peak_bytes(state, activations)
    fits = needed_bytes(peak) <= node.memory * GIB
    flops = training_flops(config, recipe.data.sequence_length)
    steps = recipe.total_steps
    tokens = steps * recipe.train.global_batch * recipe.data.sequence_length
    return {
        "name": recipe.name,
        "file": str(stage.file),
        "model": parameters(config),
        "schedule": {
            "steps": steps,
            "tokens": tokens,
            "sequence_length": recipe.data.sequence_length,
            "global_batch": recipe.train.global_batch,
            "micro_batch": recipe.train.micro_batch,
            "accumulation": recipe.train.global_batch // (recipe.train.micro_batch * node.gpus),
            "expert_parallel": recipe.train.expert_parallel,
            "zero_stage": setting.ds_config()["zero_optimization"]["stage"],
            "dtype": recipe.train.dtype,
        },
        "per_gpu": {
            "weights": state.weights,
            "quantized_base": state.quantized_base,
            "adapters": state.adapters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "communication": state.communication,
            "optimizer_step": state.step,
            "activations": {
                "reversible": activations.reversible,
                "checkpointed": activations.checkpointed,
                "plain": activations.plain,
                "trained_with": activations.stack,
                "second_token": activations.second_token,
            },
            "dispatch": activations.dispatch,
            "loss": activations.loss,
            "peak": peak,
            "needed": needed_bytes(peak),
        },
        "activations_by_depth": activations_by_depth(setting),
        "fits": {
            name: {
                "fits": needed_bytes(peak) <= device.memory * GIB,
                "largest_micro_batch": largest_micro_batch(setting, state, device.memory),
            }
            for name, device in DEVICES.items()
        },
        "asked": {
            "gpu_memory_gib": node.memory,
            "fits": fits,
            "largest_micro_batch": largest_micro_batch(setting, state, node.memory),
            "smallest_change": [] if fits else smallest_change(setting, node.memory),
        },
        "flops_per_token": {"forward": flops.forward, "model": flops.model, "hardware": flops.hardware},
        "time": {
            name: _times(tokens, flops.hardware, device.peak_flops * node.gpus, node)
            for name, device in DEVICES.items()
        },
        "disk": disk(stage),
    }


def _times(tokens: int, flops_per_token: int, peak: float, node: Node) -> list[dict[str, float]]:
    """Speed, hours and cost of a stage at each utilisation of so many flops per second."""
    rows = []
    for utilisation in node.utilisations:
        speed = peak * utilisation / flops_per_token
        hours = tokens / speed / 3600
        cost = hours * node.gpus * node.price
        rows.append({"utilisation": utilisation, "tokens_per_second": speed, "hours": hours, "cost": cost})
    return rows


def parameters(config: LightningLMConfig) -> dict[str, Any]:
    """
    Counts of the modules, built on the meta device, without and with the second-token layer.

    Adapters of quantized experts are counted on their own, not in "stored" and "active".
    """

    values = config.to_dict() | {"expert_quantization": None}
    alone = _counted(values | {"num_nextn_predict_layers": 0})
    counts = {"stored": alone.stored, "active": alone.active}
    if config.num_nextn_predict_layers:
        whole = _counted(values)
        counts |= {"stored_with_second_token": whole.stored, "active_with_second_token": whole.active}
    counts |= {"layers": config.num_hidden_layers, "experts": config.num_experts}
    if config.num_experts:
        counts["experts_per_token"] = config.num_experts_per_tok
        counts["routed_weights"] = alone.blocks["routed_experts"]
    if config.expert_quantization is not None:
        tensors = [tensor for tensor in tensor_bytes(config, "bf16") if role(tensor.name) == ADAPTERS]
        adapters = sum(tensor.numel for tensor in tensors if not tensor.name.startswith("mtp."))
        counts["adapters"] = adapters
        counts["active_adapters"] = adapters // config.num_experts * config.num_experts_per_tok
        counts["optimizer_ratio"] = counts["routed_weights"] / adapters
    return counts


def _counted(values: dict[str, Any]) -> ParameterCount:
    return _counted_json(json.dumps(values, sort_keys=True))


@lru_cache(maxsize=16)
def _counted_json(config_json: str) -> ParameterCount:
    return count_parameters(LightningLMConfig.from_dict(json.loads(config_json)))


def activations_by_depth(setting: Setting) -> dict[str, dict[str, int]]:
    """The stack's peak if the model had 8, 20 or 40 layers of the same pattern; all else equal."""
    config, types, rows = setting.config, setting.config.layer_types, {}
    for depth in DEPTHS:
        values = config.to_dict() | {
            "num_hidden_layers": depth,
            "layer_types": [types[i % len(types)] for i in range(depth)],
            "step_sizes": None,
            "blends": [config.blends[-1]] * depth,
        }
        deep = LightningLMConfig.from_dict(values)
        c = ITEM_BYTES[setting.dtype]
        rows[str(depth)] = stack_bytes(deep, c, setting.length, setting.micro_batch, setting.expert_parallel)
    return rows


def disk(stage: Stage) -> dict[str, int]:
    """
    Bytes on disk: of one checkpoint, of the most that the stage has at once, and of what its growth needs in between.

    At most there are `checkpoint.keep` checkpoints and one being written; while a stage is grown, the results of all
    growth steps but the last lie beside the last one.
    """
    recipe = stage.recipe
    one = checkpoint_bytes(stage.config, recipe.train.dtype)
    moments = recipe.grow is None or recipe.grow.moments
    return {
        "checkpoint": one,
        "stage": (recipe.checkpoint.keep + 1) * one,
        "growth": sum(checkpoint_bytes(config, recipe.train.dtype, moments) for config in stage.in_between),
    }


def lineage_disk(stages: Sequence[Stage]) -> int:
    """The most bytes on disk with the checkpoints of all stages kept: one is being written, or a growth underway."""
    rows = [disk(stage) for stage in stages]
    kept = sum(stage.recipe.checkpoint.keep * row["checkpoint"] for stage, row in zip(stages, rows, strict=True))
    return kept + max(row["checkpoint"] + row["growth"] for row in rows)


def plan_lineage(stages: Sequence[Stage], node: Node) -> dict[str, Any]:
    """The plan of every stage, and their sums."""
    rows = [plan_stage(stage, node) for stage in stages]
    totals = {}
    for name in DEVICES:
        columns = zip(*(row["time"][name] for row in rows), strict=True)
        totals[name] = [
            {
                "utilisation": column[0]["utilisation"],
                "hours": sum(cell["hours"] for cell in column),
                "cost": sum(cell["cost"] for cell in column),
            }
            for column in columns
        ]
    return {
        "gpus": node.gpus,
        "gpu_memory_gib": node.memory,
        "price_per_gpu_hour": node.price,
        "stages": rows,
        "total": {
            "tokens": sum(row["schedule"]["tokens"] for row in rows),
            "time": totals,
            "disk": lineage_disk(stages),
        },
        "fits": all(row["asked"]["fits"] for row in rows),
    }
