"""The model of every stage of a lineage, derived from the recipes alone, without data or checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.recipe import Recipe, load_lineage, load_recipe

GrownConfigs = Callable[..., list[LightningLMConfig]]


@dataclass(frozen=True)
class Stage:
    """
    One stage with its model.

    Attributes:
        file: the recipe's YAML file.
        config: what the stage trains.
        in_between: models of its growth steps but the last, each of which lies on disk while the stage is grown.
    """

    recipe: Recipe
    file: Path
    config: LightningLMConfig
    in_between: list[LightningLMConfig]


def load_stages(
    path: Path, grown_configs: GrownConfigs, overrides: Sequence[str] = (), world_size: int | None = None
) -> tuple[list[Stage], int]:
    """
    The stages of a lineage folder, or the one stage of a YAML file, and the ranks that they are for.

    A grown stage needs its parents: they are read from the `lineage.yaml` beside it.

    Args:
        grown_configs: `growth.grown_config.grown_configs`, passed in because this package does not know growth.
        overrides: `dotted.key=value`, for every stage.
        world_size: ranks, instead of those of `lineage.yaml`.
    Raises:
        RecipeError: a recipe is wrong, or cannot be divided over the ranks. GrowthError: a growth step is impossible.
    """
    is_lineage = path.is_dir() or path.name == "lineage.yaml"
    if not is_lineage and not path.with_name("lineage.yaml").is_file():
        recipe = load_recipe(path, overrides)
        if recipe.grow is not None:
            raise recipe.error("grow.from", f"needs a lineage.yaml in {path.parent} to find this stage in")
        recipe.check_world(world_size or 1)
        return [Stage(recipe, path, recipe.build_config(), [])], world_size or 1
    lineage = load_lineage(path if is_lineage else path.parent, overrides, world_size)
    stages, configs = [], {}
    for recipe, file in zip(lineage.recipes, lineage.files, strict=True):
        in_between = []
        if recipe.grow is None:
            config = recipe.build_config()
        else:
            grown = grown_configs(configs[recipe.grow.source], recipe.grow.steps, recipe.train.seed)
            config = grown[-1] if grown else configs[recipe.grow.source]
            config = LightningLMConfig.from_dict({**config.to_dict(), **recipe.config_overrides})
            in_between = grown[:-1]
            if recipe.data.sequence_length > config.max_position_embeddings:
                raise recipe.error(
                    "data.sequence_length",
                    f"above max_position_embeddings = {config.max_position_embeddings} of the model that it grows "
                    f"from; allow it with model: {{max_position_embeddings: {recipe.data.sequence_length}}}",
                )
        configs[recipe.name] = config
        stages.append(Stage(recipe, file, config, in_between))
        if file.resolve() == path.resolve():
            return stages[-1:], lineage.world_size
    if not is_lineage:
        load_recipe(path, overrides)  # whatever is wrong with it comes first
        raise lineage.recipes[0].error("name", f"{path} is not one of the stages of {path.parent}/lineage.yaml")
    return stages, lineage.world_size
