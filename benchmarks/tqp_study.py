"""
What training quantized experts with adapters gives up against training the experts, and what errors in it cost.

    python benchmarks/tqp_study.py [--quick] [--json FILE] [--plot FILE]

Per seed a small mixture of experts is trained on the tiny corpus. From its weights every way trains for the same steps,
on the same tokens, everything but the experts alike (fresh Adam, constant learning rate after a warm-up; adapters at
three times the rate), on one rank of the real engine. Losses are means over domains of held-out nats per token. With
--json, what is done is written after every way, and a study that was stopped goes on from there.

- full: the experts themselves are trained in fp32.
- int8, int4 at rank r: the base is frozen and quantized, adapters are trained.
- other seed: the same with another rotation of the base and other random adapters: how far it ends from the first
  is the noise of a run.
- detached base: no gradient through the frozen base to what lies below, as in the published code.
- merging: the adapters are merged into their base at an interval and start anew.
- merging, stale master copies: the same with the rewrite forgotten in the optimizer's fp32 master copies.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import matplotlib
import torch
from common import machine, report, target, write_json

from lightninglm.data.loader import PackedData
from lightninglm.data.order import GlobalOrder
from lightninglm.data.prepare import prepare
from lightninglm.distributed import adapters
from lightninglm.distributed.ds_config import load_ds_config
from lightninglm.distributed.engine import build_engine, parameter_groups
from lightninglm.distributed.process_group import init_distributed, shutdown
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.initialization import initialize_model
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM
from lightninglm.modeling.quantized_experts import _FrozenGroupedLinear, quantize_experts
from lightninglm.modeling.reversible import ReversibilityError
from lightninglm.training.evaluate import heldout_loss
from lightninglm.training.schedule import new_tensor_factor

matplotlib.use("agg")
from matplotlib import pyplot

CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "linear_num_heads": 4, "linear_head_dim": 16, "num_attention_heads": 4, "head_dim": 16, "indexer_num_heads": 2,
    "indexer_head_dim": 8, "sparse_key_budget": 16, "sparse_min_keys": 8, "sparse_max_keys": 32,
    "intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 8,
    "stack_backend": "stored",  # the same gradients, bit for bit, as the reversible backend
}  # fmt: skip
VOCABULARY, LENGTH, BATCH = 1024, 64, 8
LEARNING_RATE, WARMUP_STEPS, ADAPTERS_FACTOR = 3e-3, 10, 3.0
HELDOUT_SEQUENCES = 16  # per domain
OTHER_SEED = 1000  # added to the seed of rotation and adapters
ZERO1 = Path(__file__).parents[1] / "ds_configs" / "zero1.json"


@dataclass(frozen=True)
class Way:
    """One way of training. kind None: the experts themselves. merge: whether adapters are merged on the way."""

    name: str
    kind: str | None = None
    rank: int = 16
    detached: bool = False
    merge: bool = False
    stale: bool = False
    other_seed: bool = False


WAYS = (
    Way("full"),
    *(Way(f"{kind}, rank {rank}", kind, rank) for kind in ("int8", "int4") for rank in (4, 16, 64)),
    *(Way(f"{kind}, rank 16, detached base", kind, detached=True) for kind in ("int8", "int4")),
    *(Way(f"{kind}, rank 16, merging", kind, merge=True) for kind in ("int8", "int4")),
    Way("int8, rank 16, merging, stale master copies", "int8", merge=True, stale=True),
    *(Way(f"{kind}, rank 16, other seed", kind, other_seed=True) for kind in ("int8", "int4")),
)


@dataclass(frozen=True)
class Study:
    """Steps of the parent and of every way, between merges and between measurements."""

    parent_steps: int
    steps: int
    merge_every: int
    measure_every: int


FULL = Study(800, 500, 50, 50)
QUICK = Study(100, 40, 10, 40)


class Text:
    """The tiny corpus: batch(k) gives the token ids of step k."""

    def __init__(self, folder: Path, seed: int):
        self.data = PackedData(folder, LENGTH)
        domains = self.data.domains
        self.order = GlobalOrder(self.data.sizes, dict.fromkeys(domains, 1 / len(domains)), seed)
        self.heldout = {domain: ids[:HELDOUT_SEQUENCES] for domain, ids in self.data.heldout.items()}

    def batch(self, step: int) -> torch.Tensor:
        return self.data.batch(self.order, range(step * BATCH, (step + 1) * BATCH))


def train(
    model: LightningLMForCausalLM, text: Text, first: int, steps: int, study: Study, way: Way
) -> dict[int, float]:
    """Trains a model on the text from step `first` on; {step: mean held-out loss}, without those after a divergence."""
    ds_config = load_ds_config(
        ZERO1,
        micro_batch=BATCH,
        accumulation=1,
        world_size=1,
        dtype="fp32",
        optimizer={"lr": LEARNING_RATE, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0},
        gradient_clipping=1.0,
    )
    multipliers = {"router": 1.0, "adapters": ADAPTERS_FACTOR, "rest": 1.0}
    groups = parameter_groups(model.train(), lr=LEARNING_RATE, weight_decay=0.0, multipliers=multipliers)
    engine = build_engine(model, ds_config, groups)
    losses, merged_at = {}, 0
    for step in range(steps + 1):
        if step % study.measure_every == 0 or step == steps:
            losses[step] = statistics.mean(heldout_loss(model, text.heldout, micro_batch=32).values())
        if step == steps:
            break
        for group in engine.optimizer.param_groups:
            factor = new_tensor_factor(step, WARMUP_STEPS)
            if group["role"] == "adapters":
                factor *= new_tensor_factor(step - merged_at, WARMUP_STEPS)
            group["lr"] = LEARNING_RATE * multipliers[group["role"]] * factor
        ids = text.batch(first + step)
        try:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
        except ReversibilityError:  # the state left the range of fixed-point numbers
            break
        engine.step()
        model.after_optimizer_step()
        if way.merge and (step + 1) % study.merge_every == 0 and step + 1 < steps:
            adapters.merge_adapters(engine)
            merged_at = step + 1
    return losses


def child(parent: LightningLMForCausalLM, way: Way, text: Text, seed: int) -> LightningLMForCausalLM:
    """The parent's function, up to quantization, in the form that a way trains."""
    quantization = None
    if way.kind is not None:
        quantization = {
            "kind": way.kind, "group_size": 32, "rank": way.rank,
            "seed": seed + (OTHER_SEED if way.other_seed else 0),
        }  # fmt: skip
    config = LightningLMConfig.from_dict({**parent.config.to_dict(), "expert_quantization": quantization})
    model = LightningLMForCausalLM(config)
    model.load_token_bytes(text.data.folder / "tokenizer")
    model.load_state_dict(parent.state_dict(), strict=way.kind is None)
    if way.kind is not None:
        for i, (layer, before) in enumerate(zip(model.model.layers, parent.model.layers, strict=True)):
            layer.mlp.experts = quantize_experts(before.mlp.experts, config, layer_idx=i)
    return model


