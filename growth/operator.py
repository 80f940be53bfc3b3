"""What an operator is: a pure plan that names, for every tensor of the target, where it comes from.

An operator reads no tensor and writes no file. It is given the source's configuration and tensor table and returns a
`Plan`: the target's configuration and one `Origin` per target tensor. `job.py` carries any plan out, tensor by tensor.

Shape letters as in docs/model.md: E experts, F expert width, S dense width, P groups, M members, H hidden.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from growth.errors import GrowthError
from growth.moments import EXP_AVG, EXP_AVG_SQ, RULES
from growth.tensor_table import TensorSpec, tensor_table
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.initialization import initial_tensor


class OperatorOptions(BaseModel):
    """
    Options that every operator has. Unknown ones are refused by name.

    tolerance: largest relative logit difference the receipt may show; replaces the one the strategy declares.
    """

    model_config = ConfigDict(extra="forbid")

    tolerance: float | None = Field(
        default=None, gt=0, description="largest relative logit difference allowed, instead of the strategy's own"
    )


@dataclass(frozen=True)
class Source:
    """The checkpoint an operator starts from: configuration, tensor table, trainer state, bytes of all tokens."""

    config: LightningLMConfig
    table: Mapping[str, TensorSpec]
    trainer_state: Mapping[str, Any]
    tokens: Sequence[bytes]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Origin:
    """
    Where one target tensor comes from.

    kind: a row of `moments.RULES`.
    sources: disk names of the source tensors that `value` takes, in order; in a bf16 run their fp32 masters, of which
        the target's weight is then the rounded result (kinds that copy read weight and master each for itself).
    value: the formula; it may not depend on anything but its arguments and the plan's seed.
    carry: the formula for the moments, of the same sources' moments; by default `value`.
    carry_square: the formula for exp_avg_sq where it is another than `carry`.
    clones: M, the number of clones that share the gradient of one source (kinds `clone` and `noisy_clone`).
    like: source tensor whose dtype on disk the target's takes; by default the first of `sources`, float32 without any.
    dtype: what the target is stored in, whatever the source's is.
    """

    kind: str
    sources: tuple[str, ...] = ()
    value: Callable[..., Tensor] = _same
    carry: Callable[..., Tensor] | None = None
    carry_square: Callable[..., Tensor] | None = None
    clones: int = 1
    like: str | None = None
    dtype: torch.dtype | None = None

    def moment(self, part: str = EXP_AVG) -> Callable[..., Tensor] | None:
        """The formula of one of the moments, or None where the written rule says zero."""
        if not RULES[self.kind].carries:
            return None
        return (self.carry_square if part == EXP_AVG_SQ else None) or self.carry or self.value


@dataclass
class Plan:
    """
    What an operator wants: the target's configuration, one origin per target tensor, and what it promises.

    dropped: source tensors that no target tensor takes, each with the reason. Any other unused tensor is an error.
    tolerance: declared bound on the relative logit difference; None promises nothing and only reports.
    loss_tolerance: declared bound on the change of held-out loss in any domain (nats per token).
    step_size_ramp: {"from", "to", "steps"} of layers whose step size rises in the next stage.
    tokenizer: folder of the target's tokenizer; by default the source's goes along.
    details: what else the receipt should say.
    measurements: filled while the plan is carried out: signal-to-noise ratio in dB per quantized matrix (None: no
        error).
    """

    config: LightningLMConfig
    origins: dict[str, Origin]
    dropped: dict[str, str] = field(default_factory=dict)
    tolerance: float | None = None
    loss_tolerance: float | None = None
    step_size_ramp: dict[str, Any] | None = None
    tokenizer: Path | None = None
    details: dict[str, Any] = field(default_factory=dict)
    measurements: dict[str, float | None] = field(default_factory=dict)


EXACT_TOLERANCE = 1e-6
EXACT_LOSS_TOLERANCE = 1e-4

_FFN = re.compile(r"(?P<block>model\.layers\.\d+\.mlp|mtp\.layer\.mlp)\.(?P<rest>.+)")
_EXPERT = re.compile(r"experts\.(?P<expert>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj)\.(?P<part>\w+)")


def split_ffn(name: str) -> tuple[str, str] | None:
    """`model.layers.3.mlp.router.weight` -> (`model.layers.3.mlp`, `router.weight`); None outside of an FFN."""
    match = _FFN.fullmatch(name)
    return (match["block"], match["rest"]) if match else None


def split_expert(rest: str) -> tuple[int, str, str] | None:
    """`experts.17.gate_proj.weight` -> (17, `gate_proj`, `weight`); None for anything else."""
    match = _EXPERT.fullmatch(rest)
    return (int(match["expert"]), match["matrix"], match["part"]) if match else None


def target_config(source: Source, **changes) -> LightningLMConfig:
    """The source's configuration with `changes`, checked. Raises GrowthError, naming a field that cannot work."""
    try:
        return LightningLMConfig.from_dict({**source.config.to_dict(), **changes})
    except ValueError as error:
        raise GrowthError(f"the grown model's configuration is refused: {error}") from error


