"""
Train a whole lineage on one node: stage after stage, each grown from the last.

    python launch/lineage.py recipes/tiny --run runs/tiny
    python launch/lineage.py recipes/preserving --dry-run                       what it would do; nothing starts
    python launch/lineage.py recipes/preserving --rehearse 64 --num-gpus 2      all of it on CPU ranks, but narrow

Goes on wherever it stopped, starts a stage that crashed again, and refuses a node that is too small before anything is
loaded. Ctrl-C or SIGTERM saves at the next step. Ends with a table and <run>/summary.json.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from growth.chain import grow_chain
from growth.errors import GrowthError, ReceiptError
from growth.grown_config import grown_configs
from lightninglm.checkpoint import CheckpointError
from lightninglm.data.corpus import DataError
from lightninglm.distributed.ds_config import DsConfigError
from lightninglm.doctor.environment import rank_memory
from lightninglm.planning.dry_run import print_stages
from lightninglm.planning.node import Machine, NodeTooSmallError, check_machine
from lightninglm.planning.plan import Setting
from lightninglm.planning.stages import load_stages
from lightninglm.recipe import Lineage, RecipeError, load_lineage
from lightninglm.training.interruption import parse_deadline
from lightninglm.training.lineage import RESTARTS, is_finished, run_lineage, stage_command
from lightninglm.training.rehearsal import print_rules, write_rehearsal
from lightninglm.training.run_lock import RunLockedError

STAGE_SCRIPT = Path(__file__).with_name("stage.py")


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    console = Console()
    try:
        deadline = parse_deadline(args.deadline, time.time()) if args.deadline else None
    except ValueError as error:
        parser.error(str(error))
    try:
        lineage = load_lineage(args.lineage, args.set, None if args.rehearse else args.num_gpus)
        name = f"{lineage.name}-rehearsal" if args.rehearse else lineage.name
        run, overrides = args.run or Path("runs") / name, args.set
        if args.rehearse:
            real, overrides = lineage, []
            lineage = write_rehearsal(real, args.rehearse, args.num_gpus or real.world_size, run)
            print_rules(real, lineage, args.rehearse, console)
        ranks = lineage.world_size
        machine = Machine(torch.cuda.device_count(), rank_memory(ranks))
        if args.dry_run:
            _dry_run(args, lineage, run, machine, console)
            return 0
        if not args.no_memory_check:
            _check_machine(lineage, run, overrides, machine, args.accept_changes)
        return run_lineage(
            lineage.recipes,
            lineage.files,
            run,
            num_gpus=ranks,
            grow_chain=grow_chain,
            stage_script=STAGE_SCRIPT,
            overrides=overrides,
            accept_changes=args.accept_changes,
            console=console,
            deadline=deadline,
            stop_file=args.stop_file,
            restarts=args.restarts,
            memory_check=not args.no_memory_check,
        )
    except ReceiptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (
        RecipeError, DsConfigError, CheckpointError, GrowthError, DataError, RunLockedError, NodeTooSmallError,
    ) as error:  # fmt: skip
        print(f"error: {error}", file=sys.stderr)
        return 2


def _dry_run(args: argparse.Namespace, lineage: Lineage, run: Path, machine: Machine, console: Console) -> None:
    stages, ranks = load_stages(args.lineage, grown_configs, args.set, lineage.world_size)
    passed_on = [word for override in args.set for word in ("--set", override)]
    commands = [stage_command(file, run, ranks, STAGE_SCRIPT, passed_on) for file in lineage.files]
    print_stages(stages, commands, run, ranks, machine, args.accept_changes, console)


def _check_machine(lineage: Lineage, run: Path, overrides: list[str], machine: Machine, accept_changes: bool) -> None:
    """Refuses a machine that the stages still to be trained do not fit."""
    steps = [step for recipe in lineage.recipes if recipe.grow for step in recipe.grow.steps]
    if any("resize_vocabulary" in step for step in steps):
        return  # a size that only the new tokenizer knows; the stages check themselves when they start
    stages, ranks = load_stages(lineage.files[0].parent, grown_configs, overrides, lineage.world_size)
    ahead = [stage for stage in stages if not is_finished(stage.recipe, run, accept_changes)]
    check_machine({stage.recipe.name: Setting.of(stage, ranks) for stage in ahead}, ranks, machine)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lineage", type=Path, help="folder of recipes with a lineage.yaml")
    parser.add_argument("--run", type=Path, help="folder of the run (default: runs/<name of the lineage>)")
    parser.add_argument("--num-gpus", type=int, help="ranks per stage (default: world_size of lineage.yaml)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value in every stage"
    )
    parser.add_argument("--deadline", metavar="WHEN", help="save and stop before: 2h30m from now, or an ISO time")
    parser.add_argument("--stop-file", type=Path, metavar="PATH", help="save and stop when this file appears")
    parser.add_argument("--accept-changes", action="store_true", help="go on although a recipe was edited")
    parser.add_argument(
        "--restarts",
        type=int,
        default=RESTARTS,
        metavar="N",
        help=f"of a stage that crashed before it saved anything new (default {RESTARTS})",
    )
    parser.add_argument("--no-memory-check", action="store_true", help="start although the ledger says too small")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print the whole plan; start and write nothing")
    instead.add_argument("--rehearse", type=int, metavar="N", help="all stages for a few steps, widths divided by N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
