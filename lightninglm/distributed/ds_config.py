"""Reads a DeepSpeed JSON for a recipe: `"auto"` values filled in, unknown or contradictory keys refused.

DeepSpeed itself accepts an unknown key at most levels without a word (`gradient_cliping: 0.5` leaves the clip at its
default), and some accepted combinations train wrongly. Here every key is known, every key that matters is stated.
"""

import difflib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel, ValidationError

AUTO = "auto"

REFUSED = {
    "scheduler": "DeepSpeed's schedulers set one learning rate for all groups; use `schedule` of the recipe",
    "fp16": "train in bf16 or fp32 (`train.dtype` of the recipe)",
    "amp": "train in bf16 or fp32 (`train.dtype` of the recipe)",
    "torch_autocast": "the layers choose their precision themselves; use bf16",
    "activation_checkpointing": "use `stack_backend` of the model, the stack rebuilds its activations itself",
    "expert_parallel": "use `train.expert_parallel` of the recipe",
    "use_data_before_expert_parallelism": "expert-parallel ranks are consecutive ranks",
    "managed_gradient_accumulation": "the training loop relies on DeepSpeed counting the micro-batches",
    "data_types.param_dtype": "use `train.dtype` of the recipe",
    "data_types.buffer_dtype": "buffers keep their dtype, balance biases and scales are fp32",
    "zero_optimization.elastic_checkpoint": "checkpoints are read on any number of ranks as they are",
    **{
        f"zero_optimization.{key}": "the state of the optimizer is not read or written in this layout"
        for key in ("zero_hpz_partition_size", "mics_shard_size", "mics_hierarchical_params_gather", "zenflow")
    },
    **{
        f"zero_optimization.{key}": "weights and gradients travel between ranks as they are"
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    },
}
"""Keys that DeepSpeed knows and this project does not take, each with what to use instead."""

