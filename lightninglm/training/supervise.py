"""Starts a program that starts others (the DeepSpeed launcher), passes signals on, and waits until all are gone."""

import os
import signal
import subprocess
import time

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_group(command: list[str], env: dict[str, str]) -> tuple[int, bool]:
    """
    Runs `command` in a process group of its own until every process of the group has ended.

    Ctrl-C, SIGTERM and SIGUSR1 reach the whole group, as SIGTERM, and the call goes on waiting, because the ranks save
    a checkpoint before they leave; a second Ctrl-C kills the group.

    Returns:
        (exit code of the command, whether a signal asked for the end).
    """
    process = subprocess.Popen(command, env=env, start_new_session=True)
    asked: list[int] = []

    def forward(number, frame):
        kill = number == signal.SIGINT and signal.SIGINT in asked
        asked.append(number)
        _signal_group(process.pid, signal.SIGKILL if kill else signal.SIGTERM)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        code = process.wait()
        while _signal_group(process.pid, 0):
            time.sleep(0.1)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code, bool(asked)


def _signal_group(pid: int, number: int) -> bool:
    """Sends a signal to the group; False when no process of it is left."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True
