"""
Train one stage of a recipe. Start it with the DeepSpeed launcher:

    deepspeed --num_gpus 8 launch/stage.py --recipe recipes/paper/3-moe-5b.yaml --run runs/paper

The stage goes on from its newest checkpoint in <run>/<stage>; a stage with a `grow:` section first grows the last
checkpoint of its parent stage. Ctrl-C, SIGTERM, SIGUSR1, --deadline and --stop-file save at the next step and leave;
the same command goes on. Exit codes: 0 done, 2 bad input, 3 too many non-finite steps in a row, 75 stopped without a
signal, 128 + n by signal n (docs/distributed.md).

    python launch/stage.py --recipe recipes/paper/3-moe-5b.yaml --run runs/paper --dry-run       nothing starts
"""

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch
from rich.console import Console

from growth.chain import grow_chain
from growth.grown_config import grown_configs
from lightninglm.checkpoint import newest_checkpoint
from lightninglm.distributed import process_group
from lightninglm.doctor.environment import rank_memory
from lightninglm.planning.dry_run import print_stages
from lightninglm.planning.node import Machine, check_machine
from lightninglm.planning.plan import Setting
from lightninglm.planning.stages import load_stages
from lightninglm.recipe import Recipe, load_recipe
from lightninglm.training.interruption import parse_deadline
from lightninglm.training.lineage import stage_command
from lightninglm.training.prepare import finished_checkpoint, prepare_stage, stage_config
from lightninglm.training.run_lock import RunLock
from lightninglm.training.stage import run_stage


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.dry_run:
        with process_group.raise_together():
            _dry_run(args)
        return 0
    process_group.init_distributed()
    with process_group.raise_together():
        deadline = parse_deadline(args.deadline, time.time()) if args.deadline else None
        recipe = load_recipe(args.recipe, args.set)
        recipe.check_world(process_group.world_size())
    with contextlib.ExitStack() as held:
        with process_group.raise_together():
            if process_group.is_main_rank():
                if not args.no_memory_check:
                    _check_machine(recipe, args.run)
                held.enter_context(RunLock(args.run / recipe.name))
                prepare_stage(recipe, args.run, grow_chain)
        return run_stage(
            recipe,
            args.run,
            accept_changes=args.accept_changes,
            deadline=deadline,
            stop_file=args.stop_file,
        )


def _check_machine(recipe: Recipe, run: Path) -> None:
    """Refuses ranks with less memory than the stage needs."""
    config = stage_config(recipe, run, grown_configs)
    if config is None:
        return
    ranks = process_group.world_size()
    here = int(os.environ.get("LOCAL_SIZE", ranks))  # the launcher's ranks on this node
    machine = Machine(torch.cuda.device_count(), rank_memory(here))
    check_machine({recipe.name: Setting.of_recipe(recipe, config, ranks)}, here, machine)


def _dry_run(args: argparse.Namespace) -> None:
    """Checks recipe, DeepSpeed configuration, ranks, checkpoints and memory, and prints what training would do."""
    stages, ranks = load_stages(args.recipe, grown_configs, args.set, args.num_gpus)
    (stage,), console = stages, Console()
    passed_on = [word for override in args.set for word in ("--set", override)]
    command = stage_command(args.recipe, args.run, ranks, Path(__file__), passed_on)
    machine = Machine(torch.cuda.device_count(), rank_memory(ranks))
    print_stages(stages, [command], args.run, ranks, machine, args.accept_changes, console)
    grow = stage.recipe.grow
    if grow is not None and newest_checkpoint(args.run / stage.recipe.name)[0] is None:
        if newest_checkpoint(args.run / grow.source)[0] is None:
            console.print(f"its parent stage '{grow.source}' has no checkpoint in {args.run} yet", highlight=False)
        else:
            console.print(f"grows from {finished_checkpoint(args.run, grow.source)}", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, type=Path, help="YAML file of the stage")
    parser.add_argument("--run", required=True, type=Path, help="folder of the run; the stage gets a folder in it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe value, e.g. train.tokens=1e6"
    )
    parser.add_argument("--accept-changes", action="store_true", help="go on although the recipe was edited")
    parser.add_argument("--deadline", metavar="WHEN", help="save and stop before: 2h30m from now, or an ISO time")
    parser.add_argument("--stop-file", type=Path, metavar="PATH", help="save and stop when this file appears")
    parser.add_argument("--no-memory-check", action="store_true", help="start with less memory than the ledger says")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; without the launcher")
    parser.add_argument(
        "--num-gpus",
        type=int,
        metavar="N",
        help="ranks of a --dry-run (default: those of lineage.yaml)",
    )
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser


if __name__ == "__main__":
    process_group.run(main)
