"""
The byte embedding's gather against the dense product with codes of width 8192, at a vocabulary of 131,072.

    python benchmarks/byte_embedding.py [--quick] [--json FILE]

Forward and backward of the projection (before the norm) on the same tokens, on one thread in processor time; the two
take turns. "kept" is what autograd saves for the backward pass without weights, "peak" the most allocated at once in
the step beyond what was there before it and the weight's gradient, counted from torch's allocator events; both are
divided by the tokens. Almost all of the gather's peak is its output and the scaled gradient of that.
"""

import os
import random
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import torch
from common import median_and_spread, parse_arguments, report, target
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from lightninglm.modeling.byte_embedding import ByteProjection, byte_table, code_values

VOCABULARY, MAX_BYTES = 131_072, 32
SIZE = 256 * MAX_BYTES


def synthetic_tokens(seed: int = 0) -> list[bytes]:
    """Distinct byte strings, 1 to 32 bytes and most of them 3 to 9, as in a trained vocabulary."""
    generator = random.Random(seed)
    tokens = {bytes([i]): None for i in range(256)}
    while len(tokens) < VOCABULARY:
        length = min(MAX_BYTES, 2 + int(generator.expovariate(1 / 4)))
        tokens[bytes(generator.choices(range(32, 256), k=length))] = None
    return list(tokens)


class Gather:
    """This project's projection."""

    def __init__(self, tokens: list[bytes], weight: torch.Tensor):
        self.bytes_VX, self.lengths_V = byte_table(tokens, MAX_BYTES, "raw_bytes")
        self.values = code_values(MAX_BYTES)
        self.module = ByteProjection(MAX_BYTES, len(weight))
        self.weight = self.module.weight
        self.weight.data.copy_(weight)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.module(self.bytes_VX[ids], self.lengths_V[ids], *self.values)


class Dense(Gather):
    """The definition: codes [tokens, 8192], normalized, times the weight."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        lengths = self.lengths_V[ids][:, None]
        places = torch.arange(MAX_BYTES)
        entries = torch.where(places < lengths, lengths.rsqrt(), 0.0)
        codes = torch.zeros(len(ids), SIZE).scatter_add_(1, self.bytes_VX[ids].long() * MAX_BYTES + places, entries)
        deviation, mean = torch.std_mean(codes, dim=1, keepdim=True)
        codes.sub_(mean).div_(deviation + 1e-6)
        return F.linear(codes, self.weight)


def step(path: Gather, ids: torch.Tensor, grad: torch.Tensor) -> float:
    """Seconds of processor time for one forward and backward pass."""
    start = time.process_time()
    path(ids).backward(grad)
    return time.process_time() - start


def kept_bytes(path: Gather, ids: torch.Tensor) -> int:
    """Bytes of the tensors saved for the backward pass, each storage once, without the weight."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        path(ids)
    saved.pop(path.weight.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def peak_bytes(path: Gather, ids: torch.Tensor, grad: torch.Tensor) -> int:
    """Largest sum of live allocations during one step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(path, ids, grad)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[1])
    torch.set_num_threads(1)
    tokens, hidden, rounds = (1024, 256, 3) if arguments.quick else (4096, 1024, 5)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(hidden, SIZE, generator=generator) / SIZE**0.5
    zipf = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    vocabulary = synthetic_tokens()
    shuffled = torch.randperm(VOCABULARY, generator=generator)
    ids = shuffled[torch.multinomial(zipf, tokens, replacement=True, generator=generator)]
    grad = torch.randn(tokens, hidden, generator=generator)

    paths = {"dense": Dense(vocabulary, weight), "gather": Gather(vocabulary, weight)}
    outputs = [path(ids).detach() for path in paths.values()]
    difference = float((outputs[0] - outputs[1]).norm() / outputs[0].norm())
    for path in paths.values():
        path.weight.grad = torch.zeros_like(path.weight)
        step(path, ids, grad)
    seconds = {name: [] for name in paths}
    for _ in range(rounds):
        for name, path in paths.items():
            seconds[name].append(step(path, ids, grad))
    rows = []
    for name, path in paths.items():
        median, spread = median_and_spread(seconds[name])
        constant = peak_bytes(path, ids[:1], grad[:1])
        rows.append(
            {
                "path": name,
                "milliseconds": 1000 * median,
                "spread": spread,
                "kept": kept_bytes(path, ids) / tokens,
                "peak": (peak_bytes(path, ids, grad) - constant) / (tokens - 1),
            }
        )
    dense, gather = rows
    report(
        f"byte embedding, {tokens} tokens, hidden size {hidden}; relative difference of the outputs {difference:.1e}",
        {
            "path": "path",
            "milliseconds": "forward + backward ms",
            "spread": "spread",
            "kept": "kept bytes / token",
            "peak": "peak bytes / token",
        },
        rows,
        {
            "time, dense over gather": target(dense["milliseconds"] / gather["milliseconds"], 5, "higher"),
            "kept bytes per token, dense over gather": target(dense["kept"] / gather["kept"], 20, "higher"),
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
