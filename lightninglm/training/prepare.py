"""What must be there before a stage trains: its data, and for a grown stage the grown checkpoint."""

from collections.abc import Callable
from pathlib import Path

from lightninglm.checkpoint import CheckpointError, CheckpointReader, newest_checkpoint
from lightninglm.checkpoint.layout import step_folder
from lightninglm.data.loader import heldout_file
from lightninglm.data.prepare import prepare
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig


def prepare_stage(recipe, run_folder: Path, grow_chain: Callable) -> None:
    """
    Builds the data of the stage and, when it has no checkpoint yet, grows its parent's last one into step 0.

    Safe to repeat: what is complete is left alone. One process at a time (see `RunLock`).

    Args:
        recipe: the stage.
        run_folder: holds `data/` and one folder per stage.
        grow_chain: `growth.chain.grow_chain`, passed in because this package does not know growth.
    Raises CheckpointError when the parent has no finished checkpoint, and whatever preparing and growing raise.
    """
    length = recipe.data.sequence_length
    prepare(recipe.data_source(), run_folder / "data", length)
    stage_folder = run_folder / recipe.name
    if recipe.grow is None or newest_checkpoint(stage_folder)[0] is not None:
        return
    grow_chain(
        finished_checkpoint(run_folder, recipe.grow.source),
        stage_folder / step_folder(0),
        recipe.grow.steps,
        stage=recipe.name,
        seed=recipe.train.seed,
        heldout=heldout_file(data_folder(recipe, run_folder), length),
        moments=recipe.grow.moments,
    )


def stage_config(recipe, run_folder: Path, grown_configs: Callable) -> LightningLMConfig | None:
    """
    The model that a stage is about to train, before anything is grown or loaded; only configurations are read.

    Args:
        grown_configs: `growth.grown_config.grown_configs`, passed in because this package does not know growth.
    Returns:
        None when nobody knows yet: the parent has no checkpoint, or a new vocabulary decides (`resize_vocabulary`).
    """
    own, _ = newest_checkpoint(run_folder / recipe.name)
    if own is None and recipe.grow is None:
        return recipe.build_config()
    folder = own or newest_checkpoint(run_folder / recipe.grow.source)[0]
    if folder is None or (own is None and any("resize_vocabulary" in step for step in recipe.grow.steps)):
        return None
    config = LightningLMConfig.from_dict(CheckpointReader(folder, verify=None).config)
    if own is None and recipe.grow.steps:
        config = grown_configs(config, recipe.grow.steps, recipe.train.seed)[-1]
    return LightningLMConfig.from_dict({**config.to_dict(), **recipe.config_overrides})


def data_folder(recipe, run_folder: Path) -> Path:
    """Where the packed sequences of a stage are: in the run, unless the recipe names a folder of its own."""
    source = recipe.data_source()
    return Path(source["path"]) if source["kind"] == "packed" else run_folder / "data"


def finished_checkpoint(run_folder: Path, stage: str) -> Path:
    """The last checkpoint of a finished stage. Raises CheckpointError when it is not finished or never ran."""
    folder, _ = newest_checkpoint(run_folder / stage)
    if folder is None:
        raise CheckpointError(f"stage '{stage}' has no complete checkpoint in {run_folder / stage}: train it first")
    if not CheckpointReader(folder).trainer_state["finished"]:
        raise CheckpointError(
            f"stage '{stage}' has not finished (its newest checkpoint is {folder}): train it to the end"
        )
    return folder
