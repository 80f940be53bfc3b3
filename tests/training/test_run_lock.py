"""Two processes never write one folder."""

import subprocess
import sys

import pytest

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
