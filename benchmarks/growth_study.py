"""
What each way to grow costs: jump of the held-out loss at growth, loss after equal tokens, dead experts, parted clones.

    python benchmarks/growth_study.py [--quick] [--json FILE] [--plot FILE]

One process, a small model with every module but the second-token head, on the tiny corpus. Per seed a dense parent is
trained; it grows into mixtures of experts and deeper ones by every strategy, and the exact mixture, trained on, grows
into many experts. All children of a parent read the same tokens in the same order, at the parent's last learning rate,
new tensors warmed up and ramps followed as in training (lightninglm/training). "none" is the parent trained on, "none,
other order" the same on other tokens: what separates these two is the noise of a trajectory. A model whose moments
were dropped starts with a fresh Adam. Losses are means over domains of held-out nats per token. With --json, what is
done is written after every child, and a study that was stopped goes on from there.

most above parent: largest held-out loss above that of "none" at the same step, in the first 200 steps.
dead: share of routed experts with less than a tenth of the uniform load over the last 20 steps (mean over layers).
parted: mean distance of a clone's gate matrix from the mean of its siblings', over the norm of that mean.
"""

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import torch
from common import machine, write_json
from rich.console import Console
from rich.table import Table

from growth.core import grow
from growth.receipt import load_model
from lightninglm.checkpoint import CheckpointReader, CheckpointWriter
from lightninglm.checkpoint.model_tensors import model_tensors
from lightninglm.data.loader import PackedData
from lightninglm.data.order import GlobalOrder
from lightninglm.data.prepare import prepare
from lightninglm.modeling.byte_embedding import token_bytes, tokens_sha256
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM
from lightninglm.training.evaluate import heldout_loss
from lightninglm.training.schedule import learning_rate_factor, new_tensor_factor, ramped_step_sizes

matplotlib.use("agg")
from matplotlib import pyplot

CONFIG = {
    "hidden_size": 32, "num_hidden_layers": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "linear_num_heads": 2, "linear_head_dim": 16, "num_attention_heads": 2, "head_dim": 16, "indexer_num_heads": 2,
    "indexer_head_dim": 8, "sparse_key_budget": 16, "sparse_min_keys": 8, "sparse_max_keys": 32,
    "intermediate_size": 96, "moe_intermediate_size": 48, "num_nextn_predict_layers": 0,
    "stack_backend": "stored",  # the same gradients, bit for bit, as the reversible backend
}  # fmt: skip
VOCABULARY, LENGTH, BATCH = 1024, 64, 8
LEARNING_RATE, BETAS, EPS, CLIP = 4e-3, (0.9, 0.95), 1e-10, 1.0
DOWN_TO = 0.5  # of the learning rate, at the end of the dense parent
HELDOUT_SEQUENCES = 16  # per domain
LOAD_STEPS = 20
HIGHEST_DRAWN = 0.12  # nats above the parent
OTHER_ORDER = 1000  # added to the seed of the order
EXPERTS, MANY_EXPERTS = 4, 16
MOE, MANY = {"num_experts": EXPERTS}, {"num_experts": MANY_EXPERTS}
DEEPER = {"source_layers": [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]}


@dataclass(frozen=True)
class Branch:
    """One way to grow, and what it is called. parent: "dense", or "mixture", the exact one trained on."""

    step: str
    name: str
    parent: str = "dense"
    operator: str | None = None
    options: dict | None = None
    moments: bool = True
    other_order: bool = False