def errors(way: Way) -> ExitStack:
    """Puts the errors of a way into the code, until the context ends."""
    stack = ExitStack()
    if way.detached:

        def backward(ctx, grad_RO):
            return grad_RO.new_zeros(grad_RO.shape[0], ctx.in_features), None, None, None, None, None

        stack.enter_context(patch.object(_FrozenGroupedLinear, "backward", staticmethod(backward)))
    if way.stale:

        def weights_only(state, parameter, value):
            parameter.data.copy_(value)

        stack.enter_context(patch.object(adapters, "_write", weights_only))
        stack.enter_context(patch.object(adapters.OptimizerState, "publish", lambda state: None))
    return stack


def run_seed(study: Study, folder: Path, seed: int, curves: dict[str, dict[int, float]], save: Callable) -> None:
    """Adds {way: {step: loss}} of one seed to `curves`, what is missing in it, and saves after every way."""
    ways = [way for way in WAYS if way.name not in curves]
    if not ways:
        return
    text = Text(folder, seed)
    parent = LightningLMForCausalLM(LightningLMConfig(vocab_size=text.data.tokenizer.vocab_size, **CONFIG))
    initialize_model(parent, seed)
    parent.load_token_bytes(folder / "tokenizer")
    train(parent, text, 0, study.parent_steps, study, WAYS[0])
    for way in ways:
        with errors(way):
            curves[way.name] = train(child(parent, way, text, seed), text, study.parent_steps, study.steps, study, way)
        save()
        print(f"seed {seed}, {way.name}: {list(curves[way.name].values())[-1]:.4f}", flush=True)


