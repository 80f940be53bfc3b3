"""
Train a whole lineage on one node: stage after stage, each grown from the last.

    python launch/lineage.py recipes/tiny --run runs/tiny

Goes on wherever it stopped; Ctrl-C or SIGTERM saves at the next step. Ends with a table and <run>/summary.json.
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from growth.chain import grow_chain
from growth.errors import GrowthError, ReceiptError
from lightninglm.checkpoint import CheckpointError
from lightninglm.data.corpus import DataError
from lightninglm.recipe import RecipeError, load_lineage
from lightninglm.training.interruption import parse_deadline
from lightninglm.training.lineage import run_lineage
from lightninglm.training.run_lock import RunLockedError


def main() -> int:
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
    args = parser.parse_args()
    console = Console()
    try:
        deadline = parse_deadline(args.deadline, time.time()) if args.deadline else None
    except ValueError as error:
        parser.error(str(error))
    try:
        lineage = load_lineage(args.lineage, args.set, args.num_gpus)
        return run_lineage(
            lineage.recipes,
            lineage.files,
            args.run or Path("runs") / lineage.name,
            num_gpus=lineage.world_size,
            grow_chain=grow_chain,
            stage_script=Path(__file__).with_name("stage.py"),
            overrides=args.set,
            accept_changes=args.accept_changes,
            console=console,
            deadline=deadline,
            stop_file=args.stop_file,
        )
    except ReceiptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (RecipeError, CheckpointError, GrowthError, DataError, RunLockedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
