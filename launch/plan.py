"""
Say what a recipe will need before it runs: parameters, memory per GPU, time, cost and disk, stage by stage.

    python launch/plan.py recipes/preserving --gpus 8 --gpu-memory 80
    python launch/plan.py recipes/paper/8-experts-120b-router.yaml --json
    python launch/plan.py recipes/preserving --schedule schedule.png

Nothing is trained, read or downloaded, and no GPU is needed. Formulas and their sources: docs/plan.md. Exit code 1 when
a stage does not fit the memory given.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from growth.errors import GrowthError
from growth.grown_config import grown_configs
from lightninglm.distributed.ds_config import DsConfigError
from lightninglm.planning.devices import DEVICES
from lightninglm.planning.plan import Node, plan_lineage
from lightninglm.planning.report import print_plan
from lightninglm.planning.stages import load_stages
from lightninglm.recipe import RecipeError


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        stages, world_size = load_stages(args.recipe, grown_configs, args.set, args.gpus)
        if args.schedule:
            from lightninglm.planning.schedule_plot import plot_schedule  # matplotlib, for this only

            plot_schedule(stages, args.schedule)
        plan = plan_lineage(stages, Node(world_size, args.gpu_memory, args.price, tuple(args.utilization)))
    except (RecipeError, DsConfigError, GrowthError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(plan, indent=2))
    else:
        print_plan(plan, args.gpu, Console(width=None if sys.stdout.isatty() else 200))
    return 0 if plan["fits"] else 1


def _parser() -> argparse.ArgumentParser:
    def positive(text: str) -> float:
        value = float(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: must be above 0")
        return value

    def share(text: str) -> float:
        if (value := positive(text)) > 1:
            raise argparse.ArgumentTypeError(f"{text}: a share of the peak, at most 1")
        return value

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="folder of a lineage, or the YAML file of one stage")
    parser.add_argument("--gpus", type=int, metavar="N", help="ranks (default: world_size of lineage.yaml)")
    parser.add_argument("--gpu-memory", type=positive, default=80, metavar="GIB", help="of each GPU (default 80)")
    parser.add_argument("--gpu", choices=DEVICES, default="H100", help="kind that speed is shown for (default H100)")
    parser.add_argument(
        "--utilization", type=share, nargs="+", default=[0.2, 0.3, 0.4], metavar="SHARE",
        help="shares of the peak that the GPUs execute at (default 0.2 0.3 0.4)",
    )  # fmt: skip
    parser.add_argument("--price", type=positive, default=2.0, help="per GPU and hour, any currency (default 2)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value everywhere")
    parser.add_argument("--schedule", type=Path, metavar="FILE.png", help="also draw the schedule")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
