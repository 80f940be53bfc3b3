"""
Signal-to-noise ratio and bytes per weight of the quantizers, on Gaussian weights and on the experts of a checkpoint.

    python benchmarks/quantizers.py [CHECKPOINT] [--group-size N] [--json FILE]

Every matrix goes the way that `quantize_expert` takes it: rotated, quantized and dequantized. Bytes are those of the
codes and scales read back from a safetensors file, over the number of weights. Gaussian: 4 matrices of
1024 x 1024. Of a checkpoint: all routed experts, which must not be quantized yet. "lowest" and "median" are over
matrices. Scales cost 2 / group_size bytes per weight, so that the promised bytes need groups of 64 or more.
"""

import argparse
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from common import report, target
from safetensors.torch import load_file, save_file

from lightninglm.checkpoint import CheckpointError, CheckpointReader
from lightninglm.modeling.quantizers import Int4Quantizer, Int8Quantizer, hadamard_block, random_signs, rotate, snr_db

QUANTIZERS = {"int8": Int8Quantizer, "int4": Int4Quantizer}
PROMISED_DB = {"int8": 43, "int4": 20}
PROMISED_BYTES = {"int8": 1.04, "int4": 0.54}
EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")


def gaussian() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randn(1024, 1024, generator=generator) * 0.02


def trained(folder: Path) -> Iterator[torch.Tensor]:
    """Every matrix of the routed experts."""
    with CheckpointReader(folder) as reader:
        names = [name for name in reader.weights if EXPERT.search(name)]
        if not names:
            raise CheckpointError(f"{folder}: no routed experts with dense weights; dense model, or quantized already")
        for name in names:
            yield reader.read(name).float()


def measure(weight: torch.Tensor, kind: str, group_size: int) -> tuple[float, int]:
    """(dB, bytes after writing and loading) of one matrix [out, in]."""
    columns = weight.shape[1]
    if columns % group_size:
        raise ValueError(f"--group-size {group_size}: must divide the {columns} inputs of every matrix")
    quantizer, block = QUANTIZERS[kind](group_size), hadamard_block(columns, group_size)
    rotated = rotate(weight, random_signs(0, 0, "hidden", columns), block)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weight.safetensors"
        save_file(quantizer.quantize(rotated)._asdict(), file)
        stored = load_file(file)
    # the rotation is orthogonal: the noise is the same before and after rotating back
    approximation = quantizer.dequantize(stored["codes"], stored["scales"])
    return snr_db(rotated, approximation), sum(tensor.nbytes for tensor in stored.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--group-size", type=int, metavar="N", help="for the checkpoint (default: largest that fits)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, rows and targets to FILE")
    arguments = parser.parse_args()
    try:
        sources = [("Gaussian", list(gaussian()), 128)]
        if arguments.checkpoint:
            matrices = list(trained(arguments.checkpoint))
            group_size = arguments.group_size or min(128, *(weight.shape[1] & -weight.shape[1] for weight in matrices))
            sources.append(("trained", matrices, group_size))
        rows, targets = [], {}
        for source, matrices, group_size in sources:
            weights = sum(weight.numel() for weight in matrices)
            for kind in QUANTIZERS:
                measured = [measure(weight, kind, group_size) for weight in matrices]
                decibels = [snr for snr, _ in measured if math.isfinite(snr)]
                row = {"source": source, "kind": kind, "matrices": len(matrices), "group": group_size}
                row |= {"lowest": min(decibels), "median": statistics.median(decibels)}
                row["bytes"] = sum(nbytes for _, nbytes in measured) / weights
                rows.append(row)
                targets[f"{source}, {kind}: lowest dB"] = target(row["lowest"], PROMISED_DB[kind], "higher")
                targets[f"{source}, {kind}: bytes per weight"] = target(row["bytes"], PROMISED_BYTES[kind], "lower")
    except (CheckpointError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    columns = {"source": "weights", "kind": "kind", "matrices": "matrices", "group": "group"}
    columns |= {"lowest": "lowest dB", "median": "median dB", "bytes": "bytes per weight"}
    report("quantizers", columns, rows, targets, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
