"""A lineage that was killed and started again ends as if nothing had happened; its errors come before any rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from growth.chain import grow_chain
from lightninglm.distributed.process_group import EXIT_BAD_INPUT
from lightninglm.recipe import load_lineage
from lightninglm.training.interruption import EXIT_STOPPED
from lightninglm.training.lineage import run_lineage
from lightninglm.training.loop import EXIT_NOT_FINITE
from lightninglm.training.metrics import MetricsLogger, read_metrics
from lightninglm.training.prepare import prepare_stage
from lightninglm.training.stage import run_stage
from tests.distributed.ranks import run_ranks
from tests.training.small_run import MODEL, make_run

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2


@pytest.fixture(scope="module")
def lineage(tmp_path_factory):
    """Recipes of two stages, a dense seed and a mixture of experts grown from it; returns their folder."""
    folder = tmp_path_factory.mktemp("lineage")
    dense = {key: value for key, value in MODEL.items() if key != "num_experts"}
    _, file = make_run(folder, model=dense, checkpoint__every=3)
    seed = yaml.safe_load(file.read_text()) | {"name": "seed"}
    moe = {key: value for key, value in seed.items() if key != "model"} | {
        "name": "moe",
        "grow": {"from": "seed", "steps": [{"dense_to_moe": {"num_experts": 5, "experts_per_token": 2}}]},
        "train": seed["train"] | {"expert_parallel": RANKS},
    }
    recipes = folder / "recipes"
    recipes.mkdir()
    for name, values in (("1-seed", seed), ("2-moe", moe)):
        (recipes / f"{name}.yaml").write_text(yaml.safe_dump(values))
    stages = {"name": "small", "world_size": RANKS, "stages": ["1-seed.yaml", "2-moe.yaml"]}
    (recipes / "lineage.yaml").write_text(yaml.safe_dump(stages))
    return recipes


def start(lineage, run, *arguments):
    """`launch/lineage.py` in a process group of its own, its output in `<run>.log`."""
    command = [sys.executable, "launch/lineage.py", str(lineage), "--run", str(run), *arguments]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    with open(f"{run}.log", "a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


def kill_tree(pid):
    """SIGKILL to a process and all its descendants, whatever their process groups."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_tree(int(child))


def wait_for(condition, process, seconds=150):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "the lineage ended or took too long"
        time.sleep(0.05)


@pytest.mark.launcher
def test_a_killed_lineage_goes_on_and_ends_with_the_same_losses(lineage, tmp_path):
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    process = start(lineage, disturbed)
    wait_for((disturbed / "seed/step-00000003").exists, process)
    kill_tree(process.pid)  # in the first stage
    process.wait()
    process = start(lineage, disturbed)
    wait_for((disturbed / "moe").exists, process)
    kill_tree(process.pid)  # while it grows, or just after
    process.wait()
    assert start(lineage, disturbed).wait(timeout=240) == 0, Path(f"{disturbed}.log").read_text()

    for recipe in load_lineage(lineage).recipes:
        prepare_stage(recipe, undisturbed, grow_chain)
        run_ranks(lambda rank, world_size, recipe=recipe: run_stage(recipe, undisturbed), RANKS)
    for stage in ("seed", "moe"):
        killed, calm = (read_metrics(run / stage) for run in (disturbed, undisturbed))
        assert [row["loss"] for row in killed] == [row["loss"] for row in calm]
        assert killed[-1]["heldout"] == calm[-1]["heldout"]
    summary = json.loads((disturbed / "summary.json").read_text())
    assert [row["name"] for row in summary["stages"]] == ["seed", "moe"]
    (growth,) = summary["growth"]
    assert growth["relative_logit_difference"] <= 1e-6 and growth["moments_carried"] > 0
    for domain, before in growth["heldout_before"].items():
        assert growth["heldout_after"][domain] == pytest.approx(before, abs=1e-4)


