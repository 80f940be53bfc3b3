"""
Turns a lineage into its rehearsal: the same stages and growth steps, so narrow and short that CPU ranks run them.

Widths, the vocabulary and sequences are divided by N; heads and head sizes share the division, N = heads * sizes.
Layers, experts, picks, routers, ZeRO configurations, growth operators, learning rates and the shape of every schedule
stay. The result is a folder of ordinary recipes, so that nothing after it knows of a rehearsal.
"""

import os
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from lightninglm.data.corpus import TINY_DOMAINS
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.recipe import Lineage, Recipe, RecipeError, load_lineage

BY_N = ("hidden_size", "intermediate_size", "moe_intermediate_size", "max_position_embeddings")
BY_HEADS = ("linear_num_heads", "num_attention_heads")
BY_SIZES = (
    *("linear_head_dim", "head_dim", "indexer_head_dim"),
    *("sparse_key_budget", "sparse_min_keys", "sparse_max_keys"),
)
STEPS = 6
LARGEST_MICRO_BATCH = 2
LARGEST_ACCUMULATION = 2
LARGEST_VOCABULARY = 2048  # what a tokenizer trained on the tiny source has text for
EVALUATE = {"every": 3, "sequences": 2}
CHECKPOINT_EVERY = 2
QUANTIZATION_DEFAULTS = {"group_size": 128, "rank": 16}  # of `quantize_experts`, where a recipe gives none


