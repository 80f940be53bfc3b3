"""Saves behind training: the same checkpoints, at most one at a time, and nothing that fails in silence."""

import errno
import json
import os
import shutil
import signal
import time

import pytest

from lightninglm.checkpoint import CheckpointReader, list_checkpoints, writer
from lightninglm.recipe import load_recipe
from lightninglm.training import saving
from lightninglm.training.metrics import MetricsLogger, read_metrics
from lightninglm.training.stage import run_stage
from tests.distributed.ranks import RankFailed, run_ranks
from tests.training.small_run import make_run

OPTIONS = ["train.expert_parallel=2", "train.tokens=2048", "evaluate.every=100"]  # 8 steps
BEHIND = "checkpoint={every: 2, keep: 2, asynchronous: true}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def start(prepared, tmp_path):
    """Runs the stage on two ranks in a folder of its own, after `setup(rank)` on each."""
    source, file = prepared

    def run(name, *options, setup=lambda rank: None):
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(source, folder)

        def body(rank, world_size):
            setup(rank)
            return run_stage(load_recipe(file, [*OPTIONS, *options]), folder)

        return folder / "small", run_ranks(body, 2)

    return run


def slow_writes(rank: int) -> None:
    """Every shard takes a second longer than it would."""
    write = writer.write_parts
    writer.write_parts = lambda *args: (time.sleep(1.0), write(*args))


def names(folder):
    return sorted(path.name for path in folder.glob("*step-*"))


def test_a_stage_that_saves_behind_training_leaves_the_checkpoints_of_one_that_waits(start, capfd):
    at_once, codes = start("at-once", "checkpoint={every: 2, keep: 2}")
    behind, more_codes = start("behind", BEHIND, setup=slow_writes)
    assert codes == more_codes == [0, 0]
    assert names(behind) == names(at_once) == ["step-00000006", "step-00000008"]
    for name in names(behind):
        one, other = (CheckpointReader(folder / name, verify="full") for folder in (at_once, behind))
        assert one.manifest["tensors"] == other.manifest["tensors"]
        changing = ("wall_seconds", "recipe", "recipe_sha256")
        states = [{k: v for k, v in r.trainer_state.items() if k not in changing} for r in (one, other)]
        assert states[0] == states[1]
    hashes = [json.loads((folder / "hashes.json").read_text()) for folder in (at_once, behind)]
    assert hashes[0] == hashes[1]
    printed = capfd.readouterr().out
    assert "asynchronous saves take" in printed and "it is written behind training" in printed
    assert "step-00000004 waits for the save before, which is still being written" in printed


@pytest.mark.parametrize("rank_of_failure", [0, 1])
def test_a_failed_write_stops_all_ranks_with_its_reason_and_the_checkpoints_before_stay(
    start, tmp_path, rank_of_failure
):
    def fail_from_step_6(rank):
        write = writer.write_parts

        def write_or_fail(path, parts):
            if rank == rank_of_failure and "step-00000006" in str(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            write(path, parts)

        writer.write_parts = write_or_fail

    with pytest.raises(RankFailed, match=rf"rank {rank_of_failure}: .*could not be written \(Input/output error\)"):
        start("failing", BEHIND, setup=fail_from_step_6)
    sound, skipped = list_checkpoints(tmp_path / "failing/small", verify="full")
    assert [folder.name for folder in sound] == ["step-00000004", "step-00000002"] and skipped == []
    assert not list((tmp_path / "failing/small").glob(".tmp-*"))


def test_a_stop_waits_for_the_save_that_is_being_written_and_then_for_its_own(start):
    def stop_after_step_2(rank):
        slow_writes(rank)
        logged = MetricsLogger.step

        def step(self, values):
            logged(self, values)
            if values["step"] == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        MetricsLogger.step = step

    folder, codes = start("stopped", BEHIND, setup=stop_after_step_2)
    assert codes == [128 + signal.SIGTERM] * 2
    assert names(folder) == ["step-00000002", "step-00000003"]
    assert list_checkpoints(folder, verify="full")[1] == []


def test_an_error_of_training_waits_for_the_save_that_is_being_written(start, tmp_path):
    def fail_after_step_3(rank):
        slow_writes(rank)
        logged = MetricsLogger.step

        def step(self, values):
            logged(self, values)
            if values["step"] == 3:
                raise RuntimeError("a defect")

        MetricsLogger.step = step

    with pytest.raises(RankFailed, match="a defect"):
        start("broken", BEHIND, setup=fail_after_step_3)
    assert names(tmp_path / "broken/small") == ["step-00000002"]


def test_too_little_room_on_the_disk_or_in_the_memory_is_an_error_before_the_first_step(start, tmp_path):
    def small_disk(rank):
        writer.free_bytes = lambda path: 1000

    with pytest.raises(RankFailed, match=r"no room on the disk: [\d,]+ bytes needed, 1,000 bytes free"):
        start("disk", setup=small_disk)

    def small_memory(rank):
        saving.host_memory = lambda engine: (2000, 1000, "node-7")

    with pytest.raises(RankFailed, match=r"checkpoint\.asynchronous.*node-7 take 2,000 bytes of memory, 1,000 are"):
        start("memory", BEHIND, setup=small_memory)
    for name in ("disk", "memory"):
        assert read_metrics(tmp_path / name / "small") == []
