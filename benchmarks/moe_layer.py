"""
One mixture-of-experts layer, forward and backward: ours, Qwen3's of transformers, and DeepSpeed's.

    python benchmarks/moe_layer.py [--quick] [--json FILE]

460 experts of width 64, top 12, hidden 256, 2048 tokens per process, fp32, one thread per process; in one process, and
on 2 ranks with different tokens. The router is a softmax over the picks, which all three know, so that with the same
weights they compute the same function: "error" is the largest relative difference of output and input gradient from
ours. Each has the same shared expert beside it. Qwen3's experts run through `grouped_mm`; on 2 ranks its layer is
replicated, as data parallelism runs it, and "sync" is the all-reduce of its experts' gradients, which expert
parallelism replaces. DeepSpeed's layer (expert parallel on 2 ranks) pads all experts to the rows of the most popular
one (`drop_tokens=False`); with a capacity of 1 it drops tokens, does less work, and is shown beside it. In the "skewed"
load one expert is picked by every third token instead of every fortieth, as happens before a router is balanced.

Every layer lives in forked processes of its own and the timed passes take turns; "ms" is the median. "ratio" is time,
sync included, over ours, the median over the rounds. "MiB" is how far resident memory of one process rises above its
value before the layer was built: weights, gradients and everything in between.
"""

import ctypes
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import median_and_spread, parse_arguments, report, target
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from deepspeed.utils import groups
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from lightninglm.distributed import process_group
from lightninglm.distributed.expert_parallel import apply_expert_parallel
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.feed_forward import SwiGLU
from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.moe import MoEBlock

OURS, QWEN3, DEEPSPEED, CAPACITY = "ours", "Qwen3 grouped_mm", "DeepSpeed dropless", "DeepSpeed capacity"
LAYERS = (OURS, QWEN3, DEEPSPEED, CAPACITY)
HIDDEN, WIDTH, EXPERTS, PICKS, TOKENS = 256, 64, 460, 12, 2048
MIB = 2**20
LOADS = {"random": 1.0, "skewed": 4.0}
"""Load -> factor on the router's weights for one expert."""


def random_weights(load: str) -> dict[str, torch.Tensor]:
    """The weights of the layer: router, experts, and the shared expert."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "gate_proj": (EXPERTS, WIDTH, HIDDEN),
        "up_proj": (EXPERTS, WIDTH, HIDDEN),
        "down_proj": (EXPERTS, HIDDEN, WIDTH),
    }
    weights = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    weights["router"][0] *= LOADS[load]
    return weights | {f"shared.{name}": weights[name][0].clone() for name in ("gate_proj", "up_proj", "down_proj")}


class Ours(nn.Module):
    def __init__(self, weights: dict[str, torch.Tensor], ranks: int):
        super().__init__()
        config = LightningLMConfig(
            hidden_size=HIDDEN,
            linear_num_heads=4,
            linear_head_dim=64,
            num_attention_heads=4,
            head_dim=64,
            intermediate_size=WIDTH,
            moe_intermediate_size=WIDTH,
            num_experts=EXPERTS,
            num_experts_per_tok=PICKS,
            router_scoring="softmax",
            balance="none",
        )
        self.block = MoEBlock(config, layer_idx=0)
        apply_expert_parallel(self, ranks)
        self.block.router.weight.data.copy_(weights["router"])
        for name, parameter in self.block.shared_expert.named_parameters():
            parameter.data.copy_(weights[f"shared.{name.removesuffix('.weight')}"])
        experts = self.block.experts
        for name in ("gate_proj", "up_proj", "down_proj"):
            local = weights[name][experts.expert_start :][: experts.expert_count]
            getattr(experts, name).weight.data[: experts.expert_count] = local

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x_BTH.shape[1]).expand(x_BTH.shape[:2])
        return self.block(x_BTH, LayerContext(position_ids=positions))[0]


class WithSharedExpert(nn.Module):
    """A peer's layer, with our shared expert beside it."""

    def __init__(self, layer: nn.Module, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.layer, self.shared_expert = layer, expert(weights, "shared.")

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        routed = self.layer(x_BTH)
        return self.shared_expert(x_BTH) + (routed[0] if isinstance(routed, tuple) else routed)


def expert(weights: dict[str, torch.Tensor], prefix: str = "", index: int | None = None) -> SwiGLU:
    """One expert as a module of its own."""
    module = SwiGLU(HIDDEN, WIDTH)
    for name, parameter in module.named_parameters():
        weight = weights[prefix + name.removesuffix(".weight")]
        parameter.data.copy_(weight if index is None else weight[index])
    return module


def qwen3(weights: dict[str, torch.Tensor]) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=PICKS,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
    )
    block = Qwen3MoeSparseMoeBlock(config)
    block.gate.weight.data.copy_(weights["router"])
    block.experts.gate_up_proj.data.copy_(torch.cat((weights["gate_proj"], weights["up_proj"]), dim=1))
    block.experts.down_proj.data.copy_(weights["down_proj"])
    return block


