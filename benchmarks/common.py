"""What the benchmarks share: command line, description of the machine, medians and spread, table and JSON."""

import argparse
import json
import os
import platform
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


def parse_arguments(description: str) -> argparse.Namespace:
    """The options of every benchmark: `--quick` for a short run, `--json FILE` to write the figures."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements, under a minute or two")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, rows and targets to FILE")
    return parser.parse_args()


def machine() -> dict[str, str | int | float]:
    """What the figures depend on."""
    description = {
        "cpu": _proc_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name()
    return description


def _proc_value(file: str, key: str) -> str | None:
    if not Path(file).exists():
        return None
    lines = (line.partition(":") for line in Path(file).read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def median_and_spread(values: list[float]) -> tuple[float, float]:
    """The median, and the distance between the quartiles as a fraction of it."""
    median = statistics.median(values)
    if len(values) < 2:
        return median, 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (high - low) / median


def target(value: float, goal: float, better: str) -> dict[str, float | str]:
    """One entry of `targets`; `better` is "lower" or "higher"."""
    return {"value": value, "target": goal, "better": better}


def report(
    title: str,
    columns: dict[str, str],
    rows: list[dict[str, object]],
    targets: dict[str, dict[str, float | str]],
    json_file: Path | None,
) -> None:
    """
    Prints the rows and the targets as tables and writes them as JSON. A missed target is shown, never an error.

    Args:
        columns: key in a row -> heading, with its unit. Keys that have no column go to the JSON only.
        targets: name -> `target(...)`.
        json_file: where the JSON goes; None for nowhere.
    """
    about, console = machine(), Console()
    caption = f"{about['cpu']}, {about['threads']} of {about['cores']} cores, torch {about['torch']}"
    table = Table(title=title, caption=about.get("gpu", caption))
    for heading in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_text(row.get(key)) for key in columns))
    console.print(table)
    if targets:
        console.print(_goals(targets))
    if json_file is not None:
        write_json(json_file, {"machine": about, "rows": rows, "targets": targets})


def _goals(targets: dict[str, dict[str, float | str]]) -> Table:
    goals = Table(title="targets")
    for heading in ("name", "measured", "target", "met"):
        goals.add_column(heading, justify="left" if heading == "name" else "right")
    for name, goal in targets.items():
        value, goal_value, lower = goal["value"], goal["target"], goal["better"] == "lower"
        met = value <= goal_value if lower else value >= goal_value
        goals.add_row(name, _text(value), f"{'<=' if lower else '>='} {goal_value:g}", "yes" if met else "no")
    return goals


def write_json(file: Path, content: dict) -> None:
    """Replaces the file at once, so that a benchmark that is killed leaves its last state."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(file)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
