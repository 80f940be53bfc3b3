"""Signals set a flag; a second Ctrl-C does not wait."""

import os
import signal
import subprocess
import sys

import pytest

from lightninglm.training.interruption import Interruption


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
