"""
Training routed experts: quantized with adapters, in fp32 with all weights, and in fp32 with PEFT's LoRA.

    python benchmarks/quantized_experts.py [--quick] [--json FILE]

One layer of experts, the same random rows and targets for all: forward, backward and an AdamW step. Every way lives in
a forked process of its own, so that its peak is its own; the timed steps take turns. PEFT adapts the stacked parameters
of the same fp32 experts (`target_parameters`) at the same rank, chosen so that adapters are about 2% of the weights, as
they are in the 120B model. "base" are bytes of the frozen or trained weights,
"trained" those of adapters, "optimizer" those of Adam's state, counted from the tensors after a step; with fp32 weights
Adam's master copy is the weight itself. "peak" is how far resident memory rises above its value before the layer was
built. "ratio" is the step's time over PEFT's, the median over the rounds.
"""

import multiprocessing
import statistics
import time
import warnings
from pathlib import Path

import torch
from common import median_and_spread, parse_arguments, report, target
from peft import LoraConfig, get_peft_model
from torch import nn

from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.experts import Experts, _SwiGLUExperts, choose_matmul
from lightninglm.modeling.quantized_experts import PROJECTIONS, quantize_experts

WAYS = ("int4", "int8", "fp32, all weights", "fp32, PEFT LoRA")
MIB = 2**20


class Layer:
    """One way of training the experts of a layer."""

    def __init__(self, way: str, experts: int, hidden: int, width: int, rows: int, rank: int):
        self.before = _resident("VmRSS")
        torch.manual_seed(0)
        quantization = {"kind": way, "group_size": 128, "rank": rank, "seed": 0} if way.startswith("int") else None
        config = LightningLMConfig(
            hidden_size=hidden,
            linear_num_heads=hidden // 64,
            linear_head_dim=64,
            num_attention_heads=hidden // 64,
            head_dim=64,
            moe_intermediate_size=width,
            num_experts=experts,
            expert_quantization=quantization,
        )
        self.module = Experts(config)
        if quantization:
            self.module = quantize_experts(self.module, config, layer_idx=0)
        elif way.endswith("LoRA"):
            self.module = _with_peft(self.module, rank)
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self.counts = torch.full((experts,), rows // experts)
        self.x_RH, self.target_RH = torch.randn(rows, hidden), torch.randn(rows, hidden)

    def seconds(self) -> float:
        """Duration of one step."""
        start = time.perf_counter()
        x_RH = self.x_RH.requires_grad_()
        (self.module(x_RH, self.counts) - self.target_RH).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        x_RH.grad = None
        return time.perf_counter() - start

    def memory(self) -> dict[str, float]:
        """MiB after two steps, and the peak of the second."""
        self.seconds()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at the present value
        self.seconds()
        trained = {id(parameter) for parameter in self.trained}
        held = [*self.module.parameters(), *self.module.buffers()]
        adapters = self.trained if len(trained) < len(held) else []
        state = [tensor for entry in self.optimizer.state.values() for tensor in entry.values() if tensor.dim()]
        return {
            "base_mib": (_bytes(held) - _bytes(adapters)) / MIB,
            "adapter_mib": _bytes(adapters) / MIB,
            "optimizer_mib": _bytes(state) / MIB,
            "peak_mib": (_resident("VmHWM") - self.before) / MIB,
        }


class FusedExperts(nn.Module):
    """The same experts with the stacked weights as parameters of one module, which is the form that PEFT adapts."""

    def __init__(self, experts: Experts):
        super().__init__()
        for projection in PROJECTIONS:
            self.register_parameter(projection, getattr(experts, projection).weight)

    def forward(self, x_RH: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        weights = (getattr(self, projection) for projection in PROJECTIONS)
        return _SwiGLUExperts.apply(x_RH, *weights, choose_matmul("torch", x_RH, counts))


class Block(nn.Module):
    """PEFT wraps a submodule."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.experts = FusedExperts(experts)

    def forward(self, x_RH: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return self.experts(x_RH, counts)


def _with_peft(experts: Experts, rank: int) -> nn.Module:
    names = [f"experts.{projection}" for projection in PROJECTIONS]
    config = LoraConfig(r=rank, lora_alpha=rank, target_parameters=names, target_modules=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it suggests target_modules
        return get_peft_model(Block(experts), config)


def _bytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _serve(connection, *arguments) -> None:
    """The forked process: builds the layer, then answers with the result of the method asked for."""
    layer = Layer(*arguments)
    while (method := connection.recv()) is not None:
        connection.send(getattr(layer, method)())


def main() -> None:
    arguments = parse_arguments(__doc__.strip().splitlines()[0])
    experts, hidden, width, rows, rank = (8, 512, 256, 1024, 4) if arguments.quick else (16, 1024, 512, 4096, 8)
    rounds = 5 if arguments.quick else 9
    fork = multiprocessing.get_context("fork")  # this process runs no kernel before it forks
    workers = {}
    for way in WAYS:
        connection, theirs = fork.Pipe()
        process = fork.Process(target=_serve, args=(theirs, way, experts, hidden, width, rows, rank), daemon=True)
        process.start()
        workers[way] = connection

    def ask(way, method):
        workers[way].send(method)
        return workers[way].recv()

    memory = {way: ask(way, "memory") for way in WAYS}
    times = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            times[way].append(ask(way, "seconds"))
    for connection in workers.values():
        connection.send(None)

    rows_out, ratios = [], {}
    for way, seconds in times.items():
        median, spread = median_and_spread(seconds)
        against = [ours / theirs for ours, theirs in zip(seconds, times["fp32, PEFT LoRA"], strict=True)]
        ratios[way] = statistics.median(against)
        timing = {"step_seconds": median, "step_spread": spread, "over_peft": ratios[way]}
        rows_out.append({"way": way, **memory[way], **timing})
    held = {way: memory[way]["base_mib"] + memory[way]["adapter_mib"] + memory[way]["optimizer_mib"] for way in WAYS}
    full = "fp32, all weights"
    report(
        f"{experts} experts of {width} x {hidden}, {rows} rows, rank {rank} (MiB, seconds)",
        {
            "way": "experts",
            "base_mib": "base",
            "adapter_mib": "adapters",
            "optimizer_mib": "optimizer",
            "peak_mib": "peak",
            "step_seconds": "step",
            "step_spread": "spread",
            "over_peft": "ratio",
        },
        rows_out,
        {
            "base, adapters and optimizer, int4 over full training": target(held["int4"] / held[full], 1 / 8, "lower"),
            "step time, int4 over PEFT LoRA": target(ratios["int4"], 1.3, "lower"),
            "step time, int8 over PEFT LoRA": target(ratios["int8"], 1.3, "lower"),
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
