"""
Growing 20 experts to 460 against a plain copy of as many bytes on the same disk.

    python benchmarks/multiply_experts.py [--quick] [--json FILE]

The source is a mixture of experts at hidden size 512 with Adam's moments, random values, built first. "grow" runs
`python -m growth multiply_experts` in a process of its own, from planning to the committed checkpoint: every source
tensor checked against its hash, every byte of the target hashed and flushed to the disk, then renamed. "start" is the
part of it that goes by until Python has imported the modules. "copy" copies the grown folder file by file and flushes
it. The three take turns; times are medians. The memory of "grow" is its peak resident size less that of "start".
--quick grows 20 experts to 60.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import median_and_spread, parse_arguments, report, target

from growth.tensor_table import tensor_table
from lightninglm.checkpoint import CheckpointWriter
from lightninglm.modeling.byte_embedding import byte_alphabet, token_bytes, tokens_sha256
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.initialization import initial_tensor

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
COLUMNS = {"what": "what", "seconds": "seconds", "gb_per_s": "GB/s", "times_copy": "times copy", "spread": "spread"}
CONFIG = {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
    "linear_num_heads": 4,
    "num_attention_heads": 4,
    "head_dim": 128,
    "indexer_head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 20,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
}
STATE = {
    "format": 1, "stage": "benchmark", "step": 1, "tokens": 1, "lineage_tokens": 1, "adam_step": 1.0,
    "data": {"position": 0, "domain_offsets": {}, "next_domain_offsets": {}, "seed": 0}, "ramps": {},
    "new_tensors": {"names": [], "warmup_steps": 0}, "seed": 0, "lineage": [],
}  # fmt: skip
PEAK = "print(next(int(row.split()[1]) * 1024 for row in open('/proc/self/status') if row.startswith('VmHWM')))"
IMPORTS = f"import growth.__main__; {PEAK}"
GROW = f"import sys; from growth.__main__ import main; code = main(sys.argv[1:]); {PEAK}; sys.exit(code)"


def build_source(folder: Path) -> None:
    """A checkpoint as training leaves it, with random values."""
    tokenizer = folder.parent / "tokenizer"
    tokenizer.mkdir()
    vocabulary = ", ".join(f'"{_escaped(character)}": {byte}' for character, byte in byte_alphabet().items())
    (tokenizer / "tokenizer.json").write_text(f'{{"model": {{"type": "BPE", "vocab": {{{vocabulary}}}}}}}')
    config = LightningLMConfig(**CONFIG)
    config.tokenizer_sha256 = tokens_sha256(token_bytes(tokenizer / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)
    with CheckpointWriter(folder) as writer:
        for name, spec in tensor_table(config).items():
            writer.add(name, initial_tensor(name, spec.shape, spec.dtype, config, seed=0))
            if spec.trainable:
                writer.add(f"{name}.exp_avg", torch.randn(spec.shape, generator=generator))
                writer.add(f"{name}.exp_avg_sq", torch.rand(spec.shape, generator=generator))
        writer.commit(config.to_dict(), STATE, tokenizer_folder=tokenizer)


def _escaped(character: str) -> str:
    return "\\" + character if character in '"\\' else character


def python(code: str, *arguments: object) -> tuple[float, int]:
    """Runs a program that prints its peak resident bytes; seconds and that number."""
    start = time.perf_counter()
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return time.perf_counter() - start, int(done.stdout.split()[-1])


def copy(source: Path, folder: Path) -> float:
    """Copies a folder, every file flushed to the disk; seconds."""
    start = time.perf_counter()
    folder.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, folder / path.name)
        descriptor = os.open(folder / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def main() -> None:
    args = parse_arguments(__doc__)
    experts = 60 if args.quick else 460
    seconds: dict[str, list[float]] = {"grow": [], "start": [], "copy": []}
    peaks = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the scratch folder goes when the benchmark is stopped
    with tempfile.TemporaryDirectory(prefix="multiply-experts-", dir="/var/tmp") as scratch:  # /tmp may be memory
        source, grown, plain = (Path(scratch) / name for name in ("source", "grown", "plain"))
        build_source(source)
        for _ in range(3):
            for folder in (grown, plain):
                shutil.rmtree(folder, ignore_errors=True)
            options = ("--source", source, "--target", grown, "--num-experts", experts, "--members-per-group", 2)
            taken, imported = python(IMPORTS)
            seconds["start"].append(taken)
            taken, peak = python(GROW, "multiply_experts", *options)
            seconds["grow"].append(taken)
            peaks.append(peak - imported)
            seconds["copy"].append(copy(grown, plain))
        size = sum(path.stat().st_size for path in grown.iterdir())
    medians = {what: median_and_spread(values) for what, values in seconds.items()}
    rows = [
        {
            "what": what,
            "seconds": median,
            "gb_per_s": None if what == "start" else size / median / 1e9,
            "times_copy": median / medians["copy"][0],
            "spread": spread,
            "bytes": size,
        }
        for what, (median, spread) in medians.items()
    ]
    report(
        f"20 to {experts} experts, a target of {size / 1e9:.2f} GB",
        COLUMNS,
        rows,
        {
            "grow_times_copy": target(rows[0]["times_copy"], 2.0, "lower"),
            "peak_memory_mib": target(max(peaks) / MIB, 1e9 / MIB, "lower"),
        },
        args.json,
    )


if __name__ == "__main__":
    main()