def plot(curves: list[dict[str, dict[int, float]]], file: Path) -> None:
    """Held-out loss against steps, one line per way, mean over seeds."""
    figure, axes = pyplot.subplots(figsize=(9, 6))
    for way in WAYS:
        steps = [step for step in curves[0][way.name] if all(step in seed[way.name] for seed in curves)]
        means = [statistics.mean(seed[way.name][step] for seed in curves) for step in steps]
        style = ":" if way.detached or way.stale else "--" if way.merge else "-"
        axes.plot(steps, means, style, label=way.name)
    axes.set(xlabel="steps after quantizing", ylabel="held-out nats per token")
    axes.set_ylim(top=curves[0]["full"][0] + 0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def read_curves(file: Path | None, settings: dict) -> list[dict[str, dict[int, float]]]:
    """Per seed the curves of an earlier, stopped study with the same settings; none without FILE."""
    if file is None or not file.exists():
        return []
    earlier = json.loads(file.read_text())
    if earlier["settings"] != json.loads(json.dumps(settings)):
        raise SystemExit(f"{file}: holds a study with other settings; give another file")
    return [
        {way: {int(step): loss for step, loss in curve.items()} for way, curve in seed.items()}
        for seed in earlier["curves"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed and few steps, a few minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all curves to FILE; go on from it")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="seeds 0..N-1 (default 2, quick 1)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the curves to FILE (PNG)")
    arguments = parser.parse_args()
    study, seeds = (QUICK, 1) if arguments.quick else (FULL, arguments.seeds)
    settings = {"study": asdict(study), "config": CONFIG, "tokens_per_step": LENGTH * BATCH}
    curves = read_curves(arguments.json, settings)
    curves += [{} for _ in range(seeds - len(curves))]

    def save() -> None:
        if arguments.json:
            write_json(arguments.json, {"machine": machine(), "settings": settings, "curves": curves})

    init_distributed()
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare({"kind": "tiny", "vocab_size": VOCABULARY}, Path(scratch) / "data", LENGTH)
        for seed in range(seeds):
            run_seed(study, folder, seed, curves[seed], save)
    last = study.steps

    def final(way: str) -> float:
        """Mean over seeds; infinite when one diverged."""
        return statistics.mean(seed[way].get(last, math.inf) for seed in curves)

    def noise(way: str) -> float:
        """Largest distance over the seeds between two runs that differ in rotation and adapters only."""
        return max(
            abs(seed[way].get(last, math.inf) - seed[f"{way}, other seed"].get(last, math.inf)) for seed in curves
        )

    rows = [
        {
            "way": way.name,
            "start": f"{statistics.mean(seed[way.name][0] for seed in curves):.4f}",
            "end": f"{final(way.name):.4f}",
            "over_full": f"{final(way.name) - final('full'):+.4f}",
        }
        for way in WAYS
    ]
    int8, int4 = "int8, rank 16", "int4, rank 16"
    report(
        f"held-out loss, {study.steps} steps, mean of {len(curves)} seed(s), merging every {study.merge_every}",
        {"way": "experts", "start": "start", "end": "end", "over_full": "over full"},
        rows,
        {
            "detached base over correct gradient, int8": target(
                final(f"{int8}, detached base") - final(int8), 0, "higher"
            ),
            "detached base over correct gradient, int4": target(
                final(f"{int4}, detached base") - final(int4), 0, "higher"
            ),
            "merging over never merging, int8": target(final(f"{int8}, merging") - final(int8), 0.02, "lower"),
            "the same, over the noise of a run": target(
                (final(f"{int8}, merging") - final(int8)) / max(noise(int8), noise(int4)), 1, "lower"
            ),
            "stale master copies over merging": target(
                final(f"{int8}, merging, stale master copies") - final(f"{int8}, merging"), 0.1, "higher"
            ),
        },
        None,
    )
    if arguments.plot:
        plot(curves, arguments.plot)
    shutdown()


if __name__ == "__main__":
    main()
