"""
460 experts, top 12, on 8 ranks of the real launcher (58 experts on four of them, 57 on the others), against one rank.

    python tests/distributed/experts_460.py [--steps 20]

Trains the tiny model from the same weights on the same batches both ways, with fp32 experts and with quantized ones,
prints losses and gradient norms step by step, and exits with 1 unless all ranks agree with each other exactly, and with
the one rank to 1e-5 in the loss and 1e-6 of the gradient norm. The suite runs fewer steps on forked ranks.

Ranks add up in another order than one process, and training magnifies the last bit. So the states have 22 fraction bits
(16 round a difference in the last bit of fp32 up to 2^-16 of a state) and the learning rate is 1e-4.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightninglm.distributed import process_group
from tests.distributed.tiny import INT8, tiny_config, train

RANKS, LEARNING_RATE = 8, 1e-4
SAME_LOSS, SAME_NORM = 1e-5, 1e-6
FORMS = {"fp32": None, "int8": INT8, "int4": INT8 | {"kind": "int4"}}


def config_460(form: str):
    """The tiny model with the routed layers of the 120B model: 20 groups of 23 experts, 2 groups and 6 of each."""
    return tiny_config(
        num_experts=460,
        num_experts_per_tok=12,
        router_layout="grouped",
        num_expert_groups=20,
        groups_per_token=2,
        members_per_group=6,
        expert_quantization=FORMS[form],
        frac_bits=22,
    )


def train_rank(steps: int, folder: Path) -> None:
    """What each process does: all forms in turn; writes this rank's runs."""
    process_group.init_distributed(timeout_minutes=10)
    rank, world_size = process_group.rank(), process_group.world_size()
    runs = {form: train(rank, world_size, config=config_460(form), steps=steps, lr=LEARNING_RATE) for form in FORMS}
    (folder / f"{world_size}-{rank}.json").write_text(json.dumps(runs))


def compare(steps: int) -> int:
    """Starts both runs and prints the comparison; returns the exit code."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [str(Path(__file__)), "--steps", str(steps), "--folder", scratch]
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS), "--no_local_rank"]
        port = ["--master_port", str(process_group.free_port())]
        for command in ([sys.executable, *arguments], [*launcher, *port, *arguments]):
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        alone = json.loads(Path(scratch, "1-0.json").read_text())
        ranks = [json.loads(Path(scratch, f"{RANKS}-{rank}.json").read_text()) for rank in range(RANKS)]
    failed = not all(runs == ranks[0] for runs in ranks)
    print(f"all {RANKS} ranks report the same losses and norms: {'no' if failed else 'yes'}")
    for form, expected in alone.items():
        found = ranks[0][form]
        print(f"\n{form:>4}  loss, 1 rank  loss, {RANKS} ranks  difference  norm, 1 rank  relative difference")
        for step, (loss, norm) in enumerate(zip(expected["loss"], expected["norm"], strict=True)):
            other, total = found["loss"][step], norm["total"]
            off, norm_off = abs(other - loss), abs(found["norm"][step]["total"] / total - 1)
            failed |= off > SAME_LOSS or norm_off > SAME_NORM
            print(f"{step:4}  {loss:12.7f}  {other:13.7f}  {off:10.1e}  {total:12.7f}  {norm_off:.1e}")
    return int(failed)


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # given to the processes that train
    arguments = parser.parse_args()
    if arguments.folder is None:
        sys.exit(compare(arguments.steps))
    process_group.run(lambda: train_rank(arguments.steps, arguments.folder))


if __name__ == "__main__":
    main()
