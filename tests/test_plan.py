"""Every recipe is valid, has the published sizes, and its plan says what it will need."""

import json
from pathlib import Path

import pytest

from growth.grown_config import grown_configs
from launch.plan import main
from lightninglm.modeling.presets import preset
from lightninglm.planning.plan import Node, Setting, parameters, plan_stage, smallest_change
from lightninglm.planning.schedule_plot import plot_schedule, schedule_points
from lightninglm.planning.stages import load_stages
from lightninglm.recipe import load_lineage

RECIPES = Path(__file__).parents[1] / "recipes"
FOLDERS = sorted(file.parent.name for file in RECIPES.glob("*/lineage.yaml"))
BIG = ("paper", "preserving")
EIGHT = Node(gpus=8, memory=80, price=2.0, utilisations=(0.3,))
# stored, active, stored and active with the second-token layer, by the stage that reaches the size
SIZES = {
    "paper": {
        "seed-2b": (1_490_253_946, 1_490_253_946, 1_653_102_772, 1_653_102_772),
        "moe-5b": (3_504_175_394, 1_692_236_066, 3_918_764_401, 1_880_332_657),
        "deep-9b-decay": (7_904_769_746, 3_374_921_426, 8_319_358_753, 3_563_018_017),
        "experts-120b-sft": (118_670_439_746, 5_927_548_226, 119_085_028_733, 6_241_473_917),
    },
    "preserving": {
        "seed-2b": (1_490_253_946, 1_490_253_946, 1_653_102_772, 1_653_102_772),
        "moe-5b": (3_504_175_226, 1_692_235_898, 3_918_764_212, 1_880_332_468),
        "deep-9b-decay": (7_904_769_326, 3_374_921_006, 8_319_358_312, 3_563_017_576),
        "experts-120b-sft": (118_672_078_126, 5_929_186_606, 119_086_667_112, 6_117_283_176),
    },
}


