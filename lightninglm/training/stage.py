"""One stage of a recipe on the ranks of this process group: from its newest checkpoint to its last step."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightninglm.checkpoint import (
    CheckpointError,
    CheckpointReader,
    Skipped,
    check_bases,
    newest_checkpoint,
    remove_leftovers,
    set_aside,
)
from lightninglm.data.loader import PackedData
from lightninglm.data.order import GlobalOrder
from lightninglm.distributed.checkpointing import load_checkpoint
from lightninglm.distributed.ds_config import load_ds_config
from lightninglm.distributed.engine import build_engine, parameter_groups
from lightninglm.distributed.expert_bases import hash_expert_bases
from lightninglm.distributed.expert_parallel import apply_expert_parallel
from lightninglm.distributed.memory import measured_bytes
from lightninglm.distributed.optimizer_state import OptimizerState
from lightninglm.distributed.process_group import is_main_rank, raise_together, world_size
from lightninglm.modeling.byte_embedding import token_bytes, tokens_sha256
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.initialization import allocate_model, initialize_model
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM
from lightninglm.training.interruption import Deadline, Interruption
from lightninglm.training.knobs import KnobsFile
from lightninglm.training.ledger import dispatch_line, ledger, part_of
from lightninglm.training.lineage import LINEAGE_PID
from lightninglm.training.loop import EXIT_NOT_FINITE, Trainer, TrainingError
from lightninglm.training.metrics import MetricsLogger
from lightninglm.training.prepare import data_folder
from lightninglm.training.saving import StageSaver


@dataclass
class _Start:
    """Where a stage starts: the checkpoint it goes on from (None for a fresh seed), newer damaged ones, the rest."""

    checkpoint: Path | None
    skipped: list[Skipped]
    config: LightningLMConfig
    state: dict[str, Any]
    data: PackedData


def run_stage(
    recipe,
    run_folder: Path,
    *,
    accept_changes: bool = False,
    deadline: float | None = None,
    stop_file: Path | None = None,
) -> int:
    """
    Trains the stage to its end, or until it is asked to stop.

    Collective over all ranks of the process group. Everything is checked before anything is replaced.

    Args:
        recipe: the stage.
        run_folder: holds `data/` and one folder per stage.
        accept_changes: go on although the recipe differs from the one the newest checkpoint was made with.
        deadline: Unix time by which the stage has saved and stopped.
        stop_file: a file whose appearance makes the stage save and stop.
    Returns:
        0; 128 + the signal's number or `EXIT_STOPPED` when it was stopped (everything is saved then);
        `EXIT_NOT_FINITE` after too many non-finite steps in a row.
    Raises:
        ValueError: bad input, in one line.
    """
    folder = run_folder / recipe.name
    newest = newest_of_all_ranks(folder, recipe.checkpoint.verify)
    with raise_together():
        start = _find_start(recipe, run_folder, accept_changes, *newest)
        ds_config = load_ds_config(
            recipe.deepspeed_file,
            micro_batch=recipe.train.micro_batch,
            accumulation=recipe.train.global_batch // (recipe.train.micro_batch * world_size()),
            world_size=world_size(),
            dtype=recipe.train.dtype,
            optimizer={name: getattr(recipe.optimizer, name) for name in ("lr", "betas", "eps", "weight_decay")},
            gradient_clipping=recipe.optimizer.clip,
            expert_parallel=recipe.train.expert_parallel,
        )
    state, data = start.state, start.data
    if state["finished"]:
        if is_main_rank():
            print(f"stage '{recipe.name}' has finished: {start.checkpoint}")
        return 0

    logger = None
    with raise_together():
        if is_main_rank():
            remove_leftovers(folder)
            folder.mkdir(parents=True, exist_ok=True)
            wandb = {"project": recipe.logging.project, "name": recipe.name} if recipe.logging.wandb else None
            logger = MetricsLogger(folder, recipe.name, state["step"], state["total_steps"], wandb)
            for entry in start.skipped:
                logger.say(f"{entry}\n  set aside as {set_aside(entry.folder)}")
            logger.say(f"goes on from {start.checkpoint}" if start.checkpoint else "starts from a fresh initialisation")

    watched = os.environ.get(LINEAGE_PID)
    with Interruption(
        watch_pid=int(watched) if watched else None,
        deadline=Deadline(deadline) if deadline is not None and is_main_rank() else None,
        stop_file=stop_file if is_main_rank() else None,
    ) as interruption:
        engine = _build_engine(recipe, start, ds_config, logger)
        order = GlobalOrder(data.sizes, recipe.data.mixture, recipe.data.seed, state["data"]["domain_offsets"])
        saver = StageSaver(
            engine,
            recipe,
            folder,
            order=order,
            tokenizer_folder=data.folder / "tokenizer",
            interruption=interruption,
            logger=logger,
        )
        domains = recipe.evaluate.domains or data.domains
        trainer = Trainer(
            engine,
            recipe,
            state,
            batch=lambda positions: data.batch(order, positions),
            heldout={domain: data.heldout[domain][: recipe.evaluate.sequences] for domain in domains},
            saver=saver,
            logger=logger,
            interruption=interruption,
            knobs_file=KnobsFile(folder / "knobs.yaml", start.config) if is_main_rank() else None,
        )
        try:
            with saver:
                finished = trainer.train()
        except TrainingError as error:
            if logger:
                logger.say(f"stopped, exit code {EXIT_NOT_FINITE}: {error}")
                logger.close()
            return EXIT_NOT_FINITE
        if logger:
            if not finished:
                logger.say(
                    f"stopped after step {state['step']}, exit code {interruption.exit_code}: {interruption.reason}; "
                    "the same command goes on from there"
                )
            logger.close()
        return 0 if finished else interruption.exit_code


def newest_of_all_ranks(folder: Path, verify: str) -> tuple[Path | None, list[Skipped]]:
    """The stage's newest sound checkpoint and the newer ones that are not; rank 0 looks for all. Collective."""
    found = None
    with raise_together():
        if is_main_rank():
            found = newest_checkpoint(folder, verify)
    found = [found]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _find_start(
    recipe, run_folder: Path, accept_changes: bool, checkpoint: Path | None, skipped: list[Skipped]
) -> _Start:
    """The stage at its newest sound checkpoint, or as a fresh seed; refuses whatever does not fit together."""
    folder = run_folder / recipe.name
    data = PackedData(data_folder(recipe, run_folder), recipe.data.sequence_length)
    if checkpoint is None and skipped:
        raise CheckpointError(
            f"{folder}: no checkpoint can be used, and a stage never starts from scratch by itself; to do so, remove "
            "the folder\n  " + "\n  ".join(map(str, skipped))
        )
    if checkpoint is None and recipe.grow is not None:
        raise CheckpointError(
            f"{folder}: stage '{recipe.name}' has no checkpoint grown from '{recipe.grow.source}' yet"
        )
    state = _fresh_state(recipe)
    tokenizer_sha256 = tokens_sha256(token_bytes(data.folder / "tokenizer" / "tokenizer.json"))
    if checkpoint is None:
        config = recipe.build_config(
            tokenizer_sha256=tokenizer_sha256,
            bos_token_id=data.tokenizer.end_id,
            eos_token_id=data.tokenizer.end_id,
            pad_token_id=data.tokenizer.end_id,
        )
        _check_experts(recipe, config)
        return _Start(None, skipped, config, state, data)

    reader = CheckpointReader(checkpoint, verify=None)  # rank 0 has verified it
    state |= reader.trainer_state
    config = LightningLMConfig.from_dict({**reader.config, **recipe.config_overrides})
    if state["stage"] != recipe.name:
        raise CheckpointError(f"{checkpoint}: belongs to stage '{state['stage']}', not to '{recipe.name}'")
    if config.tokenizer_sha256 != tokenizer_sha256:
        raise CheckpointError(f"{checkpoint}: was trained with another tokenizer than {data.folder / 'tokenizer'}")
    recipe.check_world(world_size(), config.num_experts)
    _check_experts(recipe, config)
    if recipe.schedule.warmup_from == "last" and state.get("parent_learning_rate") is None:
        raise recipe.error(
            "schedule.warmup_from", f"the parent of {checkpoint} did not record its last learning rate; give a number"
        )
    if state["step"]:
        _check_same_recipe(recipe, state, checkpoint, accept_changes)
    else:
        _enter_stage(recipe, state)
    state |= {"recipe": recipe.resolved(), "recipe_sha256": recipe.sha256(), "total_steps": recipe.total_steps}
    return _Start(checkpoint, skipped, config, state, data)


