"""A DeepSpeed JSON is complete, says what the recipe says, and a misspelt or contradictory key never reaches a rank."""

import json
from pathlib import Path

import pytest

from lightninglm.distributed.ds_config import DsConfigError, load_ds_config

FOLDER = Path(__file__).parents[2] / "ds_configs"
DS_CONFIGS = sorted(FOLDER.glob("*.json"))
RECIPE = {
    "micro_batch": 2,
    "accumulation": 4,
    "world_size": 2,
    "dtype": "fp32",
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.1},
    "gradient_clipping": 1.0,
}


@pytest.fixture
def edited(tmp_path):
    """Writes zero1.json with dotted keys set (None: removed) and returns its path."""

    def edit(changes):
        config = json.loads((FOLDER / "zero1.json").read_text())
        for dotted, value in changes.items():
            *sections, key = dotted.split(".")
            parent = config
            for name in sections:
                parent = parent[name]
            if value is None:
                del parent[key]
            else:
                parent[key] = value
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(config))
        return path

    return edit


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_our_configs_take_every_open_value_from_the_recipe(path):
    config = load_ds_config(path, **RECIPE)
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 1.0
    assert config["optimizer"]["params"]["eps"] == 1e-10
    assert config["bf16"]["enabled"] is False
    assert config["zero_optimization"]["stage"] == int(path.stem[-1])


@pytest.mark.parametrize("path", DS_CONFIGS[1:3], ids=lambda path: path.stem)
def test_bf16_turns_on_bf16_and_keeps_fp32_accumulation(path):
    config = load_ds_config(path, **RECIPE | {"dtype": "bf16"})
    assert config["bf16"]["enabled"] is True
    assert config["communication_data_type"] == "bf16"
    assert config["data_types"]["grad_accum_dtype"] == "fp32"


@pytest.mark.parametrize(
    ("misspelt", "value", "nearest"),
    [
        ("gradient_cliping", 0.5, "gradient_clipping"),
        ("zero_optimisation", {"stage": 2}, "zero_optimization"),
        ("zero_optimization.reduce_buckt_size", 5, "reduce_bucket_size"),
        ("zero_optimization.stage3_max_live_parameter", 5, "stage3_max_live_parameters"),
        ("data_types.grad_acum_dtype", "fp32", "grad_accum_dtype"),
        ("optimizer.parms", {"lr": 1.0}, "params"),
        ("optimizer.params.weight_decey", 0.1, "weight_decay"),
        ("bf16.enable", True, "enabled"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_name(edited, misspelt, value, nearest):
    with pytest.raises(DsConfigError, match=rf"edited\.json: {misspelt}: unknown key; did you mean '{nearest}'"):
        load_ds_config(edited({misspelt: value}), **RECIPE)


@pytest.mark.parametrize(
    "key",
    [
        "gradient_clipping",
        "bf16.check_grad_overflow",
        "data_types.grad_accum_dtype",
        "zero_optimization.contiguous_gradients",
        "zero_optimization",
        "optimizer",
    ],
)
def test_a_key_whose_default_matters_must_be_stated(edited, key):
    with pytest.raises(DsConfigError, match=rf"edited\.json: {key}.*: missing"):
        load_ds_config(edited({key: None}), **RECIPE)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train_batch_size", 32, "contradicts 16 of the recipe"),
        ("gradient_accumulation_steps", 1, "contradicts 4 of the recipe"),
        ("gradient_clipping", 0.5, "contradicts 1.0 of the recipe"),
        ("optimizer.params.lr", 1.0, "contradicts 0.001 of the recipe"),
        ("bf16.enabled", True, "contradicts False of the recipe"),
        ("zero_optimization.stage", "1", "must be 0, 1, 2 or 3"),
        ("zero_optimization.stage", 4, "must be 0, 1, 2 or 3"),
        ("zero_optimization.contiguous_gradients", False, "wrong ranks"),
        ("zero_optimization.reduce_scatter", False, "must be true"),
        ("zero_optimization.reduce_bucket_size", -1, "greater than 0"),
        ("optimizer.type", "AdamWW", r"must be one of \['Adam', 'AdamW', 'SGD'\]"),
        ("optimizer.params.torch_adam", False, "must be true without a GPU"),
        ("scheduler", {"type": "WarmupLR", "params": {}}, "use `schedule` of the recipe"),
        ("fp16", {"enabled": True}, "train.dtype"),
        ("steps_per_print", {"every": 3}, "takes a value, not an object"),
        ("zero_optimization", "stage 2", r"zero_optimization = 'stage 2': must be an object"),
        ("optimizer.params", [1], r"optimizer\.params = \[1\]: must be an object"),
        ("memory_breakdown", "false", "must be true or false"),
        ("zero_optimization.stage3_max_live_parameters", 5, "only stage 3 reads it, and this is stage 1"),
        ("zero_optimization.offload_param", {"device": "cpu"}, "only stage 3 reads it, and this is stage 1"),
        ("zero_optimization.zero_quantized_gradients", True, "travel between ranks as they are"),
        ("zero_optimization.mics_shard_size", 2, "is not read or written in this layout"),
        ("prescale_gradients", True, "must be false"),
        ("gradient_predivide_factor", 2.0, "must be 1.0"),
        ("data_types.buffer_dtype", "bf16", "balance biases and scales are fp32"),
        ("bf16.bf16_optimizer_states", True, "moments are fp32"),
        ("optimizer.params.adam_w_mode", False, "must be true for AdamW"),
    ],
)
def test_a_contradiction_is_refused_and_says_what_is_valid(edited, key, value, said):
    with pytest.raises(DsConfigError, match=said):
        load_ds_config(edited({key: value}), **RECIPE)


def test_zero_3_and_expert_parallelism_exclude_each_other():
    with pytest.raises(DsConfigError, match="expert_parallel = 2; use 0, 1 or 2"):
        load_ds_config(FOLDER / "zero3.json", **RECIPE, expert_parallel=2)


@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_needs_zero_1_or_2(stage):
    with pytest.raises(DsConfigError, match="use stage 1 or 2"):
        load_ds_config(FOLDER / f"zero{stage}.json", **RECIPE | {"dtype": "bf16"})


def test_in_bf16_the_model_says_what_stays_in_fp32(edited):
    with pytest.raises(DsConfigError, match="keep_in_fp32_modules = \\[\\]: must be 'auto'"):
        load_ds_config(edited({"data_types.keep_in_fp32_modules": []}), **RECIPE | {"dtype": "bf16"})


def test_an_open_value_that_the_recipe_does_not_give_is_named():
    with pytest.raises(DsConfigError, match="gradient_clipping = 'auto': the recipe has no value"):
        load_ds_config(FOLDER / "zero1.json", **RECIPE | {"gradient_clipping": None})


def test_a_hyperparameter_that_the_optimizer_does_not_take_is_refused(edited):
    path = edited({"optimizer": {"type": "SGD", "params": {"lr": "auto"}}})
    with pytest.raises(DsConfigError, match=r"optimizer\.params\.betas: unknown key"):
        load_ds_config(path, **RECIPE)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON"), ("[]", "must be a JSON object"), ('{"bf16": {}, "bf16": {}}', "'bf16' is stated twice")],
)
def test_an_unreadable_file_is_named(tmp_path, text, said):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(DsConfigError, match=rf"broken\.json: .*{said}"):
        load_ds_config(path, **RECIPE)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DsConfigError, match="no such file"):
        load_ds_config(tmp_path / "none.json", **RECIPE)
