"""A save that dies leaves the old state, and a folder that nobody takes for a checkpoint."""

import errno
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIG, STATE, tensors, write

from lightninglm.checkpoint import (
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    explain,
    newest_checkpoint,
    prune,
    remove_leftovers,
    shards,
)


def in_child(function) -> int:
    """Exit code of a forked process that runs `function`."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def count_steps(monkeypatch, die_at: int | None = None) -> list[str]:
    """Every call by which the writer changes the disk, in order; the process ends before call `die_at`."""
    steps: list[str] = []

    def watch(owner, name):
        real = getattr(owner, name)

        def called(*args, **kwargs):
            if len(steps) == die_at:
                os._exit(137)
            steps.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    for owner, name in ((os, "rename"), (os, "fsync"), (Path, "open"), (Path, "mkdir"), (shards, "write_all")):
        watch(owner, name)
    return steps


def test_killed_before_any_change_of_the_disk_the_old_checkpoint_stays_and_the_new_one_is_whole_or_absent(
    tmp_path, monkeypatch
):
    stage = tmp_path / "stage"
    old = write(stage / "step-00000001")
    with monkeypatch.context() as patch:
        steps = count_steps(patch)
        write(stage / "step-00000002")
    committed = 0
    for die_at in range(len(steps)):
        target = stage / f"step-{die_at + 100:08d}"

        def save(die_at=die_at, target=target):
            count_steps(pytest.MonkeyPatch(), die_at)
            write(target)

        assert in_child(save) == 137
        newest, skipped = newest_checkpoint(stage, verify="full")
        assert skipped == []
        assert newest in (stage / "step-00000002", target) or committed
        committed += target.exists()
        assert explain(old) == []
    assert 0 < committed <= 2  # only a death after the rename finds the checkpoint there
    assert remove_leftovers(stage)
    assert not list(stage.glob(".tmp-*"))


def test_a_leftover_of_the_same_step_does_not_hinder_the_next_save(tmp_path):
    (tmp_path / ".tmp-c").mkdir()
    (tmp_path / ".tmp-c" / "model-00000-00000.safetensors").write_text("torn")
    assert explain(write(tmp_path / "c")) == []


def test_killed_while_deleting_no_half_checkpoint_is_left(tmp_path, monkeypatch):
    for step in range(3):
        write(tmp_path / f"step-{step:08d}")

    def die_after_rename():
        pytest.MonkeyPatch().setattr("shutil.rmtree", lambda *args, **kwargs: os._exit(137))
        prune(tmp_path, keep=2)

    assert in_child(die_after_rename) == 137
    assert [folder.name for folder in sorted(tmp_path.glob("step-*"))] == ["step-00000001", "step-00000002"]
    assert [path.name for path in remove_leftovers(tmp_path)] == [".tmp-deleted-step-00000000"]


@pytest.mark.parametrize("fail_at", range(0, 25, 2))
def test_a_full_disk_is_an_error_with_the_path_and_the_bytes(tmp_path, monkeypatch, fail_at):
    old = write(tmp_path / "step-00000001")
    calls = 0

    def full(real):
        def write_or_fail(*args):
            nonlocal calls
            calls += 1
            if calls > fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        return write_or_fail

    monkeypatch.setattr(os, "fsync", full(os.fsync))
    monkeypatch.setattr(shards, "write_all", full(shards.write_all))
    with pytest.raises(CheckpointError, match=r"no room on the disk.*bytes to write, [\d,]+ bytes free"):
        write(tmp_path / "step-00000002")
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    assert explain(old) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        full = pytest.raises(CheckpointError, match=r"model-00000-00000\.safetensors: no room on the disk")
        with full, CheckpointWriter(disk / "c") as writer:
            writer.add("a", torch.randn(500_000))
            writer.commit(CONFIG, STATE)
        assert list(disk.iterdir()) == []
        with pytest.raises(CheckpointError, match=r"2,000,000 bytes needed, 1,048,576 bytes free"):
            CheckpointWriter(disk / "c", expected_bytes=2_000_000)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_limit_on_the_size_of_files_is_an_error(tmp_path):
    def save():
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(CheckpointError, match="no room on the disk"):
            write(tmp_path / "c", shard_bytes=10_000)

    assert in_child(save) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_an_error(tmp_path, monkeypatch, code):
    def refuse(self, *args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(CheckpointError, match=r"stage: not writable"):
        CheckpointWriter(tmp_path / "stage" / "c")


def test_a_failed_save_can_be_repeated(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError):
        write(tmp_path / "c")
    monkeypatch.undo()
    reader = CheckpointReader(write(tmp_path / "c"), verify="full")
    assert torch.equal(reader.read("model.norm.weight"), tensors()["model.norm.weight"])
