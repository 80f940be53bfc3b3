"""Stages that train on without growing: longer sequences, no rotary embedding, warm-up from the last rate."""

import math
import shutil

import pytest
import yaml

from growth import core
from growth.chain import grow_chain
from lightninglm.checkpoint import CheckpointReader
from lightninglm.recipe import RecipeError, load_lineage, load_recipe
from lightninglm.training.metrics import read_metrics
from lightninglm.training.prepare import prepare_stage
from lightninglm.training.stage import run_stage
from tests.distributed.ranks import RankFailed, run_ranks
from tests.training.small_run import make_run

PEAK, STEPS = 3e-3, 8


def train(recipe, run):
    prepare_stage(recipe, run, grow_chain)
    return run_ranks(lambda rank, world_size: run_stage(recipe, run, accept_changes=True), 1)


def child(folder, file, name, source, schedule, **changes):
    """The recipe of a stage that goes on from another one with sequences twice as long."""
    values = yaml.safe_load(file.read_text())
    values |= {"name": name, "grow": {"from": source, "steps": []}, "schedule": schedule} | changes
    values["data"]["sequence_length"] = 64
    values["train"] |= {"tokens": STEPS * 4 * 64, "global_batch": 4}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def lineage(tmp_path_factory):
    """A seed, a stage of doubled context, and one that falls without rotary embedding: (run folder, recipe files)."""
    folder = tmp_path_factory.mktemp("lineage")
    run, seed = make_run(
        folder, train__tokens=STEPS * 8 * 32, schedule={"kind": "wsd", "stable_fraction": 0.5, "final_ratio": 0.25}
    )
    long = child(
        folder, seed, "long", "small", {"kind": "constant", "warmup_from": "last", "warmup_tokens": 700},
        model={"max_position_embeddings": 128},
    )  # fmt: skip
    bare = child(
        folder, seed, "bare", "long", {"kind": "cosine", "warmup_from": "last", "warmup_steps": 2},
        model={"rope_enabled": False}, optimizer={"lr": PEAK / 2, "groups": {"router": 2.0, "rest": 0.5}},
    )  # fmt: skip
    for file in (seed, long, bare):
        assert train(load_recipe(file), run) == [0]
    return run, [seed, long, bare]


def rates(run, stage, role="rest"):
    return [row["learning_rate"][role] for row in read_metrics(run / stage)]


def test_schedules_are_on_their_closed_forms_across_stages(lineage):
    run, _ = lineage
    wsd = [1.0] * 4 + [1 - 0.75 * (step + 1) / 4 for step in range(4)]
    assert rates(run, "small") == pytest.approx([PEAK * factor for factor in wsd])
    warmup = 3  # 700 tokens at 256 a step
    rising = [0.25 + 0.75 * (step + 1) / warmup for step in range(warmup)] + [1.0] * (STEPS - warmup)
    assert rates(run, "long") == pytest.approx([PEAK * factor for factor in rising])
    falling = [2 - 0.5, 1.0] + [0.55 + 0.45 * math.cos(math.pi * (step + 1) / 6) for step in range(6)]
    assert rates(run, "bare", "router") == pytest.approx([2 * PEAK / 2 * factor for factor in falling])
    assert rates(run, "bare") == pytest.approx([0.5 * PEAK / 2 * factor for factor in falling])


def test_the_context_doubles_and_the_rotary_embedding_goes_for_good(lineage):
    run, _ = lineage
    configs = [CheckpointReader(run / name / "step-00000008").config for name in ("small", "long", "bare")]
    assert [config["max_position_embeddings"] for config in configs] == [64, 128, 128]
    assert [config["rope_enabled"] for config in configs] == [True, True, False]
    states = [CheckpointReader(run / name / "step-00000008").trainer_state for name in ("small", "long", "bare")]
    assert [state["data"]["sequence_length"] for state in states] == [32, 64, 64]
    assert states[1]["lineage_tokens"] == 2 * STEPS * 256


def test_a_schedule_goes_on_across_a_resume(lineage, tmp_path):
    source, files = lineage
    run = tmp_path / "run"
    shutil.copytree(source, run)
    shutil.rmtree(run / "long/step-00000008")  # the one of step 4 is left
    assert train(load_recipe(files[1]), run) == [0]
    assert rates(run, "long") == rates(source, "long")
    losses = [[row["loss"] for row in read_metrics(folder / "long")] for folder in (source, run)]
    assert losses[0] == losses[1]


def test_a_parent_without_a_recorded_rate_is_refused(lineage, tmp_path, monkeypatch):
    source, files = lineage
    run = tmp_path / "run"
    shutil.copytree(source, run)
    shutil.rmtree(run / "long")
    grown = core.grown_trainer_state
    monkeypatch.setattr(core, "grown_trainer_state", lambda *job: grown(*job) | {"parent_learning_rate": None})
    with pytest.raises(RankFailed, match="did not record its last learning rate; give a number"):
        train(load_recipe(files[1]), run)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"warmup_from": "last", "warmup_steps": 3}, "schedule.warmup_from = 'last': a seed has no stage before it"),
        ({"warmup_from": "first", "warmup_steps": 3}, "must be a number from 0 to 1, or last"),
        ({"warmup_from": 1.5, "warmup_steps": 3}, "must be a number from 0 to 1, or last"),
        ({"warmup_from": "last"}, "needs warmup_steps or warmup_tokens"),
        ({"warmup_steps": 3, "warmup_tokens": 100}, "needs one of them"),
    ],
)
def test_warm_ups_that_cannot_be_are_refused(lineage, schedule, message):
    _, files = lineage
    text = yaml.safe_dump({"kind": "constant", **schedule}, default_flow_style=True).strip()
    with pytest.raises(RecipeError, match=message):
        load_recipe(files[0], [f"schedule={text}"])


@pytest.mark.parametrize("recipes", ["recipes/paper", "recipes/preserving"])
def test_the_large_recipes_switch_context_and_rotary_embedding(recipes):
    stages = {recipe.name: recipe for recipe in load_lineage(recipes).recipes}
    lengths = {name: recipe.data.sequence_length for name, recipe in stages.items()}
    assert (lengths["deep-9b-4k"], lengths["deep-9b-8k"]) == (4096, 8192)
    assert stages["deep-9b-8k"].config_overrides["max_position_embeddings"] == 8192
    without_rope = [name for name, recipe in stages.items() if recipe.config_overrides.get("rope_enabled") is False]
    assert without_rope == ["deep-9b-decay"]
