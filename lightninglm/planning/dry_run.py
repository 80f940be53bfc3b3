"""What training would do, stage by stage, from the recipes and what the run folder holds; nothing is started."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lightninglm.checkpoint.errors import free_bytes
from lightninglm.planning.devices import GIB
from lightninglm.planning.node import Machine, needed_on
from lightninglm.planning.plan import Setting, disk, lineage_disk
from lightninglm.planning.stages import Stage
from lightninglm.training.lineage import is_finished, where


def print_stages(
    stages: Sequence[Stage],
    commands: Sequence[Sequence[str]],
    run_folder: Path,
    ranks: int,
    machine: Machine,
    accept_changes: bool,
    console: Console,
) -> None:
    """
    Prints model, growth, data, steps, memory, disk and command of each stage, and what is done and comes next.

    Args:
        commands: that train the stages.
        machine: that memory is compared with.
    Raises RecipeError when a recipe was edited after its stage finished, CheckpointError for unreadable checkpoints.
    """
    finished = [is_finished(stage.recipe, run_folder, accept_changes) for stage in stages]
    begins = finished.index(False) if False in finished else None
    for number, (stage, command) in enumerate(zip(stages, commands, strict=True)):
        state = "finished" if finished[number] else where(stage.recipe, run_folder)
        console.rule(f"{number + 1} of {len(stages)}: {stage.recipe.name}", align="left")
        lines = {"state": f"{state}{'; next' if number == begins else ''}", **_lines(stage, ranks, machine)}
        for what, text in lines.items():
            console.print(f"  {what:<7} {text}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"  $ {shlex.join(command)}", highlight=False, markup=False, soft_wrap=True)
    console.rule(align="left")
    tokens, peak = sum(_tokens(stage) for stage in stages), lineage_disk(stages)
    console.print(
        f"stages: {len(stages)}, finished: {sum(finished)}; {tokens:,} tokens; disk: {peak / 1e9:,.1f} GB at the most, "
        f"{free_bytes(run_folder) / 1e9:,.1f} GB free at {run_folder}",
        highlight=False,
        soft_wrap=True,
    )


def _lines(stage: Stage, ranks: int, machine: Machine) -> dict[str, str]:
    recipe, setting = stage.recipe, Setting.of(stage, ranks)
    data, train, schedule = recipe.data, recipe.train, recipe.schedule_in_steps
    lines = {}
    if recipe.grow is not None:
        steps = [f"{name} {options}" for step in recipe.grow.steps for name, options in step.items()]
        moments = "optimizer state carried" if recipe.grow.moments else "optimizer state dropped"
        lines["grows"] = f"from {recipe.grow.source}: {'; '.join(steps) or 'as it is'}; {moments}"
    source = "none named; --set data.source=... (docs/data.md)" if data.source is None else data.source.kind
    mixture = ", ".join(f"{domain} {share:g}" for domain, share in data.mixture.items())
    lines["data"] = f"source {source}; sequences of {data.sequence_length:,}; {mixture}"
    accumulation = train.global_batch // (train.micro_batch * ranks)
    batch = f"{train.global_batch} sequences a step = {ranks} ranks x {train.micro_batch} x {accumulation}"
    lines["trains"] = (
        f"{recipe.total_steps:,} steps, {_tokens(stage):,} tokens; {batch}; peak rate "
        f"{recipe.optimizer.lr:g}, {schedule.kind} after {schedule.warmup_steps:,} steps; {train.dtype}"
    )
    needed = needed_on(setting, machine) / GIB
    verdict = "fits" if needed <= machine.memory else "DOES NOT FIT"
    zero = setting.ds_config()["zero_optimization"]["stage"]
    lines["memory"] = (
        f"{needed:.1f} GiB per rank (ZeRO {zero}, experts over {train.expert_parallel}): {verdict} the "
        f"{machine.memory:.1f} of this machine"
    )
    size = disk(stage)
    growth = f", {size['growth'] / 1e9:,.1f} GB while it grows" if size["growth"] else ""
    lines["disk"] = (
        f"{size['checkpoint'] / 1e9:,.1f} GB a checkpoint, every {recipe.checkpoint.every:,} steps, "
        f"{recipe.checkpoint.keep} kept{growth}"
    )
    return lines


def _tokens(stage: Stage) -> int:
    recipe = stage.recipe
    return recipe.total_steps * recipe.train.global_batch * recipe.data.sequence_length
