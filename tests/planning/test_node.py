"""A machine that a stage does not fit is refused before anything is loaded, with what would fit."""

from pathlib import Path

import pytest

import launch.lineage
import launch.stage
from growth.grown_config import grown_configs
from lightninglm.planning.devices import GIB
from lightninglm.planning.node import Machine, NodeTooSmallError, check_machine, needed_on
from lightninglm.planning.plan import Setting
from lightninglm.planning.stages import load_stages
from lightninglm.recipe import load_recipe
from lightninglm.training.prepare import stage_config

RECIPES = Path(__file__).parents[2] / "recipes"


def setting(file: str) -> dict[str, Setting]:
    ((stage,), ranks) = load_stages(RECIPES / file, grown_configs)
    return {stage.recipe.name: Setting.of(stage, ranks)}


def test_the_limit_is_what_the_stage_needs():
    settings = setting("preserving/3-moe-5b.yaml")
    needed = needed_on(settings["moe-5b"], Machine(8, 80)) / GIB
    check_machine(settings, 8, Machine(8, needed))
    with pytest.raises(NodeTooSmallError, match=r"stage 'moe-5b' needs .* fits with train.micro_batch=2"):
        check_machine(settings, 8, Machine(8, needed - 0.01))
    with pytest.raises(NodeTooSmallError, match="nothing here makes it fit: more or larger GPUs"):
        check_machine(settings, 8, Machine(8, 10))
    assert needed_on(settings["moe-5b"], Machine(0, 80)) / GIB == pytest.approx(needed - 1.5)  # no CUDA context


def test_too_few_gpus_are_refused():
    with pytest.raises(NodeTooSmallError, match="8 ranks need 8 GPUs, this node has 4: --num-gpus 4"):
        check_machine(setting("preserving/1-seed-2b.yaml"), 8, Machine(4, 80))


def test_a_lineage_is_refused_before_its_run_folder_exists(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(launch.lineage, "rank_memory", lambda ranks: 0.25)
    monkeypatch.setattr(launch.lineage, "run_lineage", lambda *args, **options: 0 if not options["memory_check"] else 9)
    arguments = [str(RECIPES / "tiny"), "--run", str(tmp_path / "run")]
    assert launch.lineage.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: stage 'seed' needs ") and "--no-memory-check" in error
    assert not (tmp_path / "run").exists()
    assert launch.lineage.main([*arguments, "--no-memory-check"]) == 0


def test_a_stage_is_refused_by_the_model_that_it_is_about_to_train(monkeypatch, tmp_path):
    recipe = load_recipe(RECIPES / "tiny/1-seed.yaml")
    assert stage_config(recipe, tmp_path, grown_configs).hidden_size == 64
    assert stage_config(load_recipe(RECIPES / "tiny/2-moe.yaml"), tmp_path, grown_configs) is None  # no parent yet
    monkeypatch.setattr(launch.stage, "rank_memory", lambda ranks: 0.25)
    with pytest.raises(NodeTooSmallError, match=r"stage 'seed' needs .* each of 1 CPU ranks has 0.2"):
        launch.stage._check_machine(recipe, tmp_path)
