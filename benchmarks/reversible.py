"""
Memory and time of training with the plain, the checkpointed and the reversible stack, at 8, 16 and 32 layers.

    python benchmarks/reversible.py [--quick] [--json FILE]

Plain and checkpointed training run the same recurrence in fp32 under ordinary autograd, without the fixed-point
arithmetic that makes it reversible. Every (layers, training) pair lives in a forked process of its own, so that its
peak is its own; the timed steps take turns. A step is forward and backward of decoder layers on random streams; the
gradients of the parameters exist beforehand, because they grow with depth however training is done. "kept" counts, by
torch's allocator events, what the forward pass leaves allocated for the backward pass; "peak" the most allocated at any
time of the step; "RSS" how far the process's resident memory rises above its value before the first step. "ratio"
is the step's time over that of checkpointed training at the same depth, the median over the rounds.
"""

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from common import median_and_spread, parse_arguments, report, target
from torch.profiler import ProfilerActivity, profile

from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.decoder_layer import DecoderLayer
from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.reversible import checkpointed_layer, reversible_stack
from lightninglm.modeling.rotary import RotaryEmbedding

TRAININGS = ("plain", "checkpointed", "reversible")
MIB = 2**20


def fp32_stack(layers, streams, ctx, step_size, checkpointed):
    """The midpoint recurrence with blend 1 in floating point, under ordinary autograd."""
    p_prev = p_cur = streams
    aux_sum = streams.new_zeros(())
    for n, (layer, h) in enumerate(zip(layers, step_size, strict=True)):
        y, aux = checkpointed_layer(layer, p_cur, ctx) if checkpointed else layer(p_cur, ctx)
        p_prev, p_cur = p_cur, p_prev + (h if n == 0 else 2 * h) * (y - p_cur)
        aux_sum = aux_sum + aux
    return p_cur, aux_sum


class Training:
    """Decoder layers of a small dense model with random input."""

    def __init__(self, depth: int, training: str, tokens: int, hidden: int):
        self.config = LightningLMConfig(
            vocab_size=256,
            hidden_size=hidden,
            num_hidden_layers=depth,
            intermediate_size=2 * hidden,
            linear_num_heads=hidden // 64,
            linear_head_dim=64,
            num_attention_heads=hidden // 64,
            head_dim=64,
        )
        torch.manual_seed(0)
        self.training = training
        self.layers = [DecoderLayer(self.config, i) for i in range(depth)]
        for layer in self.layers:
            for p in layer.parameters():
                p.grad = torch.zeros_like(p)
        self.tokens = tokens

    def forward(self, tokens: int) -> torch.Tensor:
        """The loss of one sequence."""
        positions = torch.arange(tokens)[None]
        ctx = LayerContext(position_ids=positions, rotary=RotaryEmbedding(self.config)(positions))
        generator = torch.Generator().manual_seed(1)
        streams = torch.randn(1, tokens, self.config.num_streams, self.config.hidden_size, generator=generator)
        inputs = (self.layers, streams.requires_grad_(), ctx, self.config.step_sizes)
        if self.training == "reversible":
            out, aux = reversible_stack(*inputs, self.config.blends)
        else:
            out, aux = fp32_stack(*inputs, checkpointed=self.training == "checkpointed")
        return out.square().mean() + aux

    def step(self) -> None:
        self.forward(self.tokens).backward()

    def seconds(self) -> float:
        """Duration of one step."""
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def memory(self) -> dict[str, float]:
        """MiB of the first full step: resident and allocated."""
        self.forward(8).backward()  # libraries set up their buffers
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at the present value
        before = _resident("VmRSS")
        self.step()
        resident = _resident("VmHWM") - before
        with _allocations() as kept:
            loss = self.forward(self.tokens)
        del loss
        with _allocations() as step:
            self.step()
        return {"kept_mib": _live(kept)[-1] / MIB, "peak_mib": max(_live(step)) / MIB, "resident_mib": resident / MIB}


def _resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def _allocations() -> Iterator[profile]:
    """Records torch's allocator events; the profiler's own notes on standard error are dropped."""
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            yield profiled
    finally:
        os.dup2(stderr, 2)


def _live(profiled: profile) -> list[int]:
    """Bytes allocated after each allocator event, relative to the start."""
    live, history = 0, [0]
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            history.append(live)
    return history


def _serve(connection, *arguments) -> None:
    """The forked process: builds the layers, then answers with the result of the method asked for."""
    training = Training(*arguments)
    while (method := connection.recv()) is not None:
        connection.send(getattr(training, method)())


def main() -> None:
    arguments = parse_arguments(__doc__.strip().splitlines()[0])
    depths = (4, 8, 16) if arguments.quick else (8, 16, 32)
    rounds = 5 if arguments.quick else 7
    tokens, hidden = (256, 128) if arguments.quick else (512, 256)
    fork = multiprocessing.get_context("fork")  # this process runs no kernel before it forks
    workers = {}
    for depth in depths:
        for name in TRAININGS:
            connection, theirs = fork.Pipe()
            process = fork.Process(target=_serve, args=(theirs, depth, name, tokens, hidden), daemon=True)
            process.start()
            workers[depth, name] = connection

    def ask(key, method):
        workers[key].send(method)
        return workers[key].recv()

    memory = {key: ask(key, "memory") for key in workers}
    times = {key: [] for key in workers}
    for _ in range(rounds):
        for key in workers:
            times[key].append(ask(key, "seconds"))
    for connection in workers.values():
        connection.send(None)

    rows = []
    for (depth, name), seconds in times.items():
        against = [ours / theirs for ours, theirs in zip(seconds, times[depth, "checkpointed"], strict=True)]
        median, spread = median_and_spread(seconds)
        timing = {"step_seconds": median, "step_spread": spread, "over_checkpointed": statistics.median(against)}
        rows.append({"layers": depth, "training": name, **memory[depth, name], **timing})
    ours = [row for row in rows if row["training"] == "reversible"]
    growth = {key: ours[-1][key] / ours[0][key] for key in ("kept_mib", "peak_mib")}
    slowest = max(row["over_checkpointed"] for row in ours)
    report(
        f"forward and backward of L layers, hidden size {hidden}, 4 streams, {tokens} tokens",
        {
            "layers": "L",
            "training": "training",
            "kept_mib": "kept MiB",
            "peak_mib": "peak MiB",
            "resident_mib": "RSS MiB",
            "step_seconds": "step s",
            "step_spread": "spread",
            "over_checkpointed": "ratio",
        },
        rows,
        {
            f"kept bytes, {depths[-1]} over {depths[0]} layers": target(growth["kept_mib"], 1.01, "lower"),
            f"peak bytes, {depths[-1]} over {depths[0]} layers": target(growth["peak_mib"], 1.01, "lower"),
            "step time over checkpointing, worst depth": target(slowest, 1.05, "lower"),
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
