"""Two processes never write one folder."""

import subprocess
import sys

import pytest

from lightninglm.checkpoint import CheckpointError, writer
from lightninglm.training.run_lock import RunLock, RunLockedError

HOLD = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from lightninglm.training.run_lock import RunLock\n"
    "with RunLock(Path(sys.argv[1])):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


def test_a_held_folder_is_refused_and_a_killed_holder_lets_go(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunLockedError, match=f"process {holder.pid}"), RunLock(tmp_path, wait_seconds=0):
        pass
    holder.kill()
    holder.wait()
    with RunLock(tmp_path, wait_seconds=0):
        pass


def test_a_full_disk_is_an_error_before_anything_else(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match="no room on the disk"), RunLock(tmp_path / "stage"):
        pass
