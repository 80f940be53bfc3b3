"""Learning rate, batch, context and mixture over the tokens of a lineage, as one picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from lightninglm.planning.stages import Stage
from lightninglm.training.schedule import learning_rate_factor

POINTS = 400  # per stage


def schedule_points(stage: Stage, parent_rate: float | None = None) -> list[tuple[int, float]]:
    """(step, learning rate of the group with multiplier 1) at the ends of the stage, of its warm-up, and in between."""
    recipe = stage.recipe
    total, schedule, peak = recipe.total_steps, recipe.schedule_in_steps, recipe.optimizer.lr
    steps = {round(i * (total - 1) / POINTS) for i in range(POINTS + 1)}
    steps |= {min(total - 1, max(0, schedule.warmup_steps + i)) for i in (-1, 0)}
    last = None if parent_rate is None else parent_rate / peak
    return [(step, peak * learning_rate_factor(step, total, schedule, last)) for step in sorted(steps)]


def plot_schedule(stages: Sequence[Stage], file: Path) -> None:
    """Writes the picture. Raises OSError when the file cannot be written."""
    figure = Figure(figsize=(12, 10), layout="constrained")
    rate, batch, context, mixture = figure.subplots(4, 1, sharex=True, height_ratios=(3, 1, 1, 2))
    domains = list(dict.fromkeys(domain for stage in stages for domain in stage.recipe.data.mixture))
    colours = dict(zip(domains, colormaps["tab10"].colors, strict=False))
    names = [f"{i} {s.recipe.name}{'' if s.config.rope_enabled else ' (no RoPE)'}" for i, s in enumerate(stages, 1)]
    figure.suptitle("\n".join("    ".join(names[i : i + 5]) for i in range(0, len(names), 5)), fontsize=9)
    start = 0.0
    final_rates: dict[str, float] = {}
    for i, stage in enumerate(stages):
        recipe = stage.recipe
        tokens_per_step = recipe.train.global_batch * recipe.data.sequence_length
        end = start + recipe.total_steps * tokens_per_step / 1e9
        points = schedule_points(stage, final_rates.get(recipe.grow.source) if recipe.grow else None)
        final_rates[recipe.name] = points[-1][1]
        at = [start + (step + 1) * tokens_per_step / 1e9 for step, _ in points]
        rate.plot(at, [lr for _, lr in points], color="black", linewidth=1)
        rate.text((start + end) / 2, 1.02, str(i + 1), ha="center", transform=rate.get_xaxis_transform())
        batch.plot([start, end], [tokens_per_step / 1e6] * 2, color="black")
        context.plot([start, end], [recipe.data.sequence_length] * 2, color="black")
        bottom = 0.0
        for domain, share in recipe.data.mixture.items():
            label = domain if domain not in {d for s in stages[:i] for d in s.recipe.data.mixture} else None
            mixture.bar(start, share, end - start, bottom, align="edge", color=colours[domain], label=label)
            bottom += share
        for axis in (rate, batch, context, mixture):
            axis.axvline(end, color="grey", linewidth=0.5)
        start = end
    rate.set(yscale="log", ylabel="learning rate")
    batch.set(ylabel="Mtokens per step", ylim=(0, None))
    context.set(ylabel="context", ylim=(0, None))
    mixture.set(ylabel="mixture", xlabel="tokens (billions)", ylim=(0, 1), xlim=(0, start))
    mixture.legend(ncols=len(domains), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.savefig(file, dpi=120)
