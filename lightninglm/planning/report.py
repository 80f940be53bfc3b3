"""A plan as tables for people."""

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from lightninglm.planning.devices import DEVICES, GIB


def print_plan(plan: dict[str, Any], device: str, console: Console) -> None:
    """
    Prints the plan of `planning.plan.plan_lineage`.

    Args:
        device: the kind of GPU that speed, hours and cost are shown for.
    """
    stages = plan["stages"]
    for table in (_models(stages), _memory(stages, plan), _activations(stages), _fits(stages), _disk(stages)):
        console.print(table)
    console.print(_time(plan, device))
    for stage in stages:
        model, asked = stage["model"], stage["asked"]
        if "adapters" in model:
            console.print(
                f"{stage['name']}: {model['routed_weights']:,} routed weights frozen, {model['adapters']:,} adapter "
                f"parameters trained: optimizer state {model['optimizer_ratio']:.1f} times smaller"
            )
        if not asked["fits"]:
            changes = asked["smallest_change"]
            text = "nothing here makes it fit" if changes is None else "smallest change: " + "; ".join(changes)
            console.print(
                f"{stage['name']}: needs {stage['per_gpu']['needed'] / GIB:.1f} GiB per GPU, "
                f"{asked['gpu_memory_gib']:g} given; {text}"
            )
    console.print(
        "Exact: parameters, weights, gradients, optimizer, checkpoints. Measured within 10 %: activations. Estimates: "
        "communication, allowances, speed. See docs/plan.md."
    )


def _table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    return table


def _models(stages: list[dict[str, Any]]) -> Table:
    def row(stage):
        model = stage["model"]
        keys = ("stored", "active", "stored_with_second_token", "active_with_second_token", "adapters")
        experts = f"{model['experts_per_token']} of {model['experts']}" if model["experts"] else ""
        return [stage["name"], str(model["layers"]), experts, *(f"{model[k]:,}" if k in model else "" for k in keys)]

    headings = ("stage", "layers", "experts", "stored", "active", "stored, with 2nd token", "active, with it")
    return _table("Parameters (adapters counted apart)", (*headings, "adapters"), map(row, stages))


def _gib(value: int) -> str:
    return f"{value / GIB:.2f}"


def _memory(stages: list[dict[str, Any]], plan: dict[str, Any]) -> Table:
    parts = ("weights", "quantized_base", "adapters", "gradients", "optimizer", "communication")

    def row(stage):
        per_gpu, schedule = stage["per_gpu"], stage["schedule"]
        trained = per_gpu["activations"]["trained_with"]
        return [
            stage["name"],
            f"{schedule['micro_batch']} x {schedule['sequence_length']}",
            *(_gib(per_gpu[part]) for part in parts),
            *map(_gib, (trained, per_gpu["dispatch"], per_gpu["loss"], per_gpu["peak"], per_gpu["needed"])),
            "yes" if stage["asked"]["fits"] else "NO",
        ]

    headings = ("stage", "micro-batch", "weights", "base", "adapters", "grads", "Adam", "comm.", "activ.")
    return _table(
        f"GiB on each of {plan['gpus']} GPUs (dispatch is part of activations; the loss is another phase)",
        (*headings, "dispatch", "loss", "peak", "needed", f"fits {plan['gpu_memory_gib']:g}"),
        map(row, stages),
    )


def _activations(stages: list[dict[str, Any]]) -> Table:
    def row(stage):
        ways, depths = stage["per_gpu"]["activations"], stage["activations_by_depth"]
        return [
            stage["name"],
            *(_gib(ways[way]) for way in ("reversible", "checkpointed", "plain")),
            *(_gib(depths[depth]["reversible"]) for depth in depths),
        ]

    depths = stages[0]["activations_by_depth"]
    headings = ("stage", "reversible", "checkpointed", "plain", *(f"reversible, {depth} layers" for depth in depths))
    return _table("GiB of activations, by how the stack is trained and by its depth", headings, map(row, stages))


def _fits(stages: list[dict[str, Any]]) -> Table:
    def cell(fit):
        largest = fit["largest_micro_batch"]
        return "-" if largest is None else f"{largest}" if fit["fits"] else f"{largest} (recipe: no)"

    return _table(
        "Largest micro-batch that fits",
        ("stage", "recipe", *(f"{name} ({device.memory:g} GiB)" for name, device in DEVICES.items())),
        (
            [stage["name"], str(stage["schedule"]["micro_batch"]), *map(cell, stage["fits"].values())]
            for stage in stages
        ),
    )


def _disk(stages: list[dict[str, Any]]) -> Table:
    return _table(
        "GB of disk (10^9 bytes)",
        ("stage", "one checkpoint", "all it keeps", "between growth steps"),
        ([s["name"], *(f"{s['disk'][k] / 1e9:,.0f}" for k in ("checkpoint", "stage", "growth"))] for s in stages),
    )


def _time(plan: dict[str, Any], device: str) -> Table:
    price, total = plan["price_per_gpu_hour"], plan["total"]["time"][device]

    def cells(rows: list[dict[str, float]], value: Callable[[dict[str, float]], str]) -> list[str]:
        return [value(row) for row in rows]

    shares = [f"{row['utilisation']:.0%}" for row in total]
    headings = ("stage", "steps", "tokens", "GFLOP per token")
    headings += tuple(f"tokens/s at {share}" for share in shares) + tuple(f"hours at {share}" for share in shares)
    headings += tuple(f"cost at {share}" for share in shares)
    table = _table(f"{plan['gpus']} x {device}, {price:g} per GPU-hour", headings, ())
    for stage in plan["stages"]:
        schedule, rows = stage["schedule"], stage["time"][device]
        table.add_row(
            stage["name"],
            f"{schedule['steps']:,}",
            f"{schedule['tokens'] / 1e9:.2f}B",
            f"{stage['flops_per_token']['hardware'] / 1e9:.1f}",
            *cells(rows, lambda row: f"{row['tokens_per_second']:,.0f}"),
            *cells(rows, lambda row: f"{row['hours']:,.1f}"),
            *cells(rows, lambda row: f"{row['cost']:,.0f}"),
        )
    table.add_row(
        "all",
        "",
        f"{plan['total']['tokens'] / 1e9:.2f}B",
        "",
        *[""] * len(shares),
        *cells(total, lambda row: f"{row['hours']:,.1f}"),
        *cells(total, lambda row: f"{row['cost']:,.0f}"),
    )
    return table
