"""Knobs change a running stage on all ranks at a step boundary, are logged, saved and in force after a resume."""

import os
import shutil
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from lightninglm.checkpoint import CheckpointReader
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.router import Router
from lightninglm.recipe import RecipeError, load_recipe
from lightninglm.training.interruption import EXIT_STOPPED
from lightninglm.training.knobs import KnobsFile, check_knobs
from lightninglm.training.loop import Trainer
from lightninglm.training.metrics import MetricsLogger, read_metrics
from lightninglm.training.stage import run_stage
from tests.distributed.ranks import run_ranks
from tests.training.small_run import MODEL, make_run

CONFIG = LightningLMConfig(vocab_size=320, **MODEL)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("prepared"), train__tokens=6 * 8 * 32)


@contextmanager
def counted_collectives():
    """A list that gets the name of every collective of torch.distributed that Python code calls by its module."""
    called, plain = [], {name: getattr(dist, name) for name in ("all_gather_object", "broadcast_object_list")}
    for name, function in plain.items():
        setattr(dist, name, lambda *args, f=function, n=name, **options: (called.append(n), f(*args, **options))[1])
    yield called
    for name, function in plain.items():
        setattr(dist, name, function)


def train(file, run, write, overrides=()):
    """Trains on 2 ranks; rank 0 writes `write[step]` to knobs.yaml once that step is logged, -1: at the start."""

    def body(rank, world_size):
        logged, knobs, calls = MetricsLogger.step, run / "small/knobs.yaml", {}
        if rank == 0 and -1 in write:
            knobs.parent.mkdir(exist_ok=True)
            knobs.write_text(write[-1])

        def step(self, values):
            logged(self, values)
            if (text := write.get(values["step"])) is not None:
                temporary = knobs.with_suffix(".tmp")
                temporary.write_text(text)
                os.replace(temporary, knobs)

        plain = Trainer._optimizer_step

        def optimizer_step(self):
            with counted_collectives() as called:
                result = plain(self)
            calls[self.state["step"]] = called
            routers = [m for m in self.model.modules() if isinstance(m, Router)]
            seen[self.state["step"]] = (routers[0].balance["speed"], self.engine.gradient_clipping())
            return result

        seen = {}
        MetricsLogger.step, Trainer._optimizer_step = step, optimizer_step
        options = ["train.expert_parallel=2", "checkpoint.every=100", "evaluate.every=100", *overrides]
        return run_stage(load_recipe(file, options), run, accept_changes=True), seen, calls

    return run_ranks(body, 2)


def tensors(folder):
    with CheckpointReader(folder) as reader:
        return {name: reader.read(name).clone() for name in [*reader.weights, *reader.optimizer]}


def test_a_change_reaches_all_ranks_is_logged_saved_and_resumed(prepared, tmp_path, capfd):
    source, file = prepared
    run = tmp_path / "run"
    shutil.copytree(source, run)
    write = {
        1: "learning_rate_factor: 0.5\nbalance_speed: 0.01\nclip: 0.25\n",
        3: "balance_sped: 1.0\n",  # changes nothing
    }
    ranks = train(file, run, write, ["checkpoint.every=4"])
    (code, seen, calls), other = ranks
    assert code == 0 and seen == other[1]
    assert seen[2] == seen[3] == seen[6] == (0.01, 0.25)  # read and taken over inside step 2
    rows = {row["step"]: row for row in read_metrics(run / "small")}
    assert rows[2]["knobs"] == {
        "balance_speed": [None, 0.01], "clip": [None, 0.25], "learning_rate_factor": [None, 0.5],
    }  # fmt: skip
    assert "knobs" not in rows[3] and rows[3]["learning_rate"]["rest"] == 0.5 * 3e-3  # the warm-up ends in step 3
    printed = capfd.readouterr().out
    assert "knobs from step 3 on: balance_speed the recipe's -> 0.01" in printed
    assert "knobs.yaml:1: balance_sped" in printed and "did you mean balance_speed?" in printed
    assert printed.count("knobs unchanged") == 1
    assert calls[2] == ["broadcast_object_list"]
    assert [calls[step] for step in (1, 3, 4, 5, 6)] == [[]] * 5

    kept = CheckpointReader(run / "small/step-00000004").trainer_state["knobs"]
    assert kept == {"learning_rate_factor": 0.5, "balance_speed": 0.01, "clip": 0.25}
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "small/step-00000006")
    (again / "small/knobs.yaml").unlink()  # what the checkpoint has counts
    assert train(file, again, {}, ["checkpoint.every=4"])[0][0] == 0
    ours, theirs = (tensors(folder / "small/step-00000006") for folder in (run, again))
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_stop_saves_stops_and_does_not_stop_the_next_start(prepared, tmp_path):
    source, file = prepared
    run = tmp_path / "run"
    shutil.copytree(source, run)
    assert [code for code, *_ in train(file, run, {2: "stop: true\n"})] == [EXIT_STOPPED] * 2
    assert sorted(folder.name for folder in (run / "small").glob("step-*")) == ["step-00000003"]
    assert [code for code, *_ in train(file, run, {})] == [0, 0]


def test_knobs_that_are_there_before_the_start_count_from_the_first_step(prepared, tmp_path):
    source, file = prepared
    run = tmp_path / "run"
    shutil.copytree(source, run)
    (code, seen, _), _ = train(file, run, {-1: "clip: 0.125\nevaluate_every: 2\ncheckpoint_every: 3\n"})
    assert code == 0 and seen[1][1] == 0.125
    rows = read_metrics(run / "small")
    assert "clip" in rows[0]["knobs"] and [row["step"] for row in rows if "heldout" in row] == [2, 4, 6]
    assert [folder.name for folder in sorted((run / "small").glob("step-*"))] == ["step-00000003", "step-00000006"]


def test_the_file_is_read_only_when_it_changed(tmp_path):
    path = tmp_path / "knobs.yaml"
    file = KnobsFile(path, CONFIG)
    assert file.read_if_changed() is None
    path.write_text("clip: 1.0\n")
    assert file.read_if_changed().clip == 1.0
    assert file.read_if_changed() is None
    path.write_text("clip: -1.0\n")
    with pytest.raises(RecipeError, match=r"knobs.yaml:1: clip = -1.0"):
        file.read_if_changed()
    assert file.read_if_changed() is None
    path.unlink()
    assert file.read_if_changed() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("balance_band: [0.5, 0.9]\n", r":1: balance_band = \[0.5, 0.9\]: needs 0 < lo < 1 < hi"),
        ("balance_speed: fast\n", "balance_speed = 'fast': Input should be a valid number"),
        ("checkpoint_every: 0\n", "checkpoint_every = 0: Input should be greater than or equal to 1"),
        ("learning_rate_factor: .nan\n", "learning_rate_factor"),
        ("- clip\n", "needs a mapping of keys"),
        ("clip: [\n", "knobs.yaml"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "knobs.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as error:
        check_knobs(path, CONFIG)
    assert len(str(error.value).splitlines()) == 1


def test_balance_knobs_need_a_balanced_router(tmp_path):
    path = tmp_path / "knobs.yaml"
    path.write_text("balance_speed: 0.1\n")
    with pytest.raises(RecipeError, match="has no effect: the model has no experts"):
        check_knobs(path, LightningLMConfig(vocab_size=320, **MODEL | {"num_experts": 0}))
