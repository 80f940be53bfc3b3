"""deepen: more layers, taken from the source's by a map.

Exact: with blend 1 a layer of step size 0 maps the state pair (p_prev, p_cur) to (p_cur, p_prev) whatever it
computes, so an even number of them in a row is the identity, bit for bit (docs/model.md, zero-step layers). Repeated
layers start like that and their step size rises to the parent's in the first steps of the next stage.
"""

import re
from itertools import groupby
from typing import Annotated, Literal

import torch
from pydantic import Field

from growth.errors import GrowthError
from growth.operator import (
    EXACT_LOSS_TOLERANCE,
    EXACT_TOLERANCE,
    OperatorOptions,
    Origin,
    Plan,
    Source,
    copied,
    fill,
    target_config,
)
from growth.tensor_table import TensorSpec

LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")


class DeepenOptions(OperatorOptions):
    """
    source_layers: for each target layer the source layer it is taken from; published 8 to 20: 0-7, 0-3, 0-7.
    ramp_steps: optimizer steps over which the repeated layers' step size rises to the parent's (exact only).
    strategy:
        exact   the first target layer of each source layer keeps its step size, repeats are zero-step copies
        paper   every layer at full step size at once
        stack   as paper, the whole stack repeated (G_stack, arXiv 2405.15319); needs a map that does that
    """

    source_layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    ramp_steps: Annotated[int, Field(ge=1)] = 200
    strategy: Literal["exact", "paper", "stack"] = "exact"


def plan(source: Source, options: DeepenOptions, seed: int) -> Plan:
    config, layers = source.config, options.source_layers
    repeats = _check_map(source, options)
    steps, ramp_to, steps_left = _current_ramp(source)
    # The first layer takes half a step (h_0 = h / 2): a copy of it anywhere else takes the whole one.
    full = [ramp_to[s] * (2 if s == 0 and i > 0 else 1) for i, s in enumerate(layers)]
    exact = options.strategy == "exact"
    if exact:
        now = [0.0 if i in repeats else steps[s] for i, s in enumerate(layers)]
        blends = [1.0 if i in repeats else config.blends[s] for i, s in enumerate(layers)]
        ramp_steps = options.ramp_steps
    else:
        now = [full[i] if i in repeats else steps[s] for i, s in enumerate(layers)]
        blends = [config.blends[s] for s in layers]
        ramp_steps = steps_left
    grown = target_config(
        source,
        num_hidden_layers=len(layers),
        layer_types=[config.layer_types[s] for s in layers],
        step_sizes=now,
        blends=blends,
    )

    def origin_of(name: str, spec: TensorSpec) -> Origin | None:
        if name == "model.step_size":
            return Origin("derived", (name,), lambda _: torch.tensor(now, dtype=torch.float32))
        if name == "model.blend":
            return Origin("derived", (name,), lambda _: torch.tensor(blends, dtype=torch.float32))
        match = LAYER.fullmatch(name)
        if match is None:
            return copied(name)
        layer = int(match["layer"])
        parent = f"model.layers.{layers[layer]}.{match['rest']}"
        return Origin("zero_step_copy" if exact and layer in repeats else "copied", (parent,))

    return Plan(
        grown,
        fill(grown, origin_of),
        tolerance=EXACT_TOLERANCE if exact else None,
        loss_tolerance=EXACT_LOSS_TOLERANCE if exact else None,
        step_size_ramp={"from": now, "to": full, "steps": ramp_steps} if now != full else None,
    )


def _current_ramp(source: Source) -> tuple[list[float], list[float], int]:
    """Step sizes now, the ones an unfinished ramp of the source leads to, and the steps that it has left."""
    ramp = source.trainer_state.get("ramps", {}).get("step_size")
    steps = list(source.config.step_sizes)
    left = ramp["steps"] - source.trainer_state["step"] if ramp else 0
    return (steps, list(ramp["to"]), left) if left > 0 else (steps, steps, 0)


def _check_map(source: Source, options: DeepenOptions) -> set[int]:
    """Refuses a map that cannot work; returns the target layers that repeat a source layer."""
    config, layers = source.config, options.source_layers
    depth = config.num_hidden_layers
    shown = f"source_layers = {layers}"
    if max(layers) >= depth:
        raise GrowthError(f"{shown}: source layer {max(layers)} does not exist, the source has layers 0..{depth - 1}")
    missing = sorted(set(range(depth)) - set(layers))
    if missing:
        raise GrowthError(f"{shown}: source layer(s) {missing} are not used; growth drops no layer")
    if len(layers) <= depth:
        raise GrowthError(f"{shown}: the target has {len(layers)} layers, not more than the source's {depth}")
    types = config.layer_types
    period = next(p for p in range(1, depth + 1) if types == [types[i % p] for i in range(depth)])
    for i, s in enumerate(layers):
        if types[s] != types[i % period]:
            raise GrowthError(
                f"{shown}: target layer {i} would be {types[s]} (from source layer {s}), but the source's pattern of "
                f"{period} layers puts {types[i % period]} there"
            )
    if options.strategy == "stack" and (len(layers) % depth or layers != list(range(depth)) * (len(layers) // depth)):
        raise GrowthError(f"{shown}: strategy stack repeats the whole stack, e.g. {list(range(depth)) * 2}")
    first = [layers.index(s) for s in range(depth)]
    repeats = set(range(len(layers))) - set(first)
    if options.strategy == "exact":
        _check_exact(source, shown, first, repeats)
    return repeats


def _check_exact(source: Source, shown: str, first: list[int], repeats: set[int]) -> None:
    if source.config.stack != "midpoint":
        raise GrowthError(f"deepen exact needs config.stack = 'midpoint', the source has {source.config.stack!r}")
    if first != sorted(first):
        raise GrowthError(f"{shown}: the first appearances of source layers must be in the source's order")
    for repeated, run in groupby(range(max(repeats) + 1), key=lambda i: i in repeats):
        run = list(run)
        if repeated and len(run) % 2:
            raise GrowthError(
                f"{shown}: {len(run)} zero-step layer(s) at {run[0]}..{run[-1]}; a run of repeats must have an even "
                "length, an odd one swaps the state pair and changes the function"
            )