def deepspeed(weights: dict[str, torch.Tensor], ranks: int, drop_tokens: bool) -> nn.Module:
    moe = DeepSpeedMoE(HIDDEN, SwiGLU(HIDDEN, WIDTH), EXPERTS, ep_size=ranks, k=PICKS, drop_tokens=drop_tokens)
    groups._create_expert_and_data_parallel(ranks)
    moe.set_deepspeed_parallelism()
    moe.deepspeed_moe.gate.wg.weight.data.copy_(weights["router"])
    experts = moe.deepspeed_moe.experts.deepspeed_experts
    for index, module in enumerate(experts):
        local = expert(weights, index=process_group.rank() * len(experts) + index)
        module.load_state_dict(local.state_dict())
    return moe


class Worker:
    """One rank of one layer, in a process of its own."""

    def __init__(self, name: str, load: str, rank: int, ranks: int, port: int):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        process_group.init_distributed(timeout_minutes=5)
        weights = random_weights(load)
        self.name = name
        self.x_BTH = torch.randn(2, TOKENS // 2, HIDDEN, generator=torch.Generator().manual_seed(1 + rank))
        self.grad_BTH = torch.randn(self.x_BTH.shape, generator=torch.Generator().manual_seed(11 + rank))
        self.before = resident("VmRSS")
        if name == OURS:
            self.layer = Ours(weights, ranks)
        else:
            peer = qwen3(weights) if name == QWEN3 else deepspeed(weights, ranks, drop_tokens=name == CAPACITY)
            self.layer = WithSharedExpert(peer, weights)

    def passes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and gradient of the input."""
        self.layer.zero_grad(set_to_none=True)
        x_BTH = self.x_BTH.clone().requires_grad_()
        y_BTH = self.layer(x_BTH)
        y_BTH.backward(self.grad_BTH)
        return y_BTH.detach(), x_BTH.grad

    def seconds(self) -> float:
        """Duration of a forward and a backward pass."""
        dist.barrier()
        start = time.perf_counter()
        self.passes()
        return time.perf_counter() - start

    def sync_seconds(self) -> float:
        """Duration of the all-reduce of replicated experts' gradients; 0 where every expert has one owner."""
        if self.name != QWEN3 or dist.get_world_size() == 1:
            return 0.0
        start = time.perf_counter()
        for parameter in self.layer.layer.experts.parameters():
            dist.all_reduce(parameter.grad)
        return time.perf_counter() - start

    def peak_mib(self) -> float:
        """Peak of resident memory in a step, above what the process had before the layer was built."""
        self.passes()
        self.layer.zero_grad(set_to_none=True)
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at the present value
        self.passes()
        return (resident("VmHWM") - self.before) / MIB


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def serve(connection, *arguments) -> None:
    """The forked process: builds the layer, then answers with the result of the method asked for."""
    worker = Worker(*arguments)
    while (method := connection.recv()) is not None:
        connection.send(getattr(worker, method)())


class Ranks:
    """The processes of one layer."""

    def __init__(self, name: str, load: str, ranks: int):
        fork = multiprocessing.get_context("fork")  # this process runs no kernel before it forks
        self.connections, port = [], process_group.free_port()
        for rank in range(ranks):
            connection, theirs = fork.Pipe()
            fork.Process(target=serve, args=(theirs, name, load, rank, ranks, port), daemon=True).start()
            self.connections.append(connection)

    def ask(self, method: str) -> list:
        """The answers of all ranks."""
        for connection in self.connections:
            connection.send(method)
        return [connection.recv() for connection in self.connections]

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)


