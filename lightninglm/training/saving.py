"""The checkpoints of a running stage: saved at once or behind training, the newest kept, everything said."""

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from lightninglm.checkpoint import prune, require_space, write_hashes
from lightninglm.checkpoint.layout import step_folder
from lightninglm.data.order import GlobalOrder
from lightninglm.distributed.asynchronous_saver import AsynchronousSaver, host_memory
from lightninglm.distributed.checkpointing import all_gather, bytes_to_write, save_checkpoint
from lightninglm.distributed.process_group import is_main_rank, raise_together
from lightninglm.training.interruption import Interruption


class StageSaver:
    """
    Saves the checkpoints of a stage, and deletes old ones, by the recipe's `checkpoint` section.

    All methods are collectives. As a context manager it waits for a save that is still being written, however the
    block ends.

    Args:
        engine: of the stage.
        recipe: of the stage.
        folder: of the stage.
        order: of the data; a checkpoint notes where it is in each domain.
        tokenizer_folder: what every checkpoint gets a copy of.
        interruption: is told how long a save takes.
        logger: a `MetricsLogger` on rank 0, None elsewhere.
    Raises:
        ValueError: on all ranks, when one checkpoint has no room on the disk, or its copy none in the memory.
    """

    def __init__(
        self,
        engine,
        recipe,
        folder: Path,
        *,
        order: GlobalOrder,
        tokenizer_folder: Path,
        interruption: Interruption,
        logger,
    ):
        self.engine = engine
        self.folder = folder
        self.keep = recipe.checkpoint.keep
        self.order = order
        self.tokenizer_folder = tokenizer_folder
        self.interruption = interruption
        self.logger = logger
        size = sum(all_gather(bytes_to_write(engine)))
        with raise_together():
            if is_main_rank():
                require_space(folder, size)
        self._say(f"a checkpoint takes {size:,} bytes on the disk")
        self._saver = self._asynchronous_saver(recipe) if recipe.checkpoint.asynchronous else None

    def __enter__(self) -> "StageSaver":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif self._saver:
            self._saver.settle()

    def save(self, state: dict[str, Any]) -> None:
        """
        Saves the engine and the trainer's state, or starts to: then a save that is still being written is waited for.

        Raises CheckpointError together, see `raise_together`.
        """
        target = self.folder / step_folder(state["step"])
        if self._saver and self._saver.running and not self._saver.ended:
            self._say(f"{target.name} waits for the save before, which is still being written")
        self.finish()
        started = time.perf_counter()
        state["data"]["next_domain_offsets"] = self.order.offsets_after(state["data"]["position"])
        is_last = state["finished"]

        def after(folder: Path) -> None:
            if is_last:
                write_hashes(folder)
            prune(self.folder, self.keep)

        if self._saver:
            with raise_together():
                self._saver.start(target, state, tokenizer_folder=self.tokenizer_folder, after=after)
            self._say(f"copied {target.name} in {time.perf_counter() - started:.2f} s; it is written behind training")
        else:
            with raise_together():
                save_checkpoint(self.engine, target, state, tokenizer_folder=self.tokenizer_folder, after=after)
            self.interruption.took(save=time.perf_counter() - started)
            self._say(f"saved {target}")

    @property
    def ended(self) -> bool:
        """Whether this rank has written a save that `finish` has not seen yet. Not a collective."""
        return self._saver is not None and self._saver.ended

    def finish(self) -> None:
        """Waits for the save that is still being written, if there is one, and raises together if it failed."""
        if self._saver is None or not self._saver.running:
            return
        with raise_together():
            folder, seconds = self._saver.wait()
        # a stop may come when a save has just begun: it waits for that one and then for its own
        self.interruption.took(save=2 * seconds)
        self._say(f"saved {folder} in {seconds:.1f} s")

    def _asynchronous_saver(self, recipe) -> AsynchronousSaver:
        needed, available, host = host_memory(self.engine)
        with raise_together():
            if needed > available:
                raise recipe.error(
                    "checkpoint.asynchronous",
                    f"the copies of the ranks on {host} take {needed:,} bytes of memory, {available:,} are available; "
                    "use false",
                )
        self._say(f"asynchronous saves take {needed:,} bytes of memory on {host}, {available:,} are available")
        return AsynchronousSaver(self.engine)

    def _say(self, text: str) -> None:
        if self.logger:
            self.logger.say(text)
