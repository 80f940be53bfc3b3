"""What asks for a stop: all ranks save once and leave alike; a second Ctrl-C does not wait."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from lightninglm.recipe import load_recipe
from lightninglm.training import saving, stage
from lightninglm.training.interruption import EXIT_STOPPED, MARGIN, Deadline, Interruption, parse_deadline
from lightninglm.training.loop import Trainer
from lightninglm.training.metrics import MetricsLogger
from tests.distributed.ranks import run_ranks
from tests.training.small_run import make_run


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("prepared"), train__tokens=6 * 8 * 32)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop_and_the_old_handler_comes_back(number):
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.requested
        os.kill(os.getpid(), number)
        assert interruption.requested
        assert interruption.exit_code == 128 + number
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher adds a SIGTERM of its own; that is no second Ctrl-C
        assert interruption.exit_code == 128 + number
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_leaves_at_once():
    code = (
        "import os, signal\n"
        "from lightninglm.training.interruption import Interruption\n"
        "with Interruption():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and "still here" not in done.stdout


def test_a_run_stops_when_the_process_it_follows_is_gone():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    with Interruption(watch_pid=os.getpid()) as interruption:
        assert not interruption.requested
    with Interruption(watch_pid=child.pid) as interruption:
        assert interruption.requested and str(child.pid) in interruption.reason


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2h30m", 9000), ("45m", 2700), ("90s", 90), ("1d2h", 93600), ("1970-01-02T00:00:00+00:00", 86400)],
)
def test_deadlines_are_a_time_from_now_or_a_date(text, seconds):
    assert parse_deadline(text, 0.0) == seconds


@pytest.mark.parametrize("text", ["", "soon", "2h30", "30m2h", "2026-13-01T00:00"])
def test_a_deadline_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="needs a time from now such as 2h30m"):
        parse_deadline(text, 0.0)


def test_a_deadline_leaves_time_for_a_step_and_a_save():
    deadline = Deadline(at=10_000.0)
    deadline.took(step=30.0, save=100.0)
    deadline.took(step=10.0)  # shorter steps: the long one is forgotten slowly
    assert deadline.step_seconds == 27.0
    needed = MARGIN * (2 * 27.0 + 100.0)
    assert not deadline.is_due(10_000.0 - needed - 1) and deadline.is_due(10_000.0 - needed + 1)


def test_before_the_first_save_a_deadline_keeps_a_tenth_of_the_time_free():
    deadline = Deadline(at=time.time() + 100)
    assert not deadline.is_due(deadline.at - 13) and deadline.is_due(deadline.at - 11)


def test_a_stop_file_and_a_deadline_ask_for_a_stop(tmp_path):
    with Interruption(stop_file=tmp_path / "notice", deadline=Deadline(time.time() + 1000)) as interruption:
        assert not interruption.requested
        (tmp_path / "notice").touch()
        assert interruption.requested and interruption.exit_code == EXIT_STOPPED
        assert interruption.reason == f"{tmp_path / 'notice'} has appeared"
    with Interruption(deadline=Deadline(time.time())) as interruption:
        assert interruption.requested and "deadline" in interruption.reason


def test_all_ranks_take_over_the_reason_of_the_one_that_was_asked():
    interruption = Interruption()
    interruption.take_over([None, ("SIGUSR1", signal.SIGUSR1), ("SIGTERM", signal.SIGTERM)])
    assert interruption.reason == "SIGUSR1 (rank 1)" and interruption.exit_code == 128 + signal.SIGUSR1


@pytest.mark.parametrize("how", ["stop file", "deadline", "signal"])
def test_a_stage_saves_once_and_stops_on_all_ranks(prepared, tmp_path, capfd, how):
    source, file = prepared
    run, notice = tmp_path / "run", tmp_path / "notice"
    shutil.copytree(source, run)

    def body(rank, world_size):
        logged = MetricsLogger.step

        def step(self, values):
            logged(self, values)
            if how == "stop file" and values["step"] == 2:
                notice.touch()

        plain = Trainer._own_flags

        def own_flags(self):
            if how == "deadline" and rank == 0 and self.state["step"] == 2:
                self.interruption.deadline.at = time.time() + 0.01
            if how == "signal" and rank == 1 and self.state["step"] == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            return plain(self)

        saves = []
        save = saving.save_checkpoint

        def counted(*args, **options):
            saves.append(1)
            return save(*args, **options)

        MetricsLogger.step, Trainer._own_flags, saving.save_checkpoint = step, own_flags, counted
        recipe = load_recipe(file, ["train.expert_parallel=2", "checkpoint.every=3", "evaluate.every=100"])
        return stage.run_stage(recipe, run, deadline=time.time() + 3600, stop_file=notice), len(saves)

    code = 128 + signal.SIGUSR1 if how == "signal" else EXIT_STOPPED
    assert run_ranks(body, 2) == [(code, 1)] * 2
    assert [folder.name for folder in (run / "small").glob("step-*")] == ["step-00000003"]
    printed = capfd.readouterr().out
    reason = {"stop file": f"{notice} has appeared", "deadline": "the deadline", "signal": "SIGUSR1 (rank 1)"}[how]
    assert f"stopped after step 3, exit code {code}: {reason}" in printed and "the same command goes on" in printed