REQUIRED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print", "communication_data_type", "zero_allow_untested_optimizer", "optimizer.type",
    "optimizer.params", "bf16.enabled", "bf16.check_grad_overflow", "data_types.grad_accum_dtype",
    "zero_optimization.stage",
)  # fmt: skip
REQUIRED_BY_STAGE = {
    0: (),
    1: ("contiguous_gradients", "reduce_scatter", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size"),
    2: ("contiguous_gradients", "reduce_scatter", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size"),
    3: (
        "contiguous_gradients", "overlap_comm", "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    ),
}  # fmt: skip

OBJECTS = ("optimizer", "optimizer.params", "bf16", "data_types", "zero_optimization")
FLAGS = (
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_allgather", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)  # fmt: skip
OF_STAGE_3 = ("stage3_", "offload_param", "sub_group_size")  # how keys that only stage 3 reads begin


class DsConfigError(ValueError):
    """A DeepSpeed JSON that cannot be used: the file, the key, what was found and what is valid."""


def load_ds_config(
    path: str | Path,
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    dtype: str,
    optimizer: Mapping[str, Any],
    gradient_clipping: float | None = None,
    expert_parallel: int = 1,
) -> dict[str, Any]:
    """
    The DeepSpeed configuration of one run, complete and checked.

    Args:
        path: a JSON of `ds_configs/`. A value `"auto"` is taken from the arguments; a stated value that differs from
            them is an error, because the recipe and the JSON would contradict each other.
        micro_batch: sequences per rank in one forward pass.
        accumulation: forward passes per optimizer step.
        world_size: ranks.
        dtype: `"fp32"` or `"bf16"`, of parameters and gradients in memory (master weights are fp32).
        optimizer: hyperparameters for `optimizer.params`, by their names there (lr, betas, eps, weight_decay).
        gradient_clipping: largest gradient norm, 0 for no clipping. None: as the JSON says.
        expert_parallel: ranks that share one set of experts.
    Raises:
        DsConfigError: a key that is unknown, missing, contradicts the recipe or is known to train wrongly.
    """
    if dtype not in ("fp32", "bf16"):
        raise DsConfigError(f"dtype {dtype!r}: must be 'fp32' or 'bf16'")
    config = _read(Path(path))
    try:
        _check_keys(config)
        from_recipe = {
            "train_batch_size": micro_batch * accumulation * world_size,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "communication_data_type": dtype,
            "bf16.enabled": dtype == "bf16",
            "data_types.grad_accum_dtype": "fp32",
            **{f"optimizer.params.{name}": value for name, value in optimizer.items()},
        }
        if gradient_clipping is not None:
            from_recipe["gradient_clipping"] = gradient_clipping
        _fill(config, from_recipe)
        _check_keys(config)  # the recipe may have added a hyperparameter that the optimizer does not take
        _check_values(config, expert_parallel)
    except DsConfigError as error:
        raise DsConfigError(f"{path}: {error}") from error.__cause__
    return config


def _read(path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise DsConfigError(f"{path}: {next(n for n in names if names.count(n) > 1)!r} is stated twice")
        return found

    if not path.is_file():
        raise DsConfigError(f"{path}: no such file; ds_configs/ holds zero0.json to zero3.json")
    try:
        config = json.loads(path.read_text(), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise DsConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise DsConfigError(f"{path}: must be a JSON object")
    return config


def _field_names(model: type[BaseModel]) -> set[str]:
    """The names a DeepSpeed section takes in JSON, deprecated ones left out."""
    current = {n: f for n, f in model.model_fields.items() if not (f.json_schema_extra or {}).get("deprecated")}
    return {field.alias or name for name, field in current.items()}


def _known_keys(section: str, config: Mapping[str, Any]) -> set[str]:
    match section:
        case "":
            return {key.split(".")[0] for key in REQUIRED} | {
                "prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown", "memory_breakdown",
                "dump_state", "disable_allgather", "zero_force_ds_cpu_optimizer",
            }  # fmt: skip
        case "optimizer":
            return {"type", "params"}
        case "optimizer.params":
            name = config["optimizer"].get("type")
            optimizers = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
            if name not in optimizers:
                raise DsConfigError(f"optimizer.type = {name!r}: must be one of {sorted(optimizers)}")
            names = set(inspect.signature(optimizers[name]).parameters) - {"params"}
            return names | {"torch_adam", "adam_w_mode"} if name.startswith("Adam") else names
        case "bf16":
            return _field_names(DeepSpeedBF16Config)
        case "data_types":
            return {"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}
        case "zero_optimization":
            return _field_names(DeepSpeedZeroConfig)
        case "zero_optimization.offload_optimizer":
            return _field_names(DeepSpeedZeroOffloadOptimizerConfig)
        case "zero_optimization.offload_param":
            return _field_names(DeepSpeedZeroOffloadParamConfig)
    raise DsConfigError(f"{section} = {_get(config, section)!r}: takes a value, not an object")


def _check_keys(config: dict[str, Any], section: str = "") -> None:
    """Refuses a key that DeepSpeed would ignore; names the nearest one that it knows."""
    here = _get(config, section) if section else config
    known = _known_keys(section, config)
    for key, value in here.items():
        dotted = f"{section}.{key}" if section else key
        if dotted in REFUSED:
            raise DsConfigError(f"{dotted}: not used here; {REFUSED[dotted]}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(sorted(known))}"
            raise DsConfigError(f"{dotted}: unknown key; {hint}")
        if isinstance(value, dict):
            _check_keys(config, dotted)
        elif dotted in OBJECTS:
            raise DsConfigError(f"{dotted} = {value!r}: must be an object")
    if not section:
        for dotted in REQUIRED:
            _get(config, dotted)
        stage = config["zero_optimization"]["stage"]
        if type(stage) is not int or stage not in REQUIRED_BY_STAGE:
            raise DsConfigError(f"zero_optimization.stage = {stage!r}: must be 0, 1, 2 or 3")
        for key in REQUIRED_BY_STAGE[stage]:
            _get(config, f"zero_optimization.{key}")
        unread = [key for key in config["zero_optimization"] if stage < 3 and key.startswith(OF_STAGE_3)]
        if unread:
            raise DsConfigError(f"zero_optimization.{unread[0]}: only stage 3 reads it, and this is stage {stage}")


def _get(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise DsConfigError(f"{dotted}: missing; every key that matters is stated, DeepSpeed's defaults change")
        value = value[name]
    return value


def _fill(config: dict[str, Any], from_recipe: Mapping[str, Any]) -> None:
    """Replaces each "auto" by the recipe's value and refuses a stated value that differs from it."""
    for dotted, value in from_recipe.items():
        *sections, key = dotted.split(".")
        parent = _get(config, ".".join(sections)) if sections else config
        if parent.get(key, AUTO) == AUTO:
            parent[key] = value
        elif parent[key] != value and dotted != "data_types.grad_accum_dtype":
            raise DsConfigError(
                f"{dotted} = {parent[key]!r} contradicts {value!r} of the recipe; state {AUTO!r} or change one"
            )

    def unfilled(section: Mapping[str, Any], prefix: str) -> None:
        for key, value in section.items():
            if isinstance(value, Mapping):
                unfilled(value, f"{prefix}{key}.")
            elif value == AUTO and key != "keep_in_fp32_modules":
                raise DsConfigError(f"{prefix}{key} = {AUTO!r}: the recipe has no value for it; state one")

    unfilled(config, "")


def _check_values(config: dict[str, Any], expert_parallel: int) -> None:
    """Refuses combinations that DeepSpeed runs and that train wrongly, or that fail only after minutes."""
    zero = config["zero_optimization"]
    for section, model in (("zero_optimization", DeepSpeedZeroConfig), ("bf16", DeepSpeedBF16Config)):
        try:
            model(**config[section])
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join([section, *map(str, first["loc"])])
            raise DsConfigError(f"{key} = {first['input']!r}: {first['msg']}") from error
    stage, bf16 = zero["stage"], config["bf16"]["enabled"]
    clip, optimizer = config["gradient_clipping"], config["optimizer"]
    accumulators = ("fp32", "bf16") if bf16 else ("fp32",)
    rules = [
        *((flag, type(config.get(flag, False)) is bool, "must be true or false") for flag in FLAGS),
        ("gradient_clipping", type(clip) in (int, float) and clip >= 0, "must be a number, 0 for no clipping"),
        (
            "zero_optimization.stage",
            not (stage == 0 and bf16),
            "ZeRO 0 keeps no fp32 master weights for bf16; use stage 1 or 2",
        ),
        (
            "zero_optimization.stage",
            not (stage == 3 and expert_parallel > 1),
            f"parameters cannot be partitioned together with expert_parallel = {expert_parallel}; use 0, 1 or 2",
        ),
        (
            "zero_optimization.stage",
            not (stage == 3 and bf16),
            "ZeRO 3 gathers parameters of one dtype, and this model keeps some in fp32 in a bf16 run; use stage 1 or 2",
        ),
        (
            "zero_optimization.contiguous_gradients",
            stage == 0 or zero["contiguous_gradients"] is True,
            "must be true, without it expert gradients are averaged over the wrong ranks",
        ),
        (
            "zero_optimization.reduce_scatter",
            stage in (0, 3) or zero["reduce_scatter"] is True,
            "must be true, expert gradients need it",
        ),
        (
            "prescale_gradients",
            config.get("prescale_gradients", False) is False,
            "must be false, gradients are averaged after they are summed",
        ),
        (
            "gradient_predivide_factor",
            config.get("gradient_predivide_factor", 1.0) == 1,
            "must be 1.0, gradients are averaged after they are summed",
        ),
        *(
            (
                f"bf16.{key}",
                config["bf16"].get(key, False) is False,
                "must be false, master copies and moments are fp32",
            )
            for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
        ),
        (
            "bf16.check_grad_overflow",
            config["bf16"]["check_grad_overflow"] is True,
            "must be true, a step with a non-finite gradient is skipped on all ranks",
        ),
        (
            "data_types.grad_accum_dtype",
            config["data_types"]["grad_accum_dtype"] in accumulators,
            f"must be one of {accumulators}",
        ),
        (
            "data_types.keep_in_fp32_modules",
            not bf16 or config["data_types"].get("keep_in_fp32_modules") == AUTO,
            f"must be {AUTO!r} in bf16, the model knows which parameters stay in fp32",
        ),
        (
            "optimizer.params.adam_w_mode",
            optimizer["params"].get("adam_w_mode", optimizer["type"] == "AdamW") is (optimizer["type"] == "AdamW"),
            "must be true for AdamW and false for Adam",
        ),
        (
            "optimizer.params.torch_adam",
            optimizer["type"] == "SGD" or torch.cuda.is_available() or optimizer["params"].get("torch_adam") is True,
            "must be true without a GPU, DeepSpeed compiles its own Adam otherwise",
        ),
    ]
    for dotted, valid, rule in rules:
        if not valid:
            raise DsConfigError(f"{dotted} = {_get(config, dotted)!r}: {rule}")
