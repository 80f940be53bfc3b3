"""Saves a DeepSpeed engine into the one checkpoint format and loads it back, from any number of ranks to any other."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from torch import nn

from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.layout import EXP_AVG, EXP_AVG_SQ, MASTER
from lightninglm.checkpoint.model_tensors import ModelTensor, model_tensors
from lightninglm.checkpoint.reader import CheckpointReader
from lightninglm.checkpoint.shards import SHARD_BYTES
from lightninglm.checkpoint.writer import CheckpointWriter
from lightninglm.distributed.optimizer_state import MOMENTS, OptimizerState, whole_weight

_SHOWN_NAMES = 5


def save_checkpoint(
    engine: DeepSpeedEngine,
    folder: str | Path,
    trainer_state: dict,
    tokenizer_folder: str | Path | None = None,
    extra_files: dict[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
    after: Callable[[Path], None] | None = None,
) -> Path:
    """
    Saves weights, buffers, master copies, Adam moments and counters of an engine. Collective; call it between steps.

    Each tensor is written by one of the ranks that hold it, so that all write about the same number of bytes; memory
    beyond the model is one parameter in fp32 and two shards. On several nodes `folder` must be on a shared disk.

    Args:
        folder: the new checkpoint. It must not exist.
        trainer_state: JSON content; `adam_step` and the engine's counters are added.
        tokenizer_folder: its tokenizer files are copied into the checkpoint.
        extra_files: further files by name.
        after: called on rank 0 with the folder once it is complete.
    Returns:
        The folder. Raises CheckpointError on all ranks; then nothing is left of it, and earlier checkpoints are as
        they were.
    """
    writer, content = engine_writer(engine, folder, trainer_state, all_gather, shard_bytes=shard_bytes)
    with writer:
        return writer.commit(**content, tokenizer_folder=tokenizer_folder, extra_files=extra_files, after=after)


@torch.no_grad()
def engine_writer(
    engine: DeepSpeedEngine,
    folder: str | Path,
    trainer_state: dict,
    all_gather: Callable[[Any], list[Any]],
    **options: Any,
) -> tuple[CheckpointWriter, dict[str, dict]]:
    """
    A writer to which everything of an engine was added, and the `config` and `trainer_state` for its `commit`.

    Collective; call it between steps.

    Args:
        all_gather, options: of the `CheckpointWriter`.
    """
    if engine.micro_steps % engine.gradient_accumulation_steps():
        raise CheckpointError(f"{folder}: not saved inside a step ({engine.micro_steps} micro-batches have run)")
    state = OptimizerState(engine)
    items = model_tensors(engine.module)
    _check_experts_present(items)
    counters = {key: getattr(engine, key) for key in ("global_steps", "global_samples", "skipped_steps")}
    content = {
        "config": _config(engine.module),
        "trainer_state": trainer_state | {"adam_step": state.adam_step, "engine": counters},
    }
    size = sum(all_gather(bytes_to_write(engine)))
    with contextlib.ExitStack() as stack:
        writer = CheckpointWriter(
            folder, dist.get_rank(), dist.get_world_size(), all_gather, expected_bytes=size, **options
        )
        stack.enter_context(writer)
        for item, destination in _choose_writers(items, state):
            _add(writer, item, destination, state)
        stack.pop_all()
    return writer, content


def bytes_to_write(engine: DeepSpeedEngine) -> int:
    """Bytes of the tensors that a save of this engine writes on this rank."""
    state = OptimizerState(engine)
    plan = _choose_writers(model_tensors(engine.module), state)
    return sum(_stored_bytes(item, state) for item, writer in plan if writer == dist.get_rank())


@torch.no_grad()
def load_checkpoint(
    engine: DeepSpeedEngine,
    reader: CheckpointReader,
    load_optimizer: bool = True,
    missing_moments: str = "error",
) -> dict:
    """
    Loads a checkpoint into an engine that was built for the same model. Collective.

    Each rank reads only the ranges that it keeps. Every tensor of the model must be in the checkpoint and every tensor
    of the checkpoint in the model, with the same shape, or nothing is loaded.

    Args:
        reader: the checkpoint, already verified.
        load_optimizer: False loads weights and buffers only: moments and all counters start from zero.
        missing_moments: what to do when a parameter that is trained has no optimizer state in the checkpoint:
            `"error"`, or `"zero"`: moments of zero, master copy from the weight.
    Returns:
        The checkpoint's trainer_state. Raises CheckpointError on all ranks, naming the tensors.
    """
    if missing_moments not in ("error", "zero"):
        raise ValueError(f"missing_moments = {missing_moments!r}: must be 'error' or 'zero'")
    state = OptimizerState(engine)
    items = model_tensors(engine.module)
    _check_experts_present(items)
    _check_names(items, reader)
    if load_optimizer:
        _check_optimizer_names(items, reader, state, missing_moments)
    trainer_state = reader.trainer_state
    state.create(float(trainer_state.get("adam_step", 0)) if load_optimizer else 0.0)
    error = None
    try:
        for item in items:
            _load(item, reader, state, load_optimizer)
    except CheckpointError as failure:
        error = str(failure)
    for rank, message in enumerate(all_gather(error)):
        if message is not None:
            raise CheckpointError(f"rank {rank}: {message}")
    state.publish()
    if load_optimizer:
        counters = trainer_state.get("engine", {})  # absent from a grown checkpoint: its stage begins
        engine.global_steps = counters.get("global_steps", 0)
        engine.global_samples = counters.get("global_samples", 0)
        engine.skipped_steps = counters.get("skipped_steps", 0)
        # not from the checkpoint: other ranks may accumulate over another number of micro-batches
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    return trainer_state


def _add(writer: CheckpointWriter, item: ModelTensor, destination: int, state: OptimizerState) -> None:
    """Adds one tensor of the model with its optimizer state on rank `destination`. Collective among its holders."""
    is_writer = dist.get_rank() == destination
    with whole_weight(item.tensor):
        if is_writer:
            for name, value in item.split(item.tensor):
                writer.add(name, value)
    for key in _optimizer_keys(item, state):
        values = state.gather(item.tensor, key, destination)
        if is_writer:
            for name, value in item.split(values):
                writer.add(f"{name}.{key}", value)


def _load(item: ModelTensor, reader: CheckpointReader, state: OptimizerState, load_optimizer: bool) -> None:
    """Fills this rank's part of one tensor of the model, and of its optimizer state."""
    if not state.trains(item.tensor):
        with whole_weight(item.tensor):
            _fill(item.tensor.view(-1), 0, item, reader)
        return
    start, master = state.fragment(item.tensor, MASTER)
    if master is None:
        return
    _fill(master, start, item, reader, MASTER)
    for key in MOMENTS:
        _, moment = state.fragment(item.tensor, key)
        if load_optimizer:
            _fill(moment, start, item, reader, key)
        else:
            moment.zero_()