def write_rehearsal(lineage: Lineage, n: int, ranks: int, run: Path) -> Lineage:
    """
    Writes the rehearsal's recipes into `<run>/recipes` and loads them.

    Args:
        lineage: the real one, `--set` values included.
        n: what widths are divided by.
        ranks: of the rehearsal; expert-parallel groups of more ranks shrink to so many.
        run: folder of the rehearsal, which may have begun.
    Raises RecipeError when the seed's sizes cannot be divided by n, or something else has begun in the folder.
    """
    seed = lineage.recipes[0].build_config()
    if not _divides(n, seed):
        valid = [i for i in range(2, seed.hidden_size + 1) if _divides(i, seed)]
        raise RecipeError(
            f"--rehearse {n}: does not divide the sizes of stage '{lineage.recipes[0].name}' (hidden_size = "
            f"{seed.hidden_size}); these do: {', '.join(map(str, valid)) or 'none'}"
        )
    used = [domain for recipe in lineage.recipes for domain in (*recipe.data.mixture, *(recipe.evaluate.domains or ()))]
    domains = {domain: TINY_DOMAINS[i % len(TINY_DOMAINS)] for i, domain in enumerate(dict.fromkeys(used))}
    source = {"kind": "tiny", "vocab_size": min(seed.vocab_size // n, LARGEST_VOCABULARY)}
    listed = {"name": f"{lineage.name}-rehearsal", "world_size": ranks, "stages": [f.name for f in lineage.files]}
    texts = {"lineage.yaml": yaml.safe_dump(listed, sort_keys=False)}
    for recipe, file in zip(lineage.recipes, lineage.files, strict=True):
        values = rehearsed(recipe, n, lineage.world_size, ranks, domains, source)
        header = f"# Rehearsal of {file.name}, widths divided by {n}. Written anew at every start.\n"
        texts[file.name] = header + yaml.safe_dump(values, sort_keys=False)
    folder = run / "recipes"
    _refuse_another_run(run, [recipe.name for recipe in lineage.recipes], folder, texts)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        _write(folder / name, text)
    return load_lineage(folder)


def _refuse_another_run(run: Path, stages: list[str], folder: Path, texts: dict[str, str]) -> None:
    """Raises RecipeError when stages have begun in the folder of a run, but not by these recipes."""
    begun = [stage for stage in stages if (run / stage).exists()]
    written = [
        name for name, text in texts.items() if (folder / name).is_file() and (folder / name).read_text() == text
    ]
    if begun and len(written) < len(texts):
        what = "a rehearsal of other recipes, another N or other ranks" if folder.exists() else "a run, not a rehearsal"
        raise RecipeError(
            f"--run {run}: holds {what} (its stage '{begun[-1]}' has begun); give the rehearsal a folder of its own"
        )


def rehearsed(
    recipe: Recipe, n: int, world_size: int, ranks: int, domains: dict[str, str], source: dict[str, Any]
) -> dict[str, Any]:
    """
    One stage's recipe as YAML values.

    Args:
        world_size, ranks: of the real run, of the rehearsal.
        domains: domain of the recipe -> domain of the tiny source.
        source: `data.source` of the rehearsal.
    """
    values = {key: value for key, value in recipe.resolved().items() if value is not None}
    seed = recipe.build_config() if recipe.grow is None else None
    real_steps = recipe.total_steps

    def scaled(steps: int) -> int:
        """The same share of the stage; of a stretch that begins a stage, at least one step and not all of them."""
        return min(max(1, round(steps / real_steps * STEPS)), STEPS - 1) if steps else 0

    sizes = dict(recipe.model or {})
    if seed is not None:
        sizes |= {key: getattr(seed, key) for key in (*BY_N, *BY_HEADS, *BY_SIZES)}
        sizes.pop("vocab_size", None)  # the source's
    if sizes:
        values["model"] = _divided(sizes, n)
    if recipe.grow is not None:
        values["grow"]["steps"] = [
            {operator: _growth_options(operator, options, n, scaled)}
            for step in recipe.grow.steps
            for operator, options in step.items()
        ]
        values["grow"]["new_tensor_warmup"] = scaled(recipe.grow.new_tensor_warmup)

    mixture = dict.fromkeys((domains[domain] for domain in recipe.data.mixture), 0.0)
    for domain, share in recipe.data.mixture.items():
        mixture[domains[domain]] += share
    length = recipe.data.sequence_length // n
    values["data"] |= {"source": source, "sequence_length": length, "mixture": mixture}

    train = recipe.train
    accumulation = train.global_batch // (train.micro_batch * world_size)
    micro_batch = min(train.micro_batch, LARGEST_MICRO_BATCH)
    global_batch = micro_batch * ranks * min(accumulation, LARGEST_ACCUMULATION)
    values["train"] |= {
        "tokens": STEPS * global_batch * length,
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "expert_parallel": min(train.expert_parallel, ranks),
        "dtype": "fp32",
    }
    if train.merge_adapters_every is not None:
        values["train"]["merge_adapters_every"] = scaled(train.merge_adapters_every)
    if train.sampled_selection is not None:
        values["train"]["sampled_selection"]["steps"] = scaled(train.sampled_selection.steps)
    values["schedule"] |= {"warmup_tokens": None, "warmup_steps": scaled(recipe.schedule_in_steps.warmup_steps)}
    values["deepspeed"] = str(recipe.deepspeed_file.resolve())
    values["evaluate"] = EVALUATE | (
        {"domains": [domains[domain] for domain in recipe.evaluate.domains]} if recipe.evaluate.domains else {}
    )
    values["checkpoint"]["every"] = CHECKPOINT_EVERY
    return values


def print_rules(lineage: Lineage, rehearsal: Lineage, n: int, console: Console) -> None:
    """What the rehearsal divides, cuts and changes; all else is kept."""
    before, after = lineage.recipes[0].build_config(), rehearsal.recipes[0].build_config()
    rows = [
        (f"divided by {n}", key, _span([getattr(before, key)]), _span([getattr(after, key)]))
        for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
    ]
    by_heads, by_sizes = _split(n)
    for number, keys in ((by_heads, BY_HEADS), (by_sizes, BY_SIZES)):
        rows += [
            (f"divided by {number}", key, _span([getattr(before, key)]), _span([getattr(after, key)])) for key in keys
        ]
    for rule, what, of in (
        (f"divided by {n}", "data.sequence_length", lambda r: r.data.sequence_length),
        ("cut", "steps of a stage", lambda r: r.total_steps),
        ("cut", "train.micro_batch", lambda r: r.train.micro_batch),
        ("cut", "train.global_batch", lambda r: r.train.global_batch),
        ("cut", "train.expert_parallel", lambda r: r.train.expert_parallel),
        (f"divided by {by_sizes}", "adapter rank", lambda r: _quantization(r, "rank")),
        (f"divided by {by_sizes}", "quantization group", lambda r: _quantization(r, "group_size")),
    ):
        old, new = ([of(recipe) for recipe in side.recipes] for side in (lineage, rehearsal))
        rows.append((rule, what, _span(old), _span(new)))
    rows.append(("changed", "train.dtype", _words(r.train.dtype for r in lineage.recipes), "fp32"))
    rows.append(("changed", "data.source", "its own", "tiny, a domain for a domain"))
    table = Table(title=f"Rehearsal of {lineage.name}", title_justify="left", box=box.SIMPLE)
    for heading in ("rule", "what", "recipe", "rehearsal"):
        table.add_column(heading, no_wrap=heading in ("rule", "what"))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(
        "scaled with the steps: warm-ups, ramps, sampled selection, merges of adapters. Kept: layers, experts, picks, "
        "routers, balance, stacks, ZeRO configurations, growth operators and strategies, moments, optimizer, learning "
        "rates and their groups, kinds of schedules, seeds, checkpoints kept."
    )


def _split(n: int) -> tuple[int, int]:
    """(what heads, what head sizes are divided by): n as a product, the sizes' part at least the root."""
    sizes = next(i for i in range(1, n + 1) if n % i == 0 and i * i >= n)
    return n // sizes, sizes


def _divisors(n: int) -> dict[str, int]:
    heads, sizes = _split(n)
    return dict.fromkeys(BY_N, n) | dict.fromkeys(BY_HEADS, heads) | dict.fromkeys(BY_SIZES, sizes)


def _divides(n: int, config: LightningLMConfig) -> bool:
    """Whether every size is a multiple, and heads keep an even size, which rotary embeddings need."""
    if n < 2 or any(getattr(config, key) % divisor for key, divisor in _divisors(n).items()):
        return False
    _, sizes = _split(n)
    return all(getattr(config, key) // sizes % 2 == 0 for key in ("linear_head_dim", "head_dim"))


def _divided(values: dict[str, Any], n: int) -> dict[str, Any]:
    divisors = _divisors(n)
    return {key: value // divisors[key] if key in divisors else value for key, value in values.items()}


def _growth_options(operator: str, options: dict[str, Any], n: int, scaled) -> dict[str, Any]:
    changes = {}
    if "expert_size" in options:
        changes["expert_size"] = options["expert_size"] // n
    if "ramp_steps" in options:
        changes["ramp_steps"] = scaled(options["ramp_steps"])
    if operator == "quantize_experts":
        _, sizes = _split(n)
        changes = {key: max(1, options.get(key, value) // sizes) for key, value in QUANTIZATION_DEFAULTS.items()}
    return options | changes


def _quantization(recipe: Recipe, key: str) -> int | None:
    for step in recipe.grow.steps if recipe.grow else ():
        if "quantize_experts" in step:
            return step["quantize_experts"].get(key, QUANTIZATION_DEFAULTS[key])
    return None


def _span(values: list[int | None]) -> str:
    """'4,096' of equal values, '4,096 to 8,192' of others, nothing of none."""
    there = sorted({value for value in values if value is not None})
    return " to ".join(f"{value:,}" for value in dict.fromkeys((*there[:1], *there[-1:])))


def _words(values) -> str:
    return ", ".join(dict.fromkeys(values))


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
