"""Where a run's numbers go: a progress line on the terminal, `metrics.jsonl`, and Weights & Biases when asked."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class MetricsLogger:
    """
    Writes one JSON object per optimizer step to `<folder>/metrics.jsonl` and shows progress. For rank 0 only.

    A resumed run drops the lines of steps after the checkpoint it resumes from, so the file reads as if the run had
    never stopped. With Weights & Biases the resumed run continues the same W&B run.

    Args:
        folder: the stage's folder.
        stage: name shown beside the bar.
        step: steps already done.
        total_steps: where the bar ends.
        wandb: `{"project": ..., "name": ...}` or None; `WANDB_MODE=offline` works as W&B documents it.
    """

    def __init__(self, folder: Path, stage: str, step: int, total_steps: int, wandb: dict[str, Any] | None = None):
        self.path = folder / "metrics.jsonl"
        self.stage = stage
        self.total_steps = total_steps
        self.console = Console()
        _drop_after(self.path, step)
        self._file = open(self.path, "a", encoding="utf-8")
        self._last_line = time.monotonic()
        self._progress = None
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task(stage, total=total_steps, completed=step, numbers="")
            self._progress.start()
        self._wandb = _start_wandb(folder, wandb, step) if wandb else None

    def step(self, values: dict[str, Any]) -> None:
        """Records one optimizer step; `values` needs `step`, `loss`, `tokens_per_second` and `learning_rate`."""
        self._file.write(json.dumps(_json_values(values), allow_nan=False) + "\n")
        self._file.flush()
        numbers = f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tok/s"
        if self._progress:
            self._progress.update(self._task, completed=values["step"], numbers=numbers)
        elif time.monotonic() - self._last_line > 5 or values["step"] in (1, self.total_steps):
            self._last_line = time.monotonic()
            rate = values["learning_rate"]["rest"]
            self.say(f"step {values['step']:>6}/{self.total_steps}  {numbers}  lr {rate:.2e}")
        if self._wandb:
            self._wandb.log(_flat(values), step=values["step"])

    def say(self, text: str) -> None:
        """One line for the person who watches."""
        self.console.print(f"[bold]{self.stage}[/bold] {text}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the bar and the files; the object is of no use afterwards."""
        if self._progress:
            self._progress.stop()
        self._file.close()
        if self._wandb:
            self._wandb.finish()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The recorded steps of a stage, oldest first; empty when it has none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _drop_after(path: Path, step: int) -> None:
    """Removes the lines of later steps, and a last line that a killed process left half written."""
    if not path.exists():
        return
    kept = [json.dumps(row) for row in read_metrics(path.parent) if row["step"] <= step]
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in kept))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _start_wandb(folder: Path, options: dict[str, Any], step: int):
    import wandb  # imported here: it costs seconds, and most runs do not use it

    id_file = folder / "wandb_run_id"
    if step == 0 or not id_file.exists():
        id_file.write_text(wandb.util.generate_id())
    return wandb.init(id=id_file.read_text(), resume="allow", dir=str(folder), **options)


def _json_values(values: Any) -> Any:
    """Numbers that are not finite as null: JSON has no others."""
    if isinstance(values, dict):
        return {key: _json_values(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat
