"""
Saving and loading a checkpoint against a plain copy of the same bytes, flushed to the disk.

    python benchmarks/checkpoint.py [--quick] [--json FILE]

One process; the tensors are those of a training state (weight, exp_avg, exp_avg_sq of random matrices). "save" ends
when the checkpoint is committed: every byte hashed twice (file and tensor), flushed, renamed. "copy" writes the same
bytes into the same files from memory and flushes them. "load" opens with fast verification and reads every tensor into
memory that exists already; "full" hashes every byte as well; "read" reads the files into memory that exists already.
All files are in the page cache when they are read. The five take turns; times are medians.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import median_and_spread, parse_arguments, report, target

from lightninglm.checkpoint import CheckpointReader, CheckpointWriter

MIB = 2**20
SIDE = 1024  # a matrix is 4 MiB
COLUMNS = {"what": "what", "seconds": "seconds", "gb_per_s": "GB/s", "times_copy": "times copy", "spread": "spread"}


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


def timed(action: Callable, *args) -> float:
    start = time.perf_counter()
    action(*args)
    return time.perf_counter() - start


def main() -> None:
    args = parse_arguments(__doc__)
    tensors = training_state(matrices=20 if args.quick else 80)
    size = sum(tensor.nbytes for tensor in tensors.values())
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    seconds: dict[str, list[float]] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the scratch folder goes when the benchmark is stopped
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir="/var/tmp") as scratch:  # /tmp may be memory
        checkpoint, plain = Path(scratch) / "checkpoint", Path(scratch) / "plain"
        save(tensors, checkpoint)
        contents = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
        buffers = {name: bytearray(len(content)) for name, content in contents.items()}
        for _ in range(3 if args.quick else 7):
            shutil.rmtree(checkpoint)
            shutil.rmtree(plain, ignore_errors=True)
            for what, action, parameters in (
                ("save", save, (tensors, checkpoint)),
                ("copy", copy, (contents, plain)),
                ("load", load, (checkpoint, "fast", targets)),
                ("full", load, (checkpoint, "full", targets)),
                ("read", read, (plain, buffers)),
            ):
                seconds.setdefault(what, []).append(timed(action, *parameters))
    medians = {what: median_and_spread(values) for what, values in seconds.items()}
    rows = [
        {
            "what": what,
            "seconds": median,
            "gb_per_s": size / median / 1e9,
            "times_copy": median / medians["copy"][0],
            "spread": spread,
        }
        for what, (median, spread) in medians.items()
    ]
    ratios = {row["what"]: row["times_copy"] for row in rows}
    report(
        f"A checkpoint of {size / MIB:.0f} MiB",
        COLUMNS,
        rows,
        {
            "save_times_copy": target(ratios["save"], 1.5, "lower"),
            "load_times_copy": target(ratios["load"], 1.5, "lower"),
        },
        args.json,
    )


if __name__ == "__main__":
    main()