def branches(quick: bool) -> list[Branch]:
    """All children, those of one parent together; a quick study leaves out some baselines."""

    def ways(step, parent, operator, options, strategies):
        for name, more in strategies:
            yield Branch(step, name, parent, operator, {**options, **more})
        for name, more in (strategies[0], next(s for s in strategies if s[0] == "paper")):
            yield Branch(step, f"{name}, moments dropped", parent, operator, {**options, **more}, moments=False)

    def named(*names):
        return [(name, {"strategy": name}) for name in names]

    to_moe = named("exact", "paper") if quick else named(
        "exact", "paper", "scaled_halves", "clones", "drop_upcycling", "random"
    )  # fmt: skip
    ramps = [(f"exact, ramp of {steps} steps", {"ramp_steps": steps}) for steps in ((50,) if quick else (200, 50))]
    stack = ("stack", {"strategy": "stack", "source_layers": [0, 1, 2, 3] * 2})
    deeper = ramps + named("paper") + ([] if quick else [stack])
    to_many = named("exact", "paper", "duplicate") + ([] if quick else [("exact, noise 0.05", {"noise": 0.05})])
    return [
        Branch("dense", "none"),
        Branch("dense", "none, other order", other_order=True),
        *ways("dense to MoE", "dense", "dense_to_moe", MOE, to_moe),
        *ways("4 to 10 layers", "dense", "deepen", DEEPER, deeper),
        Branch("4 experts", "none", "mixture"),
        Branch("4 experts", "none, other order", "mixture", other_order=True),
        *ways("4 to 16 experts", "mixture", "multiply_experts", MANY, to_many),
    ]


@dataclass(frozen=True)
class Study:
    """How long everything trains, in steps, and where the loss is measured."""

    parent_steps: int
    moe_steps: int
    steps: int
    measured: tuple[int, ...]
    reported: tuple[int, ...]


FULL = Study(800, 200, 600, (*range(0, 200, 10), *range(200, 601, 50)), (10, 50, 200, 600))
QUICK = Study(150, 40, 40, (0, 10, 40), (10, 40))


class Text:
    """The tiny corpus in memory: batch(k) gives the token ids of step k in the order of a seed."""

    def __init__(self, folder: Path, seed: int):
        self.data = PackedData(folder, LENGTH)
        domains = self.data.domains
        self.rows = {domain: torch.stack(list(self.data.train(domain)["input_ids"])) for domain in domains}
        self.order = GlobalOrder(self.data.sizes, dict.fromkeys(domains, 1 / len(domains)), seed)
        self.heldout = {domain: ids[:HELDOUT_SEQUENCES] for domain, ids in self.data.heldout.items()}

    def batch(self, step: int) -> torch.Tensor:
        places = (self.order[k] for k in range(step * BATCH, (step + 1) * BATCH))
        return torch.stack([self.rows[domain][row] for domain, row in places])


def train(model, folder: Path | None, text: Text, first: int, steps: int, measured=(), schedule=None) -> dict:
    """
    Trains a model for `steps` steps on the text from step `first` on.

    Args:
        folder: checkpoint whose Adam state and trainer state it goes on from; None starts Adam anew.
        measured: steps at which the held-out loss is taken.
        schedule: step -> factor of the learning rate; constant DOWN_TO without one.
    Returns:
        {"losses": {step: mean held-out loss}, "train": loss per step, "dead", "optimizer"}.
    """
    state = {"ramps": {}, "new_tensors": {"names": [], "warmup_steps": 0}}
    if folder is not None:
        state = CheckpointReader(folder).trainer_state
    new, ramp = set(state["new_tensors"]["names"]), state["ramps"].get("step_size")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [{"params": [p for n, p in parameters.items() if (n in new) == fresh], "new": fresh} for fresh in (0, 1)]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
    if folder is not None:
        load_optimizer(optimizer, model, folder)
    losses, history, loads = {}, [], []
    model.train()
    for step in range(steps + 1):
        if step in measured:
            losses[step] = statistics.mean(heldout_loss(model, text.heldout, micro_batch=32).values())
        if step == steps:
            break
        factor = schedule(step) if schedule else DOWN_TO
        for group in optimizer.param_groups:
            warmup = new_tensor_factor(step, state["new_tensors"]["warmup_steps"]) if group["new"] else 1.0
            group["lr"] = LEARNING_RATE * factor * warmup
        sizes = ramped_step_sizes(step, ramp)
        if sizes is not None:
            model.set_step_size(sizes)
        ids = text.batch(first + step)
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        for parameter in parameters.values():
            if parameter.grad is None:  # nothing reads a previous memory here; Adam keeps state for it all the same
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        picks = model.after_optimizer_step()
        history.append(output.next_token_loss.item())
        if picks and step >= steps - LOAD_STEPS:
            loads.append(torch.stack(picks).double())
    dead = None
    if loads:
        load = torch.stack(loads).sum(0)
        dead = (load < 0.1 * load.mean(-1, keepdim=True)).double().mean().item()
    return {"losses": losses, "train": history, "dead": dead, "optimizer": optimizer}