def measure(load: str, ranks: int, rounds: int) -> list[dict[str, object]]:
    """One row per layer."""
    layers = {name: Ranks(name, load, ranks) for name in LAYERS}
    peaks = {name: max(layer.ask("peak_mib")) for name, layer in layers.items()}
    results = {name: layer.ask("passes") for name, layer in layers.items()}
    times, syncs = {name: [] for name in LAYERS}, {name: [] for name in LAYERS}
    for _ in range(rounds):
        for name, layer in layers.items():
            times[name].append(max(layer.ask("seconds")))
            syncs[name].append(max(layer.ask("sync_seconds")))
    rows = []
    for name, layer in layers.items():
        layer.close()
        median, spread = median_and_spread(times[name])
        totals = [seconds + sync for seconds, sync in zip(times[name], syncs[name], strict=True)]
        rows.append(
            {
                "load": load,
                "ranks": ranks,
                "layer": name,
                "ms": 1000 * median,
                "spread": spread,
                "fastest_ms": 1000 * min(times[name]),
                "ratio": statistics.median(total / ours for total, ours in zip(totals, times[OURS], strict=True)),
                "sync_ms": 1000 * statistics.median(syncs[name]),
                "peak_mib": peaks[name],
                "error": largest_difference(results[name], results[OURS]),
            }
        )
    return rows


def largest_difference(found: list, expected: list) -> float:
    """Of outputs and input gradients, over all ranks, relative to the largest entry."""
    pairs = [pair for rank in zip(found, expected, strict=True) for pair in zip(*rank, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main() -> None:
    arguments = parse_arguments(__doc__.strip().splitlines()[0])
    rows, targets = [], {}
    rounds = 5 if arguments.quick else 25
    for load, ranks in (("random", 1), ("random", 2), ("skewed", 1)):
        rows += measure(load, ranks, rounds if load == "random" else 3)
        ours, grouped, padded, _ = rows[-len(LAYERS) :]
        where = f"{ranks} rank{'s' if ranks > 1 else ''}{', skewed' if load == 'skewed' else ''}"
        peak = ours["peak_mib"] / min(grouped["peak_mib"], padded["peak_mib"])
        targets |= {
            f"time over Qwen3's, {where}": target(1 / grouped["ratio"], 1.0, "lower"),
            f"speed over DeepSpeed's, {where}": target(padded["ratio"], 3.0, "higher"),
            f"peak over the lower of the two, {where}": target(peak, 1.0, "lower"),
            f"difference from Qwen3's, {where}": target(grouped["error"], 1e-5, "lower"),
        }
    report(
        f"{EXPERTS} experts of {WIDTH} x {HIDDEN}, top {PICKS}, {TOKENS} tokens per process",
        {
            "load": "load",
            "ranks": "ranks",
            "layer": "layer",
            "ms": "ms",
            "sync_ms": "sync",
            "ratio": "ratio",
            "peak_mib": "MiB",
            "error": "error",
        },
        rows,
        targets,
        arguments.json,
    )


if __name__ == "__main__":
    main()
