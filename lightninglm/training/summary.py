"""What a lineage has reached: one table for the eye, one JSON for programs."""

import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightninglm.checkpoint import CheckpointReader, newest_checkpoint
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.parameter_count import count_parameters
from lightninglm.training.metrics import read_metrics

LAST_STEPS = 20  # the reported training loss is the mean over this many steps


def summarize(run_folder: Path, stages: list[str], wall_seconds: float) -> dict[str, Any]:
    """
    Collects the finished stages of `run_folder`.

    Returns:
        `{"stages": [{name, stored_parameters, active_parameters, tokens, train_loss, heldout}], "growth": [{name,
        relative_logit_difference, heldout_before, heldout_after, moments_carried}], "wall_seconds"}`; losses in nats
        per token, held-out ones per domain.
    """
    rows, growth = [], []
    for name in stages:
        folder, _ = newest_checkpoint(run_folder / name)
        if folder is None:
            continue
        reader = CheckpointReader(folder, verify=None)
        state = reader.trainer_state
        count = count_parameters(LightningLMConfig.from_dict(reader.config))
        applied = [row for row in read_metrics(run_folder / name) if "skipped" not in row]
        rows.append(
            {
                "name": name,
                "stored_parameters": count.stored,
                "active_parameters": count.active,
                "tokens": state["tokens"],
                "train_loss": fmean(row["loss"] for row in applied[-LAST_STEPS:]) if applied else None,
                "heldout": state["heldout"],
            }
        )
    for entry in state["lineage"] if rows else []:
        if "growth" in entry:
            receipt = entry["growth"]
            growth.append(
                {
                    "name": receipt["operator"],
                    "relative_logit_difference": receipt["relative_logit_difference"],
                    "heldout_before": receipt["heldout_before"],
                    "heldout_after": receipt["heldout_after"],
                    "moments_carried": receipt["moments_carried"],
                }
            )
    return {"stages": rows, "growth": growth, "wall_seconds": wall_seconds}


def write_summary(summary: dict[str, Any], path: Path) -> None:
    """Writes the JSON, replacing an older one in one step."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(summary, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Prints sizes, losses and growth steps as three tables that fit a terminal of 80 columns."""
    stages, growth = summary["stages"], summary["growth"]
    domains = sorted({domain for row in stages for domain in row["heldout"]})
    table = _table("Stages", "stage", "stored parameters", "active parameters", "tokens", "train loss")
    for row in stages:
        sizes = [f"{row[key]:,}" for key in ("stored_parameters", "active_parameters", "tokens")]
        table.add_row(row["name"], *sizes, f"{row['train_loss']:.4f}")
    console.print(table)
    table = _table("Held-out loss at the end of each stage (nats per token)", "stage", *domains)
    for row in stages:
        table.add_row(row["name"], *(_loss(row["heldout"].get(domain)) for domain in domains))
    console.print(table)
    if growth:
        headings = ("relative logit difference", "largest change of held-out loss", "moments carried")
        table = _table("Growth steps (nothing is trained between before and after)", "operator", *headings)
        for row in growth:
            before, after = row["heldout_before"], row["heldout_after"]
            change = max((after[domain] - before[domain] for domain in before), key=abs)
            difference = row["relative_logit_difference"]  # None between models of different tokenizers
            table.add_row(
                row["name"],
                "" if difference is None else f"{difference:.1e}",
                f"{change:+.1e}",
                f"{row['moments_carried']:,}",
            )
        console.print(table)
    console.print(f"wall time {summary['wall_seconds'] / 60:.1f} minutes")


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    return table