def _fill(target: torch.Tensor, start: int, item: ModelTensor, reader: CheckpointReader, key: str | None = None):
    """
    Copies elements `start...` of the flattened tensor `item`, or of its optimizer state `key`, into the 1-D `target`.

    Padding becomes zero, and so does a moment that the checkpoint lacks; a missing master copy is the weight.
    """
    for name, low, high in _pieces(item, start, start + target.numel()):
        piece, target = target[: high - low], target[high - low :]
        stored = None if name is None else name if key is None else f"{name}.{key}"
        if stored in reader.optimizer or stored in reader.weights:
            reader.read_into(piece, stored, low)
            if key == MASTER:
                _check_master(piece, reader, name, low)
        elif key == MASTER and name is not None:
            reader.read_into(piece, name, low)
        else:
            piece.zero_()


def _pieces(item: ModelTensor, start: int, stop: int) -> Iterator[tuple[str | None, int, int]]:
    """The tensors on disk (None: padding) behind a range of a flattened tensor in memory, with the range in each."""
    size, names = item.disk_numel, item.disk_names
    row = start // size if size else 0
    while start < stop:
        low, high = start - row * size, min(stop - row * size, size)
        yield names[row] if row < len(names) else None, low, high
        start += high - low
        row += 1


def _check_master(master: torch.Tensor, reader: CheckpointReader, name: str, low: int) -> None:
    """The next step rewrites the weight from the master copy: a checkpoint in which they differ must not be trained."""
    weight = torch.empty(master.shape, dtype=reader.weights[name].dtype, device=master.device)
    reader.read_into(weight, name, low)
    if not torch.equal(master.to(weight.dtype), weight):
        raise CheckpointError(f"{reader.folder}: {name}: the weight is not its master copy rounded to {weight.dtype}")


