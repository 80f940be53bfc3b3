"""A stage with quantized experts: ledger and counts in the log, merging adapters on the way, bases that must match."""

import shutil

import pytest

from lightninglm.checkpoint import CheckpointReader, CheckpointWriter, ExpertBaseError, newest_checkpoint
from lightninglm.distributed import adapters
from lightninglm.recipe import RecipeError, load_recipe
from lightninglm.training.metrics import read_metrics
from lightninglm.training.stage import run_stage
from tests.distributed.ranks import RankFailed, run_ranks
from tests.training.small_run import MODEL, SEQUENCE_LENGTH, make_run

INT8 = {"kind": "int8", "group_size": 16, "rank": 4, "seed": 0}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"]}
QUANTIZED = MODEL | LAYERS | {"moe_intermediate_size": 32, "expert_quantization": INT8}
BASE = "model.layers.1.mlp.experts.2.up_proj.codes"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Data and recipe, prepared once; tests copy the run folder."""
    return make_run(
        tmp_path_factory.mktemp("prepared"), model=QUANTIZED, train__micro_batch=4, optimizer__weight_decay=0.0
    )


@pytest.fixture
def run(prepared, tmp_path):
    shutil.copytree(prepared[0], tmp_path / "run")
    return tmp_path / "run"


def train(file, run, ranks, *overrides):
    def body(rank, world_size):
        return run_stage(load_recipe(file, [f"train.expert_parallel={world_size}", *overrides]), run)

    return run_ranks(body, ranks)


def test_ledger_and_moved_adapters_are_logged(prepared, run, capfd):
    assert train(prepared[1], run, 2) == [0, 0]
    said = capfd.readouterr().out
    assert "measured as the ledger says" in said and "optimizer state of the routed experts: 1/" in said
    assert "adapters of experts with tokens" in said
    first, second, third = [row.get("adapters_moved") for row in read_metrics(run / "small")][:3]
    assert first["A"] == first["with_tokens"] > 0 == first["B"] == first["without_tokens"]
    assert second["A"] == second["B"] == second["with_tokens"] > 0
    assert third is None


def test_a_run_that_merges_resumes_as_if_it_had_never_stopped(prepared, run, tmp_path):
    """Merged after 5 and 10 steps; the copy loses what came after step 8 and goes on from there."""
    merging = ("train.merge_adapters_every=5", "train.merge_adapters_warmup=2")
    assert train(prepared[1], run, 2, *merging) == [0, 0]
    rows = read_metrics(run / "small")
    merged = {row["step"]: row["merged_adapters"] for row in rows if "merged_adapters" in row}
    assert sorted(merged) == [5, 10]
    assert all(report["signal_to_noise_db"] > 40 for report in merged.values())
    rates = {row["step"]: row["learning_rate"] for row in rows}
    assert rates[6]["adapters"] == pytest.approx(rates[6]["rest"] / 2) and rates[7]["adapters"] == rates[7]["rest"]
    other = tmp_path / "other"
    shutil.copytree(run, other)
    shutil.rmtree(other / "small/step-00000012")
    assert train(prepared[1], other, 2, *merging) == [0, 0]
    ours, theirs = (CheckpointReader(folder / "small/step-00000012") for folder in (run, other))
    assert {n: ours.sha256(n) for n in (*ours.weights, *ours.optimizer)} == {
        n: theirs.sha256(n) for n in (*theirs.weights, *theirs.optimizer)
    }
    assert ours.trainer_state["expert_bases"] == theirs.trainer_state["expert_bases"]
    before = CheckpointReader(run / "small/step-00000004").trainer_state["expert_bases"]
    assert before.keys() == ours.trainer_state["expert_bases"].keys() and before != ours.trainer_state["expert_bases"]


def test_adapters_are_not_trained_on_another_base(prepared, run):
    assert train(prepared[1], run, 1) == [0]
    shutil.rmtree(run / "small/step-00000012")
    folder, _ = newest_checkpoint(run / "small")
    with CheckpointReader(folder) as reader:
        tensors = {name: reader.read(name).clone() for name in (*reader.weights, *reader.optimizer)}
        tensors[BASE][0, 0] += 1  # a sound checkpoint with another base
        config, state = reader.config, reader.trainer_state
    shutil.move(folder, run / "tokenizer_source")
    with CheckpointWriter(folder) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.commit(config, state, tokenizer_folder=run / "tokenizer_source")
    with pytest.raises(
        RankFailed, match=rf"{ExpertBaseError.__name__}.*model\.layers\.1\.mlp\.experts were trained on"
    ):
        train(prepared[1], run, 1)


def test_merging_needs_adapters(tmp_path):
    run, file = make_run(tmp_path)
    with pytest.raises(RankFailed, match=rf"{RecipeError.__name__}.*train\.merge_adapters_every.*no adapters"):
        train(file, run, 1, "train.merge_adapters_every=5")


def test_merging_on_the_way_ends_where_never_merging_does_unless_the_master_copy_is_stale(
    prepared, tmp_path, monkeypatch
):
    steps, every = 48, 4
    options = [
        f"train.tokens={steps * 8 * SEQUENCE_LENGTH}", "checkpoint.every=1000", "evaluate.every=1000",
        "optimizer.groups.adapters=10",
        "schedule.kind=constant",
    ]  # fmt: skip
    merging = (*options, f"train.merge_adapters_every={every}", "train.merge_adapters_warmup=2")

    def final(name, *overrides):
        folder = tmp_path / name
        shutil.copytree(prepared[0], folder)
        assert train(prepared[1], folder, 1, *overrides) == [0]
        losses = [row["loss"] for row in read_metrics(folder / "small")]
        assert len(losses) == steps
        return sum(losses[-5:]) / 5

    def weights_only(state, parameter, value):
        parameter.data.copy_(value)

    never, merged = final("never", *options), final("merged", *merging)
    monkeypatch.setattr(adapters, "_write", weights_only)
    monkeypatch.setattr(adapters.OptimizerState, "publish", lambda state: None)
    stale = final("stale", *merging)
    print(f"last losses: never merged {never:.4f}, merged {merged:.4f}, stale master copies {stale:.4f}")
    assert abs(merged - never) < 0.05
    assert stale > merged + 0.1