@pytest.mark.launcher
def test_sigterm_saves_once_and_the_same_command_goes_on(lineage, tmp_path):
    run = tmp_path / "run"
    process = start(lineage, run, "--set", "checkpoint.every=1000", "--set", "train.tokens=100000")
    wait_for(lambda: len(read_metrics(run / "seed")) >= 4, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    steps = [int(path.name.removeprefix("step-")) for path in (run / "seed").glob("step-*")]
    assert steps == [max(row["step"] for row in read_metrics(run / "seed"))]
    assert "the same command goes on" in Path(f"{run}.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "train.tokns=5"], "did you mean tokens?"),
        (["--set", "data.mixture.prose=0.9"], "must sum to 1"),
        (["--num-gpus", "3"], "must be a multiple of"),
        (
            ["--num-gpus", "8", "--set", "train.expert_parallel=8", "--set", "train.micro_batch=1"],
            "more ranks than experts",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_anything_starts(lineage, tmp_path, arguments, message):
    run = tmp_path / "run"
    assert start(lineage, run, *arguments).wait(timeout=60) == 2
    text = Path(f"{run}.log").read_text()
    assert text.startswith("error: ") and message in text and len(text.splitlines()) == 1
    assert not run.exists()


@pytest.mark.parametrize(("crashes", "restarts", "code"), [(2, 2, 0), (2, 1, 137), (0, 2, 0)])
def test_a_crashed_stage_is_started_again(lineage, tmp_path, monkeypatch, capsys, crashes, restarts, code):
    seed = load_lineage(lineage).recipes[0]
    run, starts = tmp_path / "run", []

    def start_ranks(command, env):
        starts.append(command)
        if len(starts) <= crashes:
            return 137, False
        run_ranks(lambda rank, world_size: run_stage(seed, run), RANKS)
        return 0, False

    monkeypatch.setattr("lightninglm.training.lineage.run_group", start_ranks)
    assert run_seed(lineage, run, restarts=restarts) == code
    assert len(starts) == min(crashes, restarts) + 1
    printed = capsys.readouterr().out
    assert printed.count("crashed with exit code 137: restart") == min(crashes, restarts)


def test_crashes_are_counted_since_the_last_new_checkpoint(lineage, tmp_path, monkeypatch, capsys):
    seed = load_lineage(lineage).recipes[0]
    run, starts = tmp_path / "run", []

    def save_one_step_and_stop(rank, world_size):
        logged = MetricsLogger.step

        def step(self, values):
            logged(self, values)
            os.kill(os.getpid(), signal.SIGTERM)

        MetricsLogger.step = step
        return run_stage(seed, run)

    def start_ranks(command, env):
        starts.append(command)
        crashes = len(starts) <= 3
        run_ranks(save_one_step_and_stop if crashes else lambda rank, world_size: run_stage(seed, run), RANKS)
        return (137 if crashes else 0), False

    monkeypatch.setattr("lightninglm.training.lineage.run_group", start_ranks)
    assert run_seed(lineage, run, restarts=1) == 0
    assert len(starts) == 4 and capsys.readouterr().out.count("restart 1 of 1") == 3


@pytest.mark.parametrize("code", [EXIT_BAD_INPUT, EXIT_NOT_FINITE, EXIT_STOPPED])
def test_what_would_end_alike_is_not_started_again(lineage, tmp_path, monkeypatch, code):
    starts = []
    monkeypatch.setattr("lightninglm.training.lineage.run_group", lambda *_: starts.append(1) or (code, False))
    assert run_seed(lineage, tmp_path / "run", restarts=2) == code
    assert len(starts) == 1


def run_seed(lineage, run, **options):
    """`run_lineage` on the first stage alone."""
    loaded = load_lineage(lineage)
    common = {"num_gpus": RANKS, "grow_chain": grow_chain, "stage_script": Path("launch/stage.py")}
    common |= {"overrides": [], "accept_changes": False, "console": Console()}
    return run_lineage(loaded.recipes[:1], loaded.files[:1], run, **common, **options)


def test_a_stage_whose_parent_never_ran_is_refused(lineage, tmp_path):
    recipe = load_lineage(lineage).recipes[1]
    with pytest.raises(ValueError, match="stage 'seed' has no complete checkpoint"):
        prepare_stage(recipe, tmp_path / "run", grow_chain)
    assert not (tmp_path / "run/moe").exists()
