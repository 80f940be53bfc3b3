"""Stopped at any steps and resumed, a stage ends as one that never stopped; from a damaged checkpoint none goes on."""

import os
import random
import shutil
import signal

import pytest

from lightninglm.checkpoint import CheckpointReader, step_folder
from lightninglm.recipe import load_recipe
from lightninglm.training.metrics import MetricsLogger, read_metrics
from lightninglm.training.stage import newest_of_all_ranks, run_stage
from tests.distributed.ranks import run_ranks
from tests.training.small_run import SEQUENCE_LENGTH, make_run

STEPS = 50
OPTIONS = [f"train.tokens={STEPS * 8 * SEQUENCE_LENGTH}", "train.expert_parallel=2", "evaluate.every=1000"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("prepared"))


def run_until(prepared, folder, stop_at, asynchronous):
    """The stage on two ranks, from where it is to the step after `stop_at`, or to its end."""

    def body(rank, world_size):
        logged = MetricsLogger.step

        def step(self, values):
            logged(self, values)
            if values["step"] == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

        MetricsLogger.step = step
        checkpoint = f"checkpoint={{every: 20, keep: 2, asynchronous: {str(asynchronous).lower()}}}"
        return run_stage(load_recipe(prepared[1], [*OPTIONS, checkpoint]), folder)

    assert set(run_ranks(body, 2)) == {0 if stop_at is None else 128 + signal.SIGTERM}


def outcome(folder):
    """Hashes of all weights, buffers and moments at the end, and every loss on the way."""
    reader = CheckpointReader(folder / "small" / step_folder(STEPS), verify="full")
    return reader.manifest["tensors"], [row["loss"] for row in read_metrics(folder / "small")]


@pytest.fixture(scope="module")
def undisturbed(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    shutil.copytree(prepared[0], folder)
    run_until(prepared, folder, None, asynchronous=False)
    return folder


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stopped_at_random_steps_and_resumed_no_bit_of_any_tensor_differs_after_50_steps(
    prepared, undisturbed, tmp_path, asynchronous
):
    folder = tmp_path / "run"
    shutil.copytree(prepared[0], folder)
    for stop_at in sorted(random.Random(int(asynchronous)).sample(range(1, STEPS - 1), 3)):
        run_until(prepared, folder, stop_at, asynchronous)
    run_until(prepared, folder, None, asynchronous)
    assert outcome(folder) == outcome(undisturbed)


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def test_whatever_file_of_the_newest_checkpoint_is_damaged_a_resume_says_so_and_takes_the_one_before(
    undisturbed, tmp_path
):
    newest = undisturbed / "small" / step_folder(STEPS)
    before = undisturbed / "small" / step_folder(40)
    files = [path.name for path in newest.iterdir()]
    assert {"tokenizer.json", "trainer_state.json", "modeling_lightninglm.py"} < set(files)
    cases = [(name, how) for name in files for how in ("changed", "truncated", "deleted")]
    damaged = tmp_path / "small"
    shutil.copytree(undisturbed / "small", damaged)

    def body(rank, world_size):
        for name, how in cases:
            damage(damaged / newest.name / name, how)
            found, skipped = newest_of_all_ranks(damaged, "full")
            assert found == damaged / before.name and [one.folder.name for one in skipped] == [newest.name], (name, how)
            assert name in skipped[0].reason, (how, skipped[0].reason)
            shutil.copyfile(newest / name, damaged / newest.name / name)
        assert newest_of_all_ranks(damaged, "full") == (damaged / newest.name, [])

    run_ranks(body, 1)