def _check_names(items: list[ModelTensor], reader: CheckpointReader) -> None:
    """Model and checkpoint have the same tensors: names, shapes, and the dtype of buffers."""
    expected = {name: item for item in items for name in item.all_disk_names}
    _refuse(reader, "lacks tensors of the model", expected.keys() - reader.weights.keys())
    _refuse(reader, "has tensors that the model has not", reader.weights.keys() - expected.keys())
    for name, item in expected.items():
        info = reader.weights[name]
        if info.shape != item.disk_shape:
            raise CheckpointError(f"{reader.folder}: {name} has shape {info.shape}, the model's is {item.disk_shape}")
        if not isinstance(item.tensor, nn.Parameter) and info.dtype != item.tensor.dtype:
            raise CheckpointError(f"{reader.folder}: {name} has {info.dtype}, the model's is {item.tensor.dtype}")


def _check_optimizer_names(
    items: list[ModelTensor], reader: CheckpointReader, state: OptimizerState, missing_moments: str
) -> None:
    """The checkpoint has optimizer state for the parameters that are trained and for no other."""
    trained = [name for item in items if state.trains(item.tensor) for name in item.all_disk_names]
    needed = {f"{name}.{key}" for name in trained for key in MOMENTS}
    needed |= {f"{name}.{MASTER}" for name in trained if reader.weights[name].dtype != torch.float32}
    allowed = needed | {f"{name}.{MASTER}" for name in trained}
    _refuse(reader, "has optimizer state for parameters that are not trained", reader.optimizer.keys() - allowed)
    if missing_moments == "error":
        _refuse(reader, "lacks optimizer state of trained parameters", needed - reader.optimizer.keys())


def _refuse(reader: CheckpointReader, what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_SHOWN_NAMES])
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        raise CheckpointError(f"{reader.folder} {what}: {shown}{more}")


def _check_experts_present(items: list[ModelTensor]) -> None:
    """Together the ranks hold every expert of every layer. Collective."""
    mine = {item.name: (item.experts.expert_start, item.experts.expert_count) for item in items if item.experts}
    ranks = all_gather(mine)
    for item in items:
        if item.experts is not None:
            held = {e for blocks in ranks for e in range(blocks[item.name][0], sum(blocks[item.name]))}
            if held != set(range(item.experts.num_experts)):
                missing = sorted(set(range(item.experts.num_experts)) - held)
                raise CheckpointError(f"{item.name}: no rank holds experts {missing[:_SHOWN_NAMES]}")


def _choose_writers(items: list[ModelTensor], state: OptimizerState) -> list[tuple[ModelTensor, int]]:
    """For each tensor the rank that writes it: from the largest down, the holder with the fewest bytes so far."""
    writers, written = {}, {}
    for item in sorted(items, key=lambda item: _stored_bytes(item, state), reverse=True):
        holders = _holders(item)
        loads = written.setdefault(holders, dict.fromkeys(holders, 0))
        writers[item.name] = min(holders, key=loads.__getitem__)
        loads[writers[item.name]] += _stored_bytes(item, state)
    return [(item, writers[item.name]) for item in items]


def _holders(item: ModelTensor) -> tuple[int, ...]:
    """The ranks that hold the same values: all of them, or the replicas of this rank's block of experts."""
    if item.experts is not None:
        for param in item.experts.parameters():
            if not getattr(param, "allreduce", True):
                group = groups._get_expert_data_parallel_group(param.group_name)
                return tuple(dist.get_process_group_ranks(group))
    return tuple(range(dist.get_world_size()))


def _optimizer_keys(item: ModelTensor, state: OptimizerState) -> tuple[str, ...]:
    if not state.trains(item.tensor):
        return ()
    return MOMENTS if item.tensor.dtype == torch.float32 else (MASTER, EXP_AVG, EXP_AVG_SQ)


def _stored_bytes(item: ModelTensor, state: OptimizerState) -> int:
    """Bytes of a tensor and its optimizer state on disk; padding rows are counted, so that all holders agree."""
    return item.shape.numel() * (item.tensor.element_size() + 4 * len(_optimizer_keys(item, state)))


def _config(model: nn.Module) -> dict:
    config = model.config.to_dict()
    dtypes = {param.dtype for param in model.parameters()}
    dtype = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float32
    return config | {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}


def all_gather(item: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The objects of all ranks, in order. Collective."""
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item, group=group)
    return items