def load_optimizer(optimizer, model, folder: Path) -> None:
    """Puts the Adam state of a checkpoint into a torch optimizer."""
    with CheckpointReader(folder) as reader:
        step = torch.tensor(float(reader.trainer_state["adam_step"]))
        for item in model_tensors(model):
            if not item.tensor.requires_grad:
                continue
            state = optimizer.state[item.tensor] = {"step": step.clone()}
            for part in ("exp_avg", "exp_avg_sq"):
                rows = [reader.read(f"{name}.{part}") for name in item.disk_names]
                state[part] = rows[0] if item.experts is None else torch.stack(rows)


def save(model, optimizer, folder: Path, text: Text, steps: int, seed: int) -> Path:
    """Writes a checkpoint that growth can start from."""
    with CheckpointWriter(folder) as writer:
        for item in model_tensors(model):
            for name, value in item.split(item.tensor.detach()):
                writer.add(name, value)
            if item.tensor.requires_grad:
                for part in ("exp_avg", "exp_avg_sq"):
                    for name, value in item.split(optimizer.state[item.tensor][part]):
                        writer.add(f"{name}.{part}", value)
        data = {"position": 0, "domain_offsets": {}, "next_domain_offsets": {}, "seed": seed}
        state = {
            "format": 1, "stage": "study", "step": steps, "tokens": 0, "lineage_tokens": 0, "adam_step": float(steps),
            "data": data, "ramps": {}, "new_tensors": {"names": [], "warmup_steps": 0}, "seed": seed, "lineage": [],
        }  # fmt: skip
        return writer.commit(model.config.to_dict(), state, tokenizer_folder=text.data.folder / "tokenizer")


def parted(model, clones: int, grouped: bool) -> float:
    """Mean distance of the clones of one parent from their mean, over its norm; all layers and parents."""
    distances = []
    for layer in model.model.layers:
        gates = layer.mlp.experts.gate_proj.weight.detach()  # [E, F, H]; clones of a parent lie side by side if grouped
        parents = len(gates) // clones
        families = gates.view(parents, clones, -1) if grouped else gates.view(clones, parents, -1).transpose(0, 1)
        mean = families.mean(1, keepdim=True)
        distances.append(((families - mean).norm(dim=-1) / mean.norm(dim=-1)).mean().item())
    return statistics.mean(distances)


def train_parents(study: Study, text: Text, scratch: Path, seed: int) -> dict[str, tuple[Path, int]]:
    """The parents of one seed: {name: (checkpoint, steps of text it has read)}."""
    torch.manual_seed(seed)
    tokens = tokens_sha256(token_bytes(text.data.folder / "tokenizer" / "tokenizer.json"))
    config = LightningLMConfig(**CONFIG, vocab_size=text.data.tokenizer.vocab_size, tokenizer_sha256=tokens)
    dense = LightningLMForCausalLM(config)
    dense.load_token_bytes(text.data.folder / "tokenizer")
    cosine = argparse.Namespace(
        kind="cosine", warmup_steps=20, warmup_from=0.0, stable_fraction=0.0, final_ratio=DOWN_TO
    )

    first = study.parent_steps
    trained = train(
        dense, None, text, 0, first, schedule=lambda step: learning_rate_factor(step, study.parent_steps, cosine)
    )
    parent = save(dense, trained["optimizer"], scratch / "dense", text, first, seed)
    grow(parent, scratch / "moe", "dense_to_moe", MOE, stage="study", seed=seed, progress=False)
    moe = load_model(scratch / "moe")
    trained = train(moe, scratch / "moe", text, first, study.moe_steps)
    steps = first + study.moe_steps
    return {
        "dense": (parent, first),
        "mixture": (save(moe, trained["optimizer"], scratch / "mixture", text, steps, seed), steps),
    }


