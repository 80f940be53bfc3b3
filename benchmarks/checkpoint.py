"""
Saving and loading a checkpoint against a plain copy of the same bytes, and how long a save holds training up.

    python benchmarks/checkpoint.py [--quick] [--json FILE]

One process; the tensors are those of a training state (weight, exp_avg, exp_avg_sq of random matrices). "save" ends
when the checkpoint is committed: every byte hashed, flushed, renamed. "copy" writes the same
bytes into the same files from memory and flushes them. "load" opens with fast verification and reads every tensor into
memory that exists already, "full" hashes every byte as well; "read" reads the same bytes from the copy into memory that
exists already. Before each of the three the files are dropped from the page cache, so that all come from the disk.
Writers, then readers, take turns, each first in its turn; times are medians, ratios the medians over the rounds.

Then an engine trains: "synchronous" is what a save holds it up; of an asynchronous one, "stall" is what it holds up
and "written" when it is committed. The steps that run meanwhile are slower, for they share the processors with the
hashes; "held up" is the stall and what they take longer.
"""

import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import median_and_spread, parse_arguments, report, target

from lightninglm.checkpoint import CheckpointReader, CheckpointWriter
from lightninglm.distributed.asynchronous_saver import AsynchronousSaver
from lightninglm.distributed.checkpointing import bytes_to_write, save_checkpoint
from lightninglm.distributed.ds_config import load_ds_config
from lightninglm.distributed.engine import build_engine, parameter_groups
from lightninglm.distributed.optimizer_state import OptimizerState
from lightninglm.distributed.process_group import init_distributed, shutdown
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM

MIB = 2**20
SIDE = 1024  # a matrix is 4 MiB
COLUMNS = {"what": "what", "seconds": "seconds", "gb_per_s": "GB/s", "ratio": "times copy or read", "spread": "spread"}
STALL_COLUMNS = {"what": "what", "seconds": "seconds", "spread": "spread"}
BASELINES = {"save": "copy", "copy": "copy", "load": "read", "full": "read", "read": "read"}
BATCH, LENGTH = 4, 64


def training_state(matrices: int) -> dict[str, torch.Tensor]:
    """A weight and its two moments per matrix."""
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{i}.weight{key}" for i in range(matrices) for key in ("", ".exp_avg", ".exp_avg_sq")]
    return {name: torch.randn(SIDE, SIDE, generator=generator) for name in names}


def save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    with CheckpointWriter(folder, shard_bytes=64 * MIB) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.commit({"model_type": "benchmark"}, {})


def copy(contents: dict[str, bytes], folder: Path) -> None:
    folder.mkdir()
    for name, content in contents.items():
        with open(folder / name, "wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())


def load(folder: Path, verify: str, into: dict[str, torch.Tensor]) -> None:
    with CheckpointReader(folder, verify) as reader:
        for name, tensor in into.items():
            reader.read_into(tensor.view(-1), name)


def read(folder: Path, into: dict[str, bytearray]) -> None:
    for name, buffer in into.items():
        with open(folder / name, "rb", buffering=0) as file:
            file.readinto(buffer)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable, *args) -> float:
    start = time.perf_counter()
    action(*args)
    return time.perf_counter() - start


def throughput(scratch: Path, quick: bool) -> tuple[int, dict[str, list[float]]]:
    """The bytes of the tensors, and the seconds of every round of each of the five."""
    tensors = training_state(matrices=20 if quick else 80)
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    checkpoint, plain = scratch / "checkpoint", scratch / "plain"
    save(tensors, checkpoint)
    contents = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    buffers = {name: bytearray(len(content)) for name, content in contents.items()}
    seconds: dict[str, list[float]] = {what: [] for what in BASELINES}
    writes = [("save", checkpoint, (save, tensors, checkpoint)), ("copy", plain, (copy, contents, plain))]
    reads = [
        ("load", checkpoint, (load, checkpoint, "fast", targets)),
        ("full", checkpoint, (load, checkpoint, "full", targets)),
        ("read", plain, (read, plain, buffers)),
    ]
    for actions, prepare in ((writes, remove), (reads, drop_from_cache)):
        for i in range(3 if quick else 9):
            first = i % len(actions)  # the disk remembers what was done before
            for what, folder, action in actions[first:] + actions[:first]:
                prepare(folder)
                seconds[what].append(timed(*action))
    return sum(tensor.nbytes for tensor in tensors.values()), seconds


