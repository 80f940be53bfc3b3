"""A step that is not finite on one rank is skipped on all; too many in a row end the stage with a sound checkpoint."""

import shutil

import pytest
import torch

from lightninglm.checkpoint import CheckpointReader, newest_checkpoint
from lightninglm.recipe import load_recipe
from lightninglm.training.loop import EXIT_NOT_FINITE, Trainer
from lightninglm.training.metrics import read_metrics
from lightninglm.training.stage import run_stage
from tests.distributed.ranks import run_ranks
from tests.training.small_run import make_run

DENSE, EXPERTS = "model.layers.1.mixer.k_proj.weight", "model.layers.2.mlp.experts.up_proj.weight"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("prepared"), train__tokens=4 * 8 * 32)


def train(prepared, folder, steps, *, plant, overrides=(), dtype="fp32", zero=1, expert_parallel=2):
    """
    Trains on 2 ranks; `plant(model, now)` sets a fault up on rank 1, to come when `now()`: in the numbered `steps`.

    Returns (per rank: the exit code, and step -> whether any finite weight or balance bias moved), the log.
    """
    run, file = prepared
    shutil.copytree(run, folder)

    def body(rank, world_size):
        plain_init, plain_step, moved = Trainer.__init__, Trainer._optimizer_step, {}

        def init(self, engine, *args, **options):
            if rank == 1:
                plant(engine.module, lambda: self.state["step"] + 1 in steps)
            plain_init(self, engine, *args, **options)

        def step(self):
            state = {n: t for n, t in self.model.state_dict().items() if t.is_floating_point()}
            before = {name: tensor.clone() for name, tensor in state.items()}
            result = plain_step(self)
            moved[self.state["step"]] = not all(torch.equal(before[name], state[name]) for name in state)
            return result

        Trainer.__init__, Trainer._optimizer_step = init, step
        options = [f"train.expert_parallel={expert_parallel}", f"train.dtype={dtype}"]
        options += [f"deepspeed=ds_configs/zero{zero}.json", "checkpoint.every=100", "evaluate.every=100", *overrides]
        return run_stage(load_recipe(file, options), folder, accept_changes=True), moved

    return run_ranks(body, 2), read_metrics(folder / "small")


def nan_gradient(name):
    def plant(model, now):
        model.get_parameter(name).register_hook(lambda gradient: gradient * torch.nan if now() else None)

    return plant


def nan_output(model, now):
    """The output of the mixer of layer 2: the stack notices it before the loss does."""
    nan_from(model.model.layers[2].mixer, now)


def nan_second_token(model, now):
    nan_from(model.mtp.layer.mixer, now)


def nan_in_evaluation(model, now):
    nan_from(model.model.layers[2].mixer, lambda: not model.training)


def nan_from(mixer, now):
    mixer.register_forward_hook(lambda module, args, out: (out[0] * torch.nan, out[1]) if now() else None)


def nan_weight(model, now):
    @torch.no_grad()
    def write(module, args, kwargs):
        if now():
            module.get_parameter(DENSE)[0, 0] = torch.nan

    model.register_forward_pre_hook(write, with_kwargs=True)


def assert_one_step_skipped(ranks, rows, step):
    for code, moved in ranks:
        assert code == 0
        assert moved == {n: n != step for n in range(1, 5)}
    assert [("skipped" in row) for row in rows] == [row["step"] == step for row in rows]
    assert rows[-1]["skipped_steps"] == 1
    assert all(row["loss"] is not None and row["gradient_norm"]["total"] for row in rows if row["step"] != step)


@pytest.mark.parametrize(
    ("zero", "dtype", "expert_parallel", "name"),
    [
        (0, "fp32", 2, EXPERTS),
        (1, "fp32", 2, EXPERTS),
        (2, "fp32", 2, DENSE),
        (1, "fp32", 1, DENSE),
        (1, "bf16", 2, EXPERTS),
        (2, "bf16", 2, DENSE),
    ],
)
def test_a_nan_gradient_on_one_rank_skips_the_step_on_all(prepared, tmp_path, zero, dtype, expert_parallel, name):
    ranks, rows = train(
        prepared, tmp_path / "run", {2}, plant=nan_gradient(name), zero=zero, dtype=dtype,
        expert_parallel=expert_parallel,
    )  # fmt: skip
    assert_one_step_skipped(ranks, rows, 2)


def test_a_layer_whose_output_is_not_finite_skips_the_step_and_is_named(prepared, tmp_path):
    ranks, rows = train(prepared, tmp_path / "run", {3}, plant=nan_output)
    assert_one_step_skipped(ranks, rows, 3)
    assert "model: the state after layer 2 is not finite" in rows[2]["skipped"] and "on rank 1" in rows[2]["skipped"]


@pytest.mark.parametrize("backend", ["reversible", "stored"])
def test_so_does_the_midpoint_stack_of_the_second_token_layer(prepared, tmp_path, backend):
    options = ["model.mtp_stack=midpoint", f"model.stack_backend={backend}"]
    ranks, rows = train(prepared, tmp_path / "run", {3}, plant=nan_second_token, overrides=options)
    assert_one_step_skipped(ranks, rows, 3)
    assert "mtp: the state after layer 0 is not finite" in rows[2]["skipped"] and "on rank 1" in rows[2]["skipped"]


def test_an_evaluation_that_is_not_finite_on_one_rank_is_logged_and_training_goes_on(prepared, tmp_path, capfd):
    ranks, rows = train(
        prepared, tmp_path / "run", set(), plant=nan_in_evaluation, overrides=["evaluate.every=2", "checkpoint.every=2"]
    )
    assert [code for code, _ in ranks] == [0, 0]
    lost = {"prose": None, "verse": None}
    assert [row.get("heldout") for row in rows] == [None, lost, None, lost]
    assert "step 4: held-out loss  prose nan  verse nan" in capfd.readouterr().out
    folder, skipped = newest_checkpoint(tmp_path / "run/small")
    assert folder.name == "step-00000004" and not skipped
    assert CheckpointReader(folder).trainer_state["heldout"] == lost


@pytest.mark.parametrize(("limit", "steps"), [(1, {2}), (2, {1, 2})])
def test_too_many_in_a_row_end_the_stage_with_a_checkpoint_and_the_name(prepared, tmp_path, capfd, limit, steps):
    ranks, rows = train(
        prepared, tmp_path / "run", steps, plant=nan_gradient(DENSE), overrides=[f"train.max_skipped_steps={limit}"]
    )
    assert [code for code, _ in ranks] == [EXIT_NOT_FINITE] * 2
    assert f"gradient of {DENSE} on rank 1" in rows[-1]["skipped"]
    assert f"gradient of {DENSE} on rank 1" in capfd.readouterr().out
    folder, skipped = newest_checkpoint(tmp_path / "run/small")
    assert folder.name == "step-00000002" and not skipped
    with CheckpointReader(folder) as reader:
        assert reader.trainer_state["data"]["position"] == 16
        assert all(bool(reader.read(name).isfinite().all()) for name in reader.weights)


def test_a_weight_that_is_not_finite_is_named_and_not_saved(prepared, tmp_path):
    ranks, rows = train(
        prepared, tmp_path / "run", {2}, plant=nan_weight, zero=2, overrides=["train.max_skipped_steps=1"]
    )
    assert [code for code, _ in ranks] == [EXIT_NOT_FINITE] * 2
    assert f"weight {DENSE} on rank 1" in rows[-1]["skipped"]
    assert newest_checkpoint(tmp_path / "run/small")[0] is None