def _check_experts(recipe, config: LightningLMConfig) -> None:
    if recipe.train.merge_adapters_every is not None and config.expert_quantization is None:
        raise recipe.error("train.merge_adapters_every", "the model has no adapters: its experts are not quantized")
    if recipe.train.sampled_selection is not None and not config.num_experts:
        raise recipe.error("train.sampled_selection", "the model has no experts to sample")


def _fresh_state(recipe) -> dict[str, Any]:
    return {
        "format": 1,
        "stage": recipe.name,
        "step": 0,
        "total_steps": recipe.total_steps,
        "tokens": 0,
        "lineage_tokens": 0,
        "finished": False,
        "skipped_steps": 0,
        "wall_seconds": 0.0,
        "heldout": None,
        "data": {
            "position": 0,
            "domain_offsets": {},
            "next_domain_offsets": {},
            "sequence_length": recipe.data.sequence_length,
            "seed": recipe.data.seed,
        },
        "ramps": {},
        "new_tensors": {"names": [], "warmup_steps": 0},
        "adapters_merged_at": 0,
        "seed": recipe.train.seed,
        "recipe": recipe.resolved(),
        "recipe_sha256": recipe.sha256(),
        "lineage": [],
    }


def _enter_stage(recipe, state: dict[str, Any]) -> None:
    """First start from a grown checkpoint: this stage's own seeds, and data offsets in its own sequence length."""
    data, length = state["data"], recipe.data.sequence_length
    before = data["sequence_length"]
    offsets = {domain: -(-rows * before // length) for domain, rows in data["domain_offsets"].items()}
    data |= {
        "sequence_length": length,
        "seed": recipe.data.seed,
        "domain_offsets": offsets,
        "next_domain_offsets": offsets,
    }
    state["seed"] = recipe.train.seed
    if state["new_tensors"]["names"]:
        state["new_tensors"]["warmup_steps"] = recipe.grow.new_tensor_warmup


def _check_same_recipe(recipe, state: dict[str, Any], checkpoint: Path, accept_changes: bool) -> None:
    if accept_changes or recipe.is_same(state["recipe"]):
        return
    changed = _differences(state["recipe"], recipe.resolved())
    raise CheckpointError(
        f"{checkpoint}: was trained with another recipe; --accept-changes goes on with the edited one. Changed: "
        + ", ".join(f"{key} (was {old!r}, is {new!r})" for key, old, new in changed)
    )


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{key}.{k}".lstrip("."))]
    return [] if old == new else [(key, old, new)]


def _build_engine(recipe, start: _Start, ds_config: dict[str, Any], logger: MetricsLogger | None):
    """The engine with the stage's weights and optimizer state: local experts only, allocated once."""
    planned = ledger(
        start.config,
        world_size=world_size(),
        expert_parallel=recipe.train.expert_parallel,
        zero_stage=ds_config["zero_optimization"]["stage"],
        dtype=recipe.train.dtype,
    )
    if logger:
        for line in planned.lines():
            logger.say(line)
        if recipe.train.expert_parallel > 1:
            tokens = recipe.train.micro_batch * recipe.data.sequence_length
            options = {"expert_parallel": recipe.train.expert_parallel, "dtype": recipe.train.dtype}
            logger.say(dispatch_line(start.config, tokens=tokens, **options))
    with torch.device("meta"):
        model = LightningLMForCausalLM(start.config)
    apply_expert_parallel(model, recipe.train.expert_parallel)
    if start.checkpoint is None:
        initialize_model(model, recipe.train.seed)
    else:
        allocate_model(model)
    model.load_token_bytes(start.data.folder / "tokenizer")
    model.train()
    optimizer = recipe.optimizer
    groups = parameter_groups(
        model,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        multipliers=optimizer.groups.model_dump(),
        new=start.state["new_tensors"]["names"],
    )
    engine = build_engine(model, ds_config, groups)
    if start.checkpoint is not None:
        with raise_together():  # an error of loading is raised on all ranks at once
            load_checkpoint(engine, CheckpointReader(start.checkpoint, verify=None))
    else:
        OptimizerState(engine).create(adam_step=0)
    found = hash_expert_bases(engine.module)
    with raise_together():
        check_bases(start.checkpoint, start.state.get("expert_bases"), found)
    start.state["expert_bases"] = found
    measured = measured_bytes(engine, part_of)
    if logger:
        logger.say(planned.compare(*measured))
    return engine
