"""A stage that was stopped anywhere and resumed, on any number of ranks, is the stage that never stopped."""

import os
import shutil
import signal

import pytest
import torch

from lightninglm.checkpoint import CheckpointReader, read_hashes
from lightninglm.recipe import load_recipe
from lightninglm.training.metrics import read_metrics
from lightninglm.training.stage import run_stage
from tests.distributed.ranks import RankFailed, run_ranks
from tests.training.small_run import make_run


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Data and recipe, prepared once; tests copy the run folder."""
    return make_run(tmp_path_factory.mktemp("prepared"))


def train(file, run, ranks, overrides=(), stop_at=None):
    """Runs the stage on forked ranks; `stop_at` sends rank 0 a SIGTERM once that step is logged."""

    def body(rank, world_size):
        recipe = load_recipe(file, [f"train.expert_parallel={world_size}", *overrides])
        if stop_at is not None and rank == 0:
            from lightninglm.training.metrics import MetricsLogger

            logged = MetricsLogger.step

            def step(self, values):
                logged(self, values)
                if values["step"] == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)

            MetricsLogger.step = step
        return run_stage(recipe, run, accept_changes=True)

    return run_ranks(body, ranks)


def tensors(folder):
    """All weights and optimizer tensors of a checkpoint."""
    with CheckpointReader(folder) as reader:
        return {name: reader.read(name).clone() for name in [*reader.weights, *reader.optimizer]}


def losses(run):
    return {row["step"]: row["loss"] for row in read_metrics(run / "small")}


@pytest.fixture(scope="module")
def undisturbed(prepared, tmp_path_factory):
    """The stage on 2 ranks, from start to end."""
    run, file = prepared
    copy = tmp_path_factory.mktemp("undisturbed") / "run"
    shutil.copytree(run, copy)
    assert train(file, copy, 2) == [0, 0]
    return copy


@pytest.mark.parametrize("stop_at", [2, 5])
def test_stopping_and_resuming_equals_never_stopping_bit_for_bit(prepared, undisturbed, tmp_path, stop_at):
    run, file = prepared
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    codes = train(file, copy, 2, stop_at=stop_at)
    assert codes == [128 + signal.SIGTERM] * 2 and max(losses(copy)) == stop_at + 1
    assert not (copy / "small/hashes.json").exists()
    assert train(file, copy, 2) == [0, 0]
    assert losses(copy) == losses(undisturbed)
    assert read_hashes(copy / "small/hashes.json") == read_hashes(undisturbed / "small/hashes.json")
    ours, theirs = (tensors(folder / "small/step-00000012") for folder in (copy, undisturbed))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_with_other_ranks(prepared, undisturbed, tmp_path, ranks):
    run, file = prepared
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.copytree(undisturbed / "small", copy / "small")
    for folder in sorted((copy / "small").glob("step-*"))[1:]:
        shutil.rmtree(folder)
    assert set(train(file, copy, ranks)) == {0}
    reference, found = losses(undisturbed), losses(copy)
    assert found.keys() == reference.keys()
    for step in found:
        assert found[step] == pytest.approx(reference[step], rel=1e-6), step


def test_a_damaged_newest_checkpoint_is_skipped_and_named(prepared, undisturbed, tmp_path, capfd):
    _, file = prepared
    copy = tmp_path / "run"
    shutil.copytree(undisturbed, copy)
    shutil.rmtree(copy / "small/step-00000012")
    shard = next((copy / "small/step-00000008").glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert train(file, copy, 2) == [0, 0]
    printed = capfd.readouterr().out
    assert "skipped" in printed and shard.name in printed and "goes on from" in printed
    ours, theirs = (tensors(folder / "small/step-00000012") for folder in (copy, undisturbed))
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_a_stage_whose_checkpoints_are_all_damaged_never_starts_from_scratch(prepared, undisturbed, tmp_path):
    _, file = prepared
    copy = tmp_path / "run"
    shutil.copytree(undisturbed, copy)
    for folder in (copy / "small").glob("step-*"):
        (folder / "manifest.json").unlink()
    with pytest.raises(RankFailed, match="never starts from scratch"):
        train(file, copy, 1)


def test_an_edited_recipe_is_refused_with_the_keys_that_changed(prepared, undisturbed, tmp_path):
    _, file = prepared
    copy = tmp_path / "run"
    shutil.copytree(undisturbed, copy)
    shutil.rmtree(copy / "small/step-00000012")

    def body(rank, world_size):
        recipe = load_recipe(file, [f"train.expert_parallel={world_size}", "optimizer.lr=1.0e-4"])
        return run_stage(recipe, copy)

    with pytest.raises(RankFailed, match=r"optimizer\.lr \(was 0\.003, is 0\.0001\)"):
        run_ranks(body, 2)


def test_the_log_holds_what_a_step_should_tell(undisturbed):
    row = read_metrics(undisturbed / "small")[-1]
    assert row["gradient_norm"]["total"] > 0 and set(row["gradient_norm"]) == {"total", "router", "rest"}
    assert row["expert_load"]["max"] >= 1 >= row["expert_load"]["min"]
    assert row["reversibility"]["passes_verified"] > 0 and row["peak_memory_bytes"] > 0
    assert set(row["heldout"]) == {"prose", "verse"}
    assert row["loss"] == pytest.approx(row["next_token_loss"] + 0.3 * row["second_token_loss"] + row["aux_loss"])


def test_sampled_selection_goes_on_bit_for_bit_and_does_not_depend_on_the_ranks(prepared, tmp_path):
    source, file = prepared
    options = ["train.tokens=1536", "train.sampled_selection={steps: 5, temperature: 0.1}", "evaluate.every=100"]
    runs = {name: tmp_path / name for name in ("whole", "stopped", "one", "hard")}
    for run in runs.values():
        shutil.copytree(source, run)
    assert train(file, runs["whole"], 2, options) == [0, 0]
    assert train(file, runs["stopped"], 2, options, stop_at=2) == [128 + signal.SIGTERM] * 2
    assert train(file, runs["stopped"], 2, options) == [0, 0]
    assert losses(runs["stopped"]) == losses(runs["whole"])
    assert train(file, runs["one"], 1, options) == [0]
    assert losses(runs["one"]) == pytest.approx(losses(runs["whole"]), rel=1e-6)
    assert train(file, runs["hard"], 1, [*options[:1], options[2]]) == [0]
    assert losses(runs["hard"])[1] != pytest.approx(losses(runs["one"])[1], rel=1e-6)
