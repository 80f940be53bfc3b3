"""
Train one stage of a recipe. Start it with the DeepSpeed launcher:

    deepspeed --num_gpus 8 launch/stage.py --recipe recipes/paper/3-moe-5b.yaml --run runs/paper

The stage goes on from its newest checkpoint in <run>/<stage>; a stage with a `grow:` section first grows the last
checkpoint of its parent stage. Ctrl-C, SIGTERM, SIGUSR1, --deadline and --stop-file save at the next step and leave;
the same command goes on. Exit codes: 0 done, 2 bad input, 3 too many non-finite steps in a row, 75 stopped without a
signal, 128 + n by signal n (docs/distributed.md).
"""

import argparse
import contextlib
import time
from pathlib import Path

from growth.chain import grow_chain
from lightninglm.distributed import process_group
from lightninglm.recipe import load_recipe
from lightninglm.training.interruption import parse_deadline
from lightninglm.training.prepare import prepare_stage
from lightninglm.training.run_lock import RunLock
from lightninglm.training.stage import run_stage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, type=Path, help="YAML file of the stage")
    parser.add_argument("--run", required=True, type=Path, help="folder of the run; the stage gets a folder in it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe value, e.g. train.tokens=1e6"
    )
    parser.add_argument("--accept-changes", action="store_true", help="go on although the recipe was edited")
    parser.add_argument("--deadline", metavar="WHEN", help="save and stop before: 2h30m from now, or an ISO time")
    parser.add_argument("--stop-file", type=Path, metavar="PATH", help="save and stop when this file appears")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    args = parser.parse_args()

    process_group.init_distributed()
    with process_group.raise_together():
        deadline = parse_deadline(args.deadline, time.time()) if args.deadline else None
        recipe = load_recipe(args.recipe, args.set)
        recipe.check_world(process_group.world_size())
    with contextlib.ExitStack() as held:
        with process_group.raise_together():
            if process_group.is_main_rank():
                held.enter_context(RunLock(args.run / recipe.name))
                prepare_stage(recipe, args.run, grow_chain)
        return run_stage(
            recipe,
            args.run,
            accept_changes=args.accept_changes,
            deadline=deadline,
            stop_file=args.stop_file,
        )


if __name__ == "__main__":
    process_group.run(main)