def engine(quick: bool):
    """A model whose training state is about 400 MiB (quick: 100), most of it in experts."""
    config = LightningLMConfig(
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=4,
        linear_num_heads=4,
        linear_head_dim=64,
        num_attention_heads=4,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_experts=10 if quick else 40,
        num_experts_per_tok=2,
    )
    model = LightningLMForCausalLM(config)
    model.set_token_bytes([i.to_bytes(2) for i in range(config.vocab_size)])
    ds_config = load_ds_config(
        Path(__file__).parents[1] / "ds_configs" / "zero1.json",
        micro_batch=BATCH,
        accumulation=1,
        world_size=1,
        dtype="fp32",
        optimizer={"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        gradient_clipping=1.0,
        expert_parallel=1,
    )
    multipliers = {"router": 1.0, "adapters": 1.0, "rest": 1.0}
    built = build_engine(model, ds_config, parameter_groups(model, lr=1e-4, weight_decay=0.0, multipliers=multipliers))
    OptimizerState(built).create(adam_step=0)
    return built


def train_step(built) -> None:
    ids = torch.randint(0, 1024, (BATCH, LENGTH))
    built.backward(built(input_ids=ids, labels=ids).loss)
    built.step()


def stall(scratch: Path, quick: bool) -> tuple[int, dict[str, list[float]]]:
    """The bytes of a save, and the seconds by which saves hold training up."""
    built = engine(quick)
    saver = AsynchronousSaver(built)
    saver.start(scratch / "first", {})  # allocates its memory
    saver.wait()
    seconds: dict[str, list[float]] = {name: [] for name in ("step", "synchronous", "stall", "written", "held up")}
    for i in range(3 if quick else 7):
        seconds["step"] += [timed(train_step, built) for _ in range(3)]
        seconds["synchronous"].append(timed(save_checkpoint, built, scratch / f"synchronous-{i}", {}))
        seconds["stall"].append(timed(saver.start, scratch / f"asynchronous-{i}", {}))
        steps = []
        while not saver.ended:
            steps.append(timed(train_step, built))
        seconds["written"].append(saver.wait()[1])
        seconds["held up"].append(seconds["stall"][-1] + sum(steps) - len(steps) * statistics.median(seconds["step"]))
        for folder in scratch.iterdir():
            shutil.rmtree(folder)
    return bytes_to_write(built), seconds


def main() -> None:
    args = parse_arguments(__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the scratch folder goes when the benchmark is stopped
    init_distributed()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir="/var/tmp") as scratch:  # /tmp may be memory
        size, seconds = throughput(Path(scratch) / "throughput", args.quick)
        stall_size, stalls = stall(Path(scratch) / "stall", args.quick)
    shutdown()
    rows = []
    for what, times in seconds.items():
        ratios = [mine / plain for mine, plain in zip(times, seconds[BASELINES[what]], strict=True)]
        median, spread = median_and_spread(times)
        row = {"what": what, "seconds": median, "gb_per_s": size / median / 1e9, "spread": spread}
        rows.append(row | {"ratio": statistics.median(ratios)})
    ratios = {row["what"]: row["ratio"] for row in rows}
    targets = {f"{what}_ratio": target(ratios[what], 1.5, "lower") for what in ("save", "load")}
    report(f"A checkpoint of {size / MIB:.0f} MiB", COLUMNS, rows, targets, args.json)
    stall_rows = [
        {"what": what, "seconds": median, "spread": spread}
        for what, (median, spread) in ((what, median_and_spread(times)) for what, times in stalls.items())
    ]
    report(f"Saves of {stall_size / MIB:.0f} MiB during training", STALL_COLUMNS, stall_rows, {}, None)


if __name__ == "__main__":
    main()