@pytest.fixture(scope="module")
def lineages():
    """Name of a big lineage -> its stages by name."""
    loaded = {name: load_stages(RECIPES / name, grown_configs) for name in BIG}
    assert all(world_size == 8 for _, world_size in loaded.values())
    return {name: {stage.recipe.name: stage for stage in stages} for name, (stages, _) in loaded.items()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_recipe_is_valid(folder):
    lineage = load_lineage(RECIPES / folder)
    listed = {file.name for file in lineage.files}
    assert listed == {file.name for file in (RECIPES / folder).glob("*.yaml")} - {"lineage.yaml"}
    for recipe in lineage.recipes:
        assert recipe.schedule.warmup_steps < recipe.total_steps


@pytest.mark.parametrize("name", BIG)
def test_stages_have_the_published_sizes(lineages, name):
    for stage, sizes in SIZES[name].items():
        counts = parameters(lineages[name][stage].config)
        keys = ("stored", "active", "stored_with_second_token", "active_with_second_token")
        assert tuple(counts[key] for key in keys) == sizes, stage
    assert counts["routed_weights"] == 20 * 460 * 3 * 4096 * 1024 == 115_762_790_400
    assert counts["adapters"] == 2_260_992_000
    assert counts["optimizer_ratio"] >= 45


@pytest.mark.parametrize(("name", "mode"), [("paper", "published"), ("preserving", "default")])
def test_growth_leads_to_the_presets(lineages, name, mode):
    """Of every stage's size, what growth made is what the preset says, but for what the recipe itself changes."""
    sizes = {"2b": "seed-2b", "5b": "moe-5b", "9b": "deep-9b-8k", "120b": "experts-120b-router"}
    chosen = {"rope_enabled", "expert_quantization", "max_position_embeddings"}
    for size, stage in sizes.items():
        grown, expected = lineages[name][stage].config.to_dict(), preset(f"lightninglm-{size}", mode).to_dict()
        differ = {key for key in grown if grown[key] != expected.get(key)} - chosen
        if mode == "published":
            differ -= {"num_null_experts", "null_renorm"} if size in ("2b", "120b") else set()
        assert not differ, (stage, {key: (grown[key], expected.get(key)) for key in differ})
        assert (grown["expert_quantization"] is not None) == (size == "120b")
    assert not lineages[name]["experts-120b-sft"].config.rope_enabled


@pytest.mark.parametrize("name", BIG)
def test_every_stage_fits_eight_gpus_of_80_gib(lineages, name):
    for stage in (lineages[name]["seed-2b"], lineages[name]["deep-9b-decay"], lineages[name]["experts-120b-router"]):
        plan = plan_stage(stage, EIGHT)
        assert plan["asked"]["fits"] and plan["asked"]["largest_micro_batch"] >= plan["schedule"]["micro_batch"]
        per_gpu, depths = plan["per_gpu"], plan["activations_by_depth"]
        assert per_gpu["peak"] <= per_gpu["needed"]
        assert per_gpu["activations"]["reversible"] < per_gpu["activations"]["plain"]
        if name == "preserving":
            assert depths["8"]["reversible"] == depths["20"]["reversible"] == depths["40"]["reversible"]
            assert per_gpu["activations"]["trained_with"] == per_gpu["activations"]["reversible"]
        assert depths["8"]["checkpointed"] < depths["40"]["checkpointed"]
        (row,) = plan["time"]["H100"]
        assert row["cost"] == pytest.approx(row["hours"] * 16)
        assert row["tokens_per_second"] * plan["flops_per_token"]["hardware"] == pytest.approx(0.3 * 8 * 989e12)
    between = 14 * 118_672_078_126 if name == "preserving" else 2 * 118_670_439_746  # bf16, and the optimizer's state
    assert plan["disk"]["growth"] == pytest.approx(between, rel=0.01)


def test_what_does_not_fit_is_told_the_smallest_change(lineages):
    setting = Setting.of(lineages["preserving"]["experts-120b-router"], 8)
    assert smallest_change(setting, 80) == []
    assert smallest_change(setting, 46) == ["quantize_experts with kind: int4"]
    assert smallest_change(setting, 20) is None
    setting = Setting.of(lineages["paper"]["experts-120b-router"], 8)
    assert smallest_change(setting, 60) == ["deepspeed=ds_configs/zero2.json"]
    setting = Setting.of(lineages["preserving"]["moe-5b"], 8)
    assert smallest_change(setting, 40) == ["train.micro_batch=2 (accumulation 2)"]


def test_schedules_meet_at_the_boundaries(lineages):
    stages = lineages["preserving"]
    rates = {name: [rate for _, rate in schedule_points(stage)] for name, stage in stages.items()}
    assert max(rates["seed-2b"]) == 1e-3 and rates["seed-2b"][-1] == pytest.approx(1e-4)
    assert rates["moe-5b-warmup"][0] == pytest.approx(1e-4, rel=0.02) and rates["moe-5b-warmup"][-1] == 5e-4
    assert rates["moe-5b"][0] == pytest.approx(5e-4) and rates["moe-5b"][-1] == pytest.approx(5e-5)
    assert rates["deep-9b-recovery"][0] == pytest.approx(2e-6, rel=0.02)
    assert rates["deep-9b-recovery"][-1] == rates["deep-9b-4k"][0] == rates["deep-9b-8k"][-1] == 5e-5
    assert rates["deep-9b-decay"][0] == pytest.approx(5e-5)
    assert rates["deep-9b-decay"][-1] == pytest.approx(5e-5 / 3, rel=1e-3)
    assert rates["experts-120b-router"][0] == pytest.approx(1e-5, rel=0.02)
    assert rates["experts-120b-sft"][-1] == pytest.approx(1e-6)


def test_the_schedule_is_drawn(lineages, tmp_path):
    plot_schedule(list(lineages["paper"].values()), tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_plans_a_lineage_or_one_of_its_stages(capsys, tmp_path):
    assert main([str(RECIPES / "tiny"), "--json", "--schedule", str(tmp_path / "schedule.png")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in plan["stages"]] == ["seed", "moe", "deep", "experts"]
    assert plan["gpus"] == 2 and plan["fits"] and (tmp_path / "schedule.png").exists()
    assert main([str(RECIPES / "tiny" / "3-deep.yaml"), "--json", "--gpus", "4", "--set", "train.micro_batch=4"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert stage["name"] == "deep" and stage["model"]["layers"] == 8
    assert main([str(RECIPES / "tiny")]) == 0
    printed = capsys.readouterr().out
    assert "Largest micro-batch that fits" in printed and f"{plan['stages'][0]['model']['stored']:,}" in printed


def test_the_command_refuses_what_cannot_run(capsys, tmp_path):
    assert main([str(RECIPES / "tiny"), "--gpu-memory", "1"]) == 1
    assert "nothing here makes it fit" in capsys.readouterr().out
    for arguments, message in (
        ([str(RECIPES / "none")], "no such file"),
        ([str(RECIPES / "tiny"), "--gpus", "3"], "train.global_batch = 16: must be a multiple"),
        ([str(RECIPES / "tiny"), "--set", "train.tokns=1"], "unknown key; did you mean tokens?"),
        ([str(RECIPES / "tiny"), "--set", "data.sequence_length=8192"], "data.sequence_length = 8192: above"),
        ([str(RECIPES / "tiny"), "--schedule", str(tmp_path / "none" / "schedule.png")], "schedule.png"),
        ([str(RECIPES / "preserving" / "1-seed-2b.yaml"), "--set", "deepspeed=ds_configs/zero3.json"], "stage = 3"),
    ):
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error, error
    alone = tmp_path / "2-moe.yaml"
    alone.write_text((RECIPES / "tiny" / "2-moe.yaml").read_text())
    assert main([str(alone)]) == 2
    for bad in (["--gpu-memory", "0"], ["--utilization", "1.5"], ["--gpu", "H1000"]):
        with pytest.raises(SystemExit) as error:
            main([str(RECIPES / "tiny"), *bad])
        assert error.value.code == 2