def run_branch(study: Study, way: Branch, parent: Path, start: int, text: Text, scratch: Path, seed: int) -> dict:
    """Grows a parent and trains the child on, from step `start` of the text."""
    folder = parent
    if way.operator is not None:
        folder = scratch / "child"
        settings = {"stage": "study", "seed": seed, "moments": way.moments, "progress": False}
        grow(parent, folder, way.operator, way.options, **settings)
    base = statistics.mean(heldout_loss(load_model(parent), text.heldout, micro_batch=32).values())
    model = load_model(folder)
    result = train(model, folder, text, start, study.steps, study.measured)
    row = {"seed": seed, "step": way.step, "way": way.name, "parent": way.parent}
    row |= {"jump": result["losses"][0] - base, "losses": result["losses"], "train": result["train"]}
    row |= {"dead": result["dead"], "parted": None}
    if way.operator == "multiply_experts":
        row["parted"] = parted(model, MANY_EXPERTS // EXPERTS, model.config.router_layout == "grouped")
    if way.operator is not None:
        shutil.rmtree(folder)
    return row


def summarize(study: Study, ways: list[Branch], rows: list[dict]) -> list[dict]:
    """Mean and standard deviation over the seeds of every figure, per way."""
    table = []
    for way in ways:
        mine = [row for row in rows if (row["step"], row["way"]) == (way.step, way.name)]
        figures = {"jump": [row["jump"] for row in mine]}
        figures |= {f"loss_{step}": [row["losses"][step] for row in mine] for step in study.reported}
        rest = {(row["parent"], row["seed"]): row["losses"] for row in rows if row["way"] == "none"}
        excess = [
            max(row["losses"][s] - rest[way.parent, row["seed"]][s] for s in row["losses"] if s <= 200) for row in mine
        ]
        figures["most_above_parent"] = excess
        for key in ("dead", "parted"):
            figures[key] = [row[key] for row in mine if row[key] is not None]
        entry = {"step": way.step, "way": way.name, "seeds": len(mine)}
        for key, values in figures.items():
            entry[key] = statistics.mean(values) if values else None
            entry[f"{key}_sd"] = statistics.stdev(values) if len(values) > 1 else None
        table.append(entry)
    return table


def show(study: Study, table: list[dict]) -> None:
    """Prints the summary."""
    columns = ["jump", *(f"loss_{step}" for step in study.reported), "most_above_parent", "dead", "parted"]
    shown = Table("growth", "way", *(column.replace("_", " ") for column in columns), title="growth study")
    for entry in table:
        cells = []
        for column in columns:
            value, spread = entry[column], entry[f"{column}_sd"]
            cells.append("" if value is None else f"{value:.3f}" + ("" if spread is None else f" ± {spread:.3f}"))
        shown.add_row(entry["step"], entry["way"], *cells)
    Console(width=180).print(shown)


def plot(ways: list[Branch], rows: list[dict], file: Path) -> None:
    """Held-out loss after growth less that of the parent trained on, mean and spread over the seeds."""
    steps = list(dict.fromkeys(way.step for way in ways if way.operator is not None))
    figure, axes = pyplot.subplots(1, len(steps), figsize=(5 * len(steps), 4), layout="constrained")
    for axis, step in zip(axes, steps, strict=True):
        grown = [way for way in ways if way.step == step]
        parent = grown[0].parent
        rest = {row["seed"]: row["losses"] for row in rows if (row["parent"], row["way"]) == (parent, "none")}
        for way in grown + [way for way in ways if way.other_order and way.parent == parent]:
            mine = [row for row in rows if (row["step"], row["way"]) == (way.step, way.name)]
            measured = list(mine[0]["losses"])
            values = [[row["losses"][s] - rest[row["seed"]][s] for row in mine] for s in measured]
            mean = [statistics.mean(some) for some in values]
            style = {"color": "gray", "linestyle": ":"} if way.other_order else {}
            style |= {} if way.moments else {"linestyle": "--"}
            (line,) = axis.plot(measured, mean, label=way.name, **style)
            axis.fill_between(
                measured, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.15
            )
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set(title=step, xlabel="steps after growth")
        axis.set_ylim(top=min(axis.get_ylim()[1], HIGHEST_DRAWN))
        axis.legend(fontsize=7)
    axes[0].set_ylabel("held-out loss, less the parent's trained on (nats)")
    seeds = len({row["seed"] for row in rows})
    figure.suptitle(f"{seeds} seed{'s' if seeds > 1 else ''}; line: mean, band: lowest to highest", fontsize=9)
    figure.savefig(file, dpi=120)


def read_rows(file: Path | None, settings: dict) -> list[dict]:
    """Rows of an earlier, stopped study with the same settings but the number of seeds; none without FILE."""
    if file is None or not file.exists():
        return []
    earlier = json.loads(file.read_text())
    if earlier["settings"] != json.loads(json.dumps(settings)):
        raise SystemExit(f"{file}: holds a study with other settings; give another file")
    return [row | {"losses": {int(step): loss for step, loss in row["losses"].items()}} for row in earlier["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, fewer baselines: minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to FILE; go on from it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss curves into FILE (.png, .svg)")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds 0..N-1 (default 3, quick 1)")
    args = parser.parse_args()
    study, ways = QUICK if args.quick else FULL, branches(args.quick)
    seeds = args.seeds or (1 if args.quick else 3)
    started, console = time.monotonic(), Console(stderr=True, soft_wrap=True)
    settings = {"study": asdict(study), "config": CONFIG, "tokens_per_step": LENGTH * BATCH}
    rows = read_rows(args.json, settings)

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - started:5.0f} s] {text}", highlight=False, markup=False)

    with tempfile.TemporaryDirectory() as scratch:
        data = prepare({"kind": "tiny", "vocab_size": VOCABULARY}, Path(scratch) / "data", LENGTH)
        for seed in range(seeds):
            done = {(row["step"], row["way"]) for row in rows if row["seed"] == seed}
            left = [way for way in ways if (way.step, way.name) not in done]
            if not left:
                continue
            folder = Path(scratch) / f"seed-{seed}"
            folder.mkdir()
            text, other = Text(data, seed), Text(data, seed + OTHER_ORDER)
            parents = train_parents(study, text, folder, seed)
            say(f"seed {seed}: parents trained")
            for way in left:
                row = run_branch(study, way, *parents[way.parent], other if way.other_order else text, folder, seed)
                rows.append(row)
                last = row["losses"][study.steps]
                say(f"seed {seed}: {way.step}, {way.name}: jump {row['jump']:+.4f}, loss {last:.4f}")
                if args.json:
                    write_json(args.json, {"machine": machine(), "settings": settings, "rows": rows})
    table = summarize(study, ways, rows)
    show(study, table)
    if any(not math.isfinite(loss) for row in rows for loss in row["losses"].values()):
        console.print("[red]a loss is not finite[/red]")
    if args.plot:
        plot(ways, rows, args.plot)
    if args.json:
        write_json(args.json, {"machine": machine(), "settings": settings, "summary": table, "rows": rows})


if __name__ == "__main__":
    main()
