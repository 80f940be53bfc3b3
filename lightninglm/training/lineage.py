"""Runs the stages of a lineage one after the other, each through the DeepSpeed launcher, from wherever it stopped."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from lightninglm.checkpoint import CheckpointReader, newest_checkpoint
from lightninglm.recipe import RecipeError
from lightninglm.training.interruption import EXIT_STOPPED
from lightninglm.training.prepare import prepare_stage
from lightninglm.training.run_lock import RunLock
from lightninglm.training.summary import print_summary, summarize, write_summary
from lightninglm.training.supervise import run_group

RESTARTS = 2
NOT_RESTARTED = (2, 3, EXIT_STOPPED)
"""Exit codes of a stage after which another start ends alike: bad input, non-finite steps, stopped as asked."""
LINEAGE_PID = "LIGHTNINGLM_LINEAGE_PID"  # lets the ranks save and stop when this process is killed


def run_lineage(
    recipes: list,
    files: list[Path],
    run_folder: Path,
    *,
    num_gpus: int,
    grow_chain: Callable,
    stage_script: Path,
    overrides: list[str],
    accept_changes: bool,
    console: Console,
    deadline: float | None = None,
    stop_file: Path | None = None,
    restarts: int = RESTARTS,
    memory_check: bool = True,
) -> int:
    """
    Trains every unfinished stage, grows between them, and ends with a table and `<run_folder>/summary.json`.

    Args:
        recipes, files: the stages in order, and the YAML file of each.
        num_gpus: ranks per stage (processes, on a machine without GPUs).
        grow_chain: `growth.chain.grow_chain`.
        stage_script: `launch/stage.py`, started by `deepspeed --num_gpus N`.
        overrides: `--set` values, passed on to every stage.
        accept_changes: continue although a recipe was edited after its stage began.
        deadline, stop_file: as for `run_stage`.
        restarts: how often a stage is started again after a crash; a checkpoint made in between starts the count anew.
        memory_check: whether stages refuse ranks with too little memory.
    Returns:
        0 when every stage has finished, else the exit code of what ended first.
    """
    arguments = [
        *(word for override in overrides for word in ("--set", override)),
        *(["--accept-changes"] if accept_changes else []),
        *(["--deadline", datetime.fromtimestamp(deadline).isoformat()] if deadline is not None else []),
        *(["--stop-file", str(stop_file)] if stop_file is not None else []),
        *([] if memory_check else ["--no-memory-check"]),
    ]
    with RunLock(run_folder):
        for number, (recipe, file) in enumerate(zip(recipes, files, strict=True), start=1):
            if is_finished(recipe, run_folder, accept_changes):
                console.print(f"[bold]{recipe.name}[/bold] finished already")
                continue
            console.rule(f"stage {number} of {len(recipes)}: {recipe.name}")
            crashes = 0  # since the stage last saved something new
            while True:
                console.print(where(recipe, run_folder))
                began_from, _ = newest_checkpoint(run_folder / recipe.name)
                with _Stopwatch(run_folder):
                    prepare_stage(recipe, run_folder, grow_chain)
                    if deadline is not None and time.time() >= deadline:
                        console.print(
                            f"the deadline passed before stage '{recipe.name}' began; the same command goes on"
                        )
                        return EXIT_STOPPED
                    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
                    launcher = (deepspeed, "--quiet", "--master_port", str(_free_port()))
                    command = stage_command(file, run_folder, num_gpus, stage_script, arguments, launcher)
                    code, asked = run_group(command, os.environ | {LINEAGE_PID: str(os.getpid())})
                if is_finished(recipe, run_folder, accept_changes=True) or asked or code in NOT_RESTARTED:
                    break
                got_to, _ = newest_checkpoint(run_folder / recipe.name)
                crashes = 1 if got_to != began_from else crashes + 1
                if crashes > restarts:
                    break
                console.print(
                    f"stage '{recipe.name}' crashed with exit code {code}: restart {crashes} of {restarts}",
                    style="yellow",
                )
            if not is_finished(recipe, run_folder, accept_changes=True):
                if asked or code == EXIT_STOPPED:
                    console.print(f"stopped in stage '{recipe.name}'; the same command goes on from there")
                    return 128 + 15 if asked else EXIT_STOPPED
                console.print(f"stage '{recipe.name}' ended with exit code {code} before it was finished", style="red")
                return code or 1
        summary = summarize(run_folder, [recipe.name for recipe in recipes], _Stopwatch.read(run_folder))
        write_summary(summary, run_folder / "summary.json")
    print_summary(summary, console)
    console.print(f"written to {run_folder / 'summary.json'}")
    return 0


def stage_command(
    file: Path,
    run_folder: Path,
    num_gpus: int,
    stage_script: Path,
    arguments: Sequence[str],
    launcher: Sequence[str] = ("deepspeed",),
) -> list[str]:
    """The command that trains one stage. arguments: of `stage_script`, besides recipe and run folder."""
    start = [*launcher, "--num_gpus", str(num_gpus), str(stage_script)]
    return [*start, "--recipe", str(file), "--run", str(run_folder), *arguments]


def where(recipe, run_folder: Path) -> str:
    """In words, how far a stage is: 'step 40 of 96, from <checkpoint>'."""
    folder, _ = newest_checkpoint(run_folder / recipe.name)
    if folder is None:
        return f"not begun, {recipe.total_steps:,} steps"
    step = CheckpointReader(folder, verify=None).trainer_state["step"]
    return f"step {step:,} of {recipe.total_steps:,}, from {folder}"


def is_finished(recipe, run_folder: Path, accept_changes: bool) -> bool:
    """Whether the stage's newest checkpoint is its last. Raises RecipeError when the recipe is not the one it ran."""
    folder, _ = newest_checkpoint(run_folder / recipe.name)
    if folder is None:
        return False
    state = CheckpointReader(folder, verify=None).trainer_state
    if state["finished"] and not accept_changes and not recipe.is_same(state["recipe"]):
        raise RecipeError(
            f"the recipe of stage '{recipe.name}' was edited after the stage finished in {folder}; use another run "
            "folder, or --accept-changes to keep the stage as it is"
        )
    return state["finished"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Stopwatch:
    """Adds the time spent in a block to `<run_folder>/wall_time.json`, interrupted runs included."""

    def __init__(self, run_folder: Path):
        self.path = run_folder / "wall_time.json"

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *exc_info) -> None:
        seconds = self.read(self.path.parent) + time.monotonic() - self.started
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"seconds": seconds}))
        os.replace(temporary, self.path)

    @staticmethod
    def read(run_folder: Path) -> float:
        path = run_folder / "wall_time.json"
        return json.loads(path.read_text())["seconds"] if path.exists() else 0.0
