"""
Training routed experts: quantized with adapters, in fp32 with all weights, and in fp32 with PEFT's LoRA.

    python benchmarks/quantized_experts.py [--quick] [--json FILE]

One layer of experts, the same random rows and targets for all: forward, backward and an AdamW step. Every way lives in
a forked process of its own, so that its peak is its own; the timed steps take turns. PEFT adapts the stacked parameters
of the same fp32 experts (`target_parameters`) at the same rank, chosen so that adapters are about 2% of the weights, as
they are in the 120B model.

Where bitsandbytes or torchao can be imported (they are no requirement), two more ways are measured: their quantized
linear modules, frozen, with adapters of the same rank in plain torch. Neither has stacked experts, so these are loops
over experts, one module per matrix: bitsandbytes' `Linear4bit` (nf4, blocks of 64) and torchao's
`Int8WeightOnlyConfig`. torchao's 4-bit weights are left out: on this CPU torchao 0.18.0 answers `Int4WeightOnlyConfig`
with "Requires mslk >= 1.0.0", "Unsupported int4 packing format: opaque" and "Int4PlainInt32Tensor does not support
device 'cpu' yet", packing by packing.

"base" are bytes of the frozen or trained weights,
"trained" those of adapters, "optimizer" those of Adam's state, counted from the tensors after a step; with fp32 weights
Adam's master copy is the weight itself. "peak" is how far resident memory rises above its value before the layer was
built. "ratio" is the step's time over PEFT's, the median over the rounds.
"""

import importlib
import importlib.metadata
import importlib.util
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from common import median_and_spread, parse_arguments, report, target
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.experts import Experts, _SwiGLUExperts, choose_matmul
from lightninglm.modeling.quantized_experts import PROJECTIONS, quantize_experts

WAYS = ("int4", "int8", "fp32, all weights", "fp32, PEFT LoRA")
LIBRARIES = {"bitsandbytes loop": "bitsandbytes", "torchao loop": "torchao"}  # way -> what it needs
MIB = 2**20


class Layer:
    """One way of training the experts of a layer."""

    def __init__(self, way: str, experts: int, hidden: int, width: int, rows: int, rank: int):
        if way in LIBRARIES:
            _library(LIBRARIES[way])  # its own memory is none of the layer's
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
        elif way in LIBRARIES:
            self.module = LoopedExperts(self.module, way, rank)
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self.counts = torch.full((experts,), rows // experts)
        torch.manual_seed(1)  # the same for every way
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
        held = [*self.module.parameters(), *self.module.buffers()]
        adapters = self.trained if len(self.trained) < len(held) else []
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


class LoopedExperts(nn.Module):
    """The same experts one after the other, each matrix a library's frozen quantized module beside an adapter."""

    def __init__(self, experts: Experts, way: str, rank: int):
        super().__init__()
        quantize = {"bitsandbytes loop": _bitsandbytes_linear, "torchao loop": _torchao_linear}[way]
        self.bases, self.adapters = nn.ModuleList(), nn.ModuleList()
        for expert in range(experts.num_experts):
            weights = [getattr(experts, projection).weight[expert].detach() for projection in PROJECTIONS]
            self.bases.append(nn.ModuleList(quantize(weight) for weight in weights))
            self.adapters.append(nn.ParameterList(p for weight in weights for p in _adapter(weight, rank)))

    def forward(self, x_RH: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        outputs = []
        for rows, bases, adapters in zip(x_RH.split(counts.tolist()), self.bases, self.adapters, strict=True):

            def project(i, x, bases=bases, adapters=adapters):
                return bases[i](x) + F.linear(F.linear(x, adapters[2 * i + 1]), adapters[2 * i])

            outputs.append(project(2, F.silu(project(0, rows)) * project(1, rows)))
        return torch.cat(outputs)


def _adapter(weight: torch.Tensor, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    outputs, inputs = weight.shape
    return nn.Parameter(torch.zeros(outputs, rank)), nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))


def _bitsandbytes_linear(weight: torch.Tensor) -> nn.Module:
    modules = _library("bitsandbytes").nn
    linear = modules.Linear4bit(*reversed(weight.shape), bias=False, compute_dtype=torch.float32, device="meta")
    linear.weight = modules.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=False)
    return linear.to("cpu")  # which quantizes


def _torchao_linear(weight: torch.Tensor) -> nn.Module:
    quantization = _library("torchao.quantization")
    linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig(version=2))
    return linear


def _library(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels for devices that are not here
        return importlib.import_module(name)


def _stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that really lie in memory, scales included, behind a parameter of a library."""
    if state := getattr(tensor, "quant_state", None):  # bitsandbytes
        yield from (tensor.data, state.absmax)
    elif hasattr(tensor, "__tensor_flatten__"):  # torchao
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _stored(getattr(tensor, name))
    else:
        yield tensor


def _with_peft(experts: Experts, rank: int) -> nn.Module:
    names = [f"experts.{projection}" for projection in PROJECTIONS]
    config = LoraConfig(r=rank, lora_alpha=rank, target_parameters=names, target_modules=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it suggests target_modules
        return get_peft_model(Block(experts), config)


def _bytes(tensors) -> int:
    return sum(part.nbytes for tensor in tensors for part in _stored(tensor))


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
    ways = [*WAYS, *(way for way, library in LIBRARIES.items() if importlib.util.find_spec(library))]
    for way in ways:
        connection, theirs = fork.Pipe()
        process = fork.Process(target=_serve, args=(theirs, way, experts, hidden, width, rows, rank), daemon=True)
        process.start()
        workers[way] = connection

    def ask(way, method):
        workers[way].send(method)
        return workers[way].recv()

    memory = {way: ask(way, "memory") for way in ways}
    times = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            times[way].append(ask(way, "seconds"))
    for connection in workers.values():
        connection.send(None)

    rows_out, ratios = [], {}
    for way, seconds in times.items():
        median, spread = median_and_spread(seconds)
        against = [ours / theirs for ours, theirs in zip(seconds, times["fp32, PEFT LoRA"], strict=True)]
        ratios[way] = statistics.median(against)
        timing = {"step_seconds": median, "step_spread": spread, "over_peft": ratios[way]}
        version = importlib.metadata.version(LIBRARIES[way]) if way in LIBRARIES else None
        rows_out.append({"way": way, "version": version, **memory[way], **timing})
    held = {way: memory[way]["base_mib"] + memory[way]["adapter_mib"] + memory[way]["optimizer_mib"] for way in ways}
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
