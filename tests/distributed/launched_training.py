"""Started by `deepspeed` in test_engine.py: trains the tiny model and writes each rank's losses."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightninglm.distributed import process_group
from tests.distributed.tiny import train


def main() -> None:
    process_group.init_distributed(timeout_minutes=2)
    losses = train(process_group.rank(), process_group.world_size())["loss"]
    seeds = hash("the seed of this rank")
    Path(sys.argv[1], f"{process_group.rank()}.json").write_text(json.dumps({"loss": losses, "hash": seeds}))


process_group.run(main)