def fill(config: LightningLMConfig, origin_of: Callable[[str, TensorSpec], Origin | None]) -> dict[str, Origin]:
    """Asks `origin_of` for every tensor of the model that `config` describes, so that none can be forgotten."""
    origins = {name: origin_of(name, spec) for name, spec in tensor_table(config).items()}
    unfilled = [name for name, origin in origins.items() if origin is None]
    if unfilled:
        raise GrowthError(f"no rule fills {len(unfilled)} tensor(s) of the target: {listed(unfilled)}")
    return origins


def copied(name: str) -> Origin:
    """The source tensor `name`, bit for bit, with its moments."""
    return Origin("copied", (name,))


def initial(name: str, spec: TensorSpec, config: LightningLMConfig, seed: int, like: str | None = None) -> Origin:
    """What a freshly initialised model of `config` holds under `name`: weights random, biases zero, averages 1 / E."""
    return Origin("initial", value=lambda: initial_tensor(name, spec.shape, torch.float32, config, seed), like=like)


def generator(seed: int, *key: str) -> torch.Generator:
    """Random numbers that depend on the seed and a name only, not on the order in which tensors are written."""
    digest = hashlib.sha256("/".join((str(seed), *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def balanced_draw(num_experts: int, size: int, units: int, random: torch.Generator) -> Tensor:
    """
    `size` distinct units of `units` for each expert, all units used equally often (counts differ by at most one).

    Shuffled decks are dealt one after the other; an expert that spans two decks skips, in the second, the units it
    already holds, and they go to the next expert. Returns int64 [E, size], ascending in each row.
    """
    assert 1 <= size <= units
    rows, deck = [], []
    for _ in range(num_experts):
        row, deck = deck[:size], deck[size:]
        if len(row) < size:
            held = set(row)
            fresh = torch.randperm(units, generator=random).tolist()
            take = [unit for unit in fresh if unit not in held][: size - len(row)]
            row, deck = row + take, [unit for unit in fresh if unit not in set(take)]
        rows.append(sorted(row))
    return torch.tensor(rows)


def redrawn_units(units: int, ratio: float, random: torch.Generator) -> Tensor:
    """A random set of `round(ratio * units)` units, int64, ascending."""
    return torch.randperm(units, generator=random)[: math.floor(ratio * units + 0.5)].sort().values


def redraw(weight: Tensor, units: Tensor, dim: int, random: torch.Generator) -> Tensor:
    """`weight` with its `units` along `dim` replaced by N(mean, std) of the values they replace."""
    old = weight.float().index_select(dim, units)
    new = torch.randn(old.shape, generator=random) * old.std() + old.mean()
    return weight.float().index_copy(dim, units, new)


def unused(source: Source, origins: Mapping[str, Origin]) -> list[str]:
    """Source tensors that no origin takes."""
    taken = {name for origin in origins.values() for name in origin.sources}
    return [name for name in source.table if name not in taken]


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names of a list, for an error message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
