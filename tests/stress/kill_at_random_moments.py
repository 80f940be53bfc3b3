"""
Kills a stage on two ranks with SIGKILL at random moments, saves included, and lets it go on, again and again.

    python tests/stress/kill_at_random_moments.py [--kills 100] [--seed 0] [--keep-folder DIR]

Half of the runs save asynchronously. After every kill each checkpoint there is must be sound in every byte, and the
next start must take the newest; no more steps may be lost than `checkpoint.every`, with asynchronous saves twice that
(a save that is still being written when the next one is due is waited for). Every run that reaches its end must have
the tensors of the undisturbed run, bit for bit. Prints a line per kill; exits with 1 at the first failure. The suite
does it with a few kills.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightninglm.checkpoint import CheckpointReader, list_checkpoints
from lightninglm.checkpoint.layout import TEMPORARY_PREFIX, parse_step
from lightninglm.recipe import load_recipe
from lightninglm.training.metrics import read_metrics
from lightninglm.training.stage import run_stage
from tests.distributed.ranks import run_ranks
from tests.training.small_run import SEQUENCE_LENGTH, make_run

STEPS, EVERY, KEEP, RANKS = 30, 4, 2, 2
SPREAD = 3  # a kill comes up to the time of so many steps after a random step
LONGEST_LIFE = 300.0  # seconds; a run that has not ended by then hangs


@dataclass
class Tally:
    """What the kills have met."""

    kills: int = 0
    finished: int = 0
    torn_saves: int = 0
    most_lost: int = 0


class Stage:
    """A stage in a folder of its own, started and killed as often as one likes."""

    def __init__(self, prepared: tuple[Path, Path], folder: Path, asynchronous: bool):
        source, self.recipe_file = prepared
        self.run = folder / "run"
        shutil.copytree(source, self.run)
        self.folder = self.run / "small"
        self.log = folder / "log.txt"
        self.asynchronous = asynchronous

    def live(self, kill_after: tuple[int, float] | None = None) -> int | None:
        """Starts the ranks; kills them all so many seconds after a step. Returns the exit code, None for a kill."""
        self.log.write_text("")
        pid = os.fork()
        if pid == 0:
            self._train()
        started = time.monotonic()
        deadline = started + LONGEST_LIFE
        while (now := time.monotonic()) < deadline:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if kill_after is not None and self.logged_steps() >= kill_after[0]:
                deadline = now + kill_after[1]
                kill_after = None
            time.sleep(0.002)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while _alive(pid):
            time.sleep(0.002)
        _require(now - started < LONGEST_LIFE, f"no end after {LONGEST_LIFE} s:\n{self.log.read_text()}")
        return None

    def _train(self) -> None:
        """In the forked process: the leader of a process group that holds the ranks."""
        os.setsid()
        output = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 1
        try:
            code = max(run_ranks(self._rank, RANKS))
        finally:
            os._exit(code)

    def _rank(self, rank: int, world_size: int) -> int:
        options = [
            f"train.tokens={STEPS * 8 * SEQUENCE_LENGTH}",
            f"train.expert_parallel={world_size}",
            "evaluate.every=1000",
            f"checkpoint={{every: {EVERY}, keep: {KEEP}, asynchronous: {str(self.asynchronous).lower()}}}",
        ]
        return run_stage(load_recipe(self.recipe_file, options), self.run)

    def check_checkpoints(self) -> int:
        """Checks every byte of every checkpoint; returns the newest step, 0 without one."""
        sound, skipped = list_checkpoints(self.folder, verify="full")
        _require(not skipped, f"torn: {', '.join(map(str, skipped))}")
        _require(len(sound) <= KEEP + 1, f"{len(sound)} checkpoints, of which {KEEP} should be kept")
        return parse_step(sound[0].name) if sound else 0

    def started_from(self) -> int | None:
        """The step that the last start went on from, None if it was killed before it said so."""
        text = self.log.read_text().replace("\n", "")
        found = re.search(r"goes on from \S*/(step-\d{8})|(starts from a fresh initialisation)", text)
        return found and (parse_step(found[1]) if found[1] else 0)

    def logged_steps(self) -> int:
        """The last step that was logged."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def result(self) -> tuple[dict[str, dict], list[float]]:
        """Hashes of all tensors at the end, and the losses of all steps."""
        manifest = CheckpointReader(self.folder / f"step-{STEPS:08d}", verify="full").manifest
        return manifest["tensors"], [row["loss"] for row in read_metrics(self.folder)]


def kill_at_random_moments(folder: Path, kills: int, seed: int) -> Tally:
    """The whole trial in `folder`. Raises SystemExit at the first failure."""
    (folder / "prepared").mkdir()
    prepared = make_run(folder / "prepared")
    undisturbed = Stage(prepared, folder / "undisturbed", asynchronous=False)
    started = time.monotonic()
    _require(undisturbed.live() == 0, undisturbed.log.read_text())
    step_seconds = (time.monotonic() - started) / STEPS
    expected = undisturbed.result()
    moments, tally, stage = random.Random(seed), Tally(), None
    while tally.kills < kills:
        if stage is None:
            stage = Stage(prepared, folder / f"run-{tally.finished}", asynchronous=tally.finished % 2 == 0)
            newest = 0
        code = stage.live((moments.randint(newest, STEPS), moments.uniform(0, SPREAD * step_seconds)))
        started_from = stage.started_from()
        _require(started_from in (None, newest), f"went on from step {started_from}, not from {newest}")
        if code is not None:
            _require(code == 0, f"exit code {code}:\n{stage.log.read_text()}")
            _require(stage.result() == expected, "the tensors or losses differ from those of the undisturbed run")
            tally.finished += 1
            print(f"{'':>8} run {tally.finished} has reached its end, equal to the undisturbed one", flush=True)
            shutil.rmtree(stage.run)
            stage = None
            continue
        tally.kills += 1
        torn = [path.name for path in stage.folder.glob(f"{TEMPORARY_PREFIX}step-*")]
        last, newest = max(stage.logged_steps(), newest), stage.check_checkpoints()
        lost, bound = last - newest, EVERY * (1 + stage.asynchronous)
        _require(lost <= bound, f"{lost} steps lost, {bound} are allowed")
        tally.torn_saves += bool(torn)
        tally.most_lost = max(tally.most_lost, lost)
        how = "asynchronous" if stage.asynchronous else "synchronous"
        inside = f", inside the save {torn[0].removeprefix(TEMPORARY_PREFIX)}" if torn else ""
        print(f"kill {tally.kills:>3} {how:>12} after step {last:>2}{inside}: goes on from {newest}", flush=True)
    return tally


def _require(condition: bool, failure: str) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {failure}")


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--keep-folder", type=Path, help="an empty folder to work in, which is not deleted")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:  # /tmp may be memory
        tally = kill_at_random_moments(args.keep_folder or Path(scratch), args.kills, args.seed)
    print(
        f"{tally.kills} kills, {tally.torn_saves} of them inside a save; {tally.finished} runs reached their end with "
        f"the undisturbed tensors; at most {tally.most_lost} steps were lost, with a checkpoint every {EVERY}"
    )


if __name__ == "__main__":
    main()
