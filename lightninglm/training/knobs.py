"""Knobs: what may be changed while a stage runs, in `<run>/<stage>/knobs.yaml`, and how a change reaches the engine."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.router import Router
from lightninglm.recipe import Count, Section, YamlFile, validate

NotNegative = Annotated[float, Field(ge=0)]
BALANCE = ("balance_speed", "balance_band", "balance_gain", "router_z_loss_weight")


class Knobs(Section):
    """
    The content of knobs.yaml. A key that is not there, or null, is as the recipe says.

    learning_rate_factor: multiplies every learning rate. balance_speed, balance_band, balance_gain,
    router_z_loss_weight: as in the model's configuration. clip, evaluate_every, checkpoint_every: as in the recipe.
    stop: save and stop at the next step boundary.
    """

    learning_rate_factor: NotNegative | None = None
    balance_speed: NotNegative | None = None
    balance_band: Annotated[list[NotNegative], Field(min_length=2, max_length=2)] | None = None
    balance_gain: NotNegative | None = None
    router_z_loss_weight: NotNegative | None = None
    clip: NotNegative | None = None
    evaluate_every: Count | None = None
    checkpoint_every: Count | None = None
    stop: bool = False

    @field_validator("balance_band")
    @classmethod
    def _around_the_uniform_load(cls, band: list[float] | None) -> list[float] | None:
        if band is not None and not 0 < band[0] < 1 < band[1]:
            raise ValueError("needs 0 < lo < 1 < hi (multiples of the uniform load)")
        return band

    def values(self) -> dict[str, Any]:
        """What is set, without `stop`: the part that a checkpoint keeps."""
        return self.model_dump(exclude_none=True, exclude={"stop"})


class KnobsFile:
    """
    Watches knobs.yaml, on one rank: one stat per step, and a read when its time, size or inode changed.

    A `stop` that is already there at the start was for an earlier run and is ignored. A file that is removed changes
    nothing; an empty mapping `{}` takes everything back to the recipe.
    """

    def __init__(self, path: Path, config: LightningLMConfig):
        self.path = path
        self.config = config
        self._seen: tuple[int, int, int] | None = None
        self._old_stop = self._stat() is not None

    def read_if_changed(self) -> Knobs | None:
        """The new content; None when the file has not changed. Raises RecipeError, once for every change."""
        found = self._stat()
        if found is None or found == self._seen:
            return None
        self._seen = found
        knobs = check_knobs(self.path, self.config)
        if self._old_stop:
            self._old_stop = False
            knobs = knobs.model_copy(update={"stop": False})
        return knobs

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def check_knobs(path: Path, config: LightningLMConfig) -> Knobs:
    """The content of knobs.yaml for a model. Raises RecipeError with file, line, key and what would be valid."""
    file = YamlFile.read(path)
    knobs = validate(Knobs, file)
    for key in BALANCE:
        if getattr(knobs, key) is not None and (not config.num_experts or config.balance == "aux"):
            why = "is balanced by losses" if config.num_experts else "has no experts"
            raise file.error(key, f"has no effect: the model {why}")
    return knobs


def apply_knobs(engine, knobs: Knobs, clip: float) -> None:
    """
    Makes the knobs count from the next step on. The same on all ranks, between steps.

    clip: the recipe's, for knobs without one.
    """
    config = engine.module.config
    for module in engine.module.modules():
        if isinstance(module, Router):
            module.balance["speed"] = _first(knobs.balance_speed, config.balance_speed)
            module.balance["band"] = tuple(_first(knobs.balance_band, config.balance_band))
            module.balance["gain"] = _first(knobs.balance_gain, config.balance_gain)
            module.z_loss_weight = _first(knobs.router_z_loss_weight, config.router_z_loss_weight)
    engine.gradient_norm.set_limit(_first(knobs.clip, clip))


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[Any]]:
    """key -> [before, now] of what differs between two `Knobs.values`; None stands for the recipe's value."""
    return {key: [old.get(key), new.get(key)] for key in sorted(old | new) if old.get(key) != new.get(key)}


def change_line(changed: dict[str, list[Any]]) -> str:
    """`changes` for people."""
    words = {key: ["the recipe's" if value is None else value for value in pair] for key, pair in changed.items()}
    return ", ".join(f"{key} {before} -> {now}" for key, (before, now) in words.items())


def _first(value, otherwise):
    return otherwise if value is None else value
