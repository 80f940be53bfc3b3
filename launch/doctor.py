"""
Look for what stands in the way of a run, before it starts or after it failed.

    python launch/doctor.py --recipe recipes/preserving --num-gpus 8 --run runs/preserving   this machine, for a recipe
    python launch/doctor.py checkpoint runs/preserving [--full]                              checkpoints of a run
    python launch/doctor.py hashes runs/first runs/second                                    two runs, tensor by tensor

Nothing is changed. Exit code 0: no problem (the same tensors), 1: a problem (a difference), 2: bad input.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from growth.progress import transfer_bar
from lightninglm.checkpoint import CheckpointError, Comparison, compare_hashes, read_hashes
from lightninglm.doctor.checkpoints import bytes_to_check, check_checkpoints
from lightninglm.doctor.checks import Check, as_json, exit_code, print_checks
from lightninglm.doctor.environment import check_environment, check_plan, rank_memory

SHOWN = 10  # tensors of one stage, of each kind


class BadRecipe(ValueError):
    """A recipe that cannot be planned."""


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments, argparse.Namespace(json=False))
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        return {"checkpoint": _checkpoint, "hashes": _hashes, None: _environment}[args.command](args, console)
    except (BadRecipe, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _environment(args: argparse.Namespace, console: Console) -> int:
    ranks, of_recipe = args.num_gpus, []
    if args.recipe is not None:  # bad input first
        try:
            ranks, plan = _plan(args.recipe, args.num_gpus)
            of_recipe = check_plan(plan, args.run)
        except ImportError as error:
            of_recipe = [Check("recipe", "problem", f"not checked: {error}", "pip install -r requirements.txt")]
    checks = [*check_environment(args.run, ranks), *of_recipe]
    return _report("this machine", checks, args.json, console)


def _plan(recipe: Path, gpus: int | None) -> tuple[int, dict[str, Any]]:
    """Ranks and plan of a recipe. Imports what it needs itself: the report must come without DeepSpeed too."""
    from growth.errors import GrowthError
    from growth.grown_config import grown_configs
    from lightninglm.distributed.ds_config import DsConfigError
    from lightninglm.planning.plan import Node, plan_lineage
    from lightninglm.planning.stages import load_stages
    from lightninglm.recipe import RecipeError

    try:
        stages, ranks = load_stages(recipe, grown_configs, (), gpus)
        return ranks, plan_lineage(stages, Node(ranks, rank_memory(ranks), 1.0, (0.3,)))
    except (RecipeError, DsConfigError, GrowthError) as error:
        raise BadRecipe(str(error)) from error


def _checkpoint(args: argparse.Namespace, console: Console) -> int:
    shown = args.full and not args.json
    with transfer_bar(bytes_to_check(args.folder), "reading", shown) as done:
        checks = check_checkpoints(args.folder, "full" if args.full else "fast", done)
    how = "every byte" if args.full else "sizes, heads and a sample of the tensors; every byte with --full"
    return _report(f"checkpoints in {args.folder}, checked: {how}", checks, args.json, console)


def _hashes(args: argparse.Namespace, console: Console) -> int:
    first, second = read_hashes(args.first), read_hashes(args.second)
    if ("" in first) != ("" in second):
        raise CheckpointError(f"{args.first} and {args.second}: one is a run, the other a single stage; give two alike")
    results = {stage: compare_hashes(first[stage].tensors, second[stage].tensors) for stage in first if stage in second}
    lacking = {
        str(args.first): [s for s in second if s not in first],
        str(args.second): [s for s in first if s not in second],
    }
    same = all(result.same for result in results.values()) and not any(lacking.values())
    order = list(first) + lacking[str(args.first)]
    first_difference = next((stage for stage in order if stage not in results or not results[stage].same), None)
    if args.json:
        stages = {stage: {**vars(result), "same": result.same} for stage, result in results.items()}
        found = {"same": same, "first_difference": first_difference, "stages": stages, "lacking": lacking}
        print(json.dumps(found, indent=1))
        return int(not same)
    for stage, result in results.items():
        a, b = first[stage].checkpoint, second[stage].checkpoint
        _print_stage(f"{stage or 'the stage'} ({a if a == b else f'{a} and {b}'})", result, args, console)
    for run, stages in lacking.items():
        for stage in stages:
            console.print(f"[red]missing[/red]    {run} has no stage {stage}")
    if first_difference:
        console.print(f"the first stage that differs is {first_difference}")
    return int(not same)


def _print_stage(name: str, result: Comparison, args: argparse.Namespace, console: Console) -> None:
    if result.same:
        console.print(f"[green]equal[/green]      {name}: {result.equal:,} tensors")
        return
    console.print(f"[red]different[/red]  {name}: {len(result.different):,} tensors differ, {result.equal:,} are equal")
    alone = [(f"only in {args.first}", result.only_first), (f"only in {args.second}", result.only_second)]
    for what, names in [("differs", result.different), *alone]:
        for tensor in names[:SHOWN]:
            console.print(f"    {what}: {tensor}", highlight=False, markup=False)
        if len(names) > SHOWN:
            console.print(f"    ... and {len(names) - SHOWN:,} more")


def _report(title: str, checks: list[Check], as_object: bool, console: Console) -> int:
    if as_object:
        print(
            json.dumps(
                {"problems": sum(check.state == "problem" for check in checks), "checks": as_json(checks)}, indent=1
            )
        )
    else:
        print_checks(title, checks, console)
    return exit_code(checks)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of GPUs, at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[shared]
    )
    parser.add_argument(
        "--recipe", type=Path, help="lineage folder or YAML file of a stage, checked against this machine"
    )
    parser.add_argument(
        "--run", type=Path, help="folder the checkpoints will be in (default: the current folder's disk)"
    )
    parser.add_argument("--num-gpus", type=_positive, metavar="N", help="ranks (default: world_size of lineage.yaml)")
    commands = parser.add_subparsers(dest="command", metavar="{checkpoint,hashes}")
    checkpoint = commands.add_parser(
        "checkpoint", parents=[shared], help="what is wrong with a checkpoint, stage or run"
    )
    checkpoint.add_argument("folder", type=Path, help="a checkpoint, the folder of a stage, or of a run")
    checkpoint.add_argument("--full", action="store_true", help="check every byte, not sizes and a sample")
    hashes = commands.add_parser(
        "hashes", parents=[shared], help="compare the tensors of two runs, stages or checkpoints"
    )
    hashes.add_argument("first", type=Path, help="a run, a stage, a checkpoint or a hashes.json")
    hashes.add_argument("second", type=Path, help="the same of the other run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
