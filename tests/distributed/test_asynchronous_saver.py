"""A save behind training writes the bytes of a save that training waits for, and fails on all ranks or on none."""

import errno
import os
import threading
from pathlib import Path

import pytest
from ranks import RankFailed, run_ranks
from tiny import INT8, tiny_config, tiny_engine, tiny_model, train_step

from lightninglm.checkpoint import CheckpointError, CheckpointReader, newest_checkpoint, step_folder, writer
from lightninglm.distributed.asynchronous_saver import AsynchronousSaver, host_memory
from lightninglm.distributed.checkpointing import bytes_to_write, save_checkpoint

RANKS = 2


def quantized_engine():
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"]}
    config = tiny_config(expert_quantization=INT8, **layers)
    return tiny_engine(tiny_model(config, RANKS), RANKS, ep_size=RANKS)


def hold_writes() -> threading.Event:
    """No shard is written before the event is set."""
    go, write = threading.Event(), writer.write_parts

    def wait_and_write(*args):
        assert go.wait(60)
        write(*args)

    writer.write_parts = wait_and_write
    return go


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_written_while_training_goes_on_is_the_state_at_the_save_byte_for_byte(tmp_path):
    def run(rank, world_size):
        engine = quantized_engine()
        saver = AsynchronousSaver(engine)
        held = []
        for step in (2, 4):
            train_step(engine, step - 2), train_step(engine, step - 1)
            state = {"step": step, "data": {"position": step}}
            save_checkpoint(engine, tmp_path / f"at-once-{step}", state)
            go = hold_writes()
            saver.start(tmp_path / f"behind-{step}", state)
            state["data"]["position"] = -1
            losses = [train_step(engine, step), train_step(engine, step + 1)]
            assert losses[0] != losses[1] and saver.running and not saver.ended
            go.set()
            assert saver.wait()[0] == tmp_path / f"behind-{step}"
            assert not saver.running
            held.append(saver._memory.nbytes)
        assert held[0] == held[1]  # the second copy went to the memory of the first

    run_ranks(run, RANKS)
    for step in (2, 4):
        assert contents(tmp_path / f"behind-{step}") == contents(tmp_path / f"at-once-{step}")
    assert contents(tmp_path / "behind-2") != contents(tmp_path / "behind-4")


def test_a_write_that_fails_on_one_rank_fails_on_all_with_the_reason_and_the_next_save_is_sound(tmp_path):
    def run(rank, world_size):
        engine = quantized_engine()
        saver = AsynchronousSaver(engine)
        saver.start(tmp_path / step_folder(1), {"step": 1})
        saver.wait()
        write = writer.write_parts
        if rank == 1:

            def full_disk(path, parts):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

            writer.write_parts = full_disk
        saver.start(tmp_path / step_folder(2), {"step": 2})
        train_step(engine, 0)
        with pytest.raises(CheckpointError, match=r"rank 1: .*model-00001-00000\.safetensors: no room on the disk"):
            saver.wait()
        assert newest_checkpoint(tmp_path) == (tmp_path / step_folder(1), [])
        writer.write_parts = write
        saver.start(tmp_path / step_folder(3), {"step": 3})
        saver.wait()

    run_ranks(run, RANKS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_folder(1), step_folder(3)]
    CheckpointReader(tmp_path / step_folder(3), verify="full")


def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before_the_newest(tmp_path):
    def run(rank, world_size):
        engine = quantized_engine()
        saver = AsynchronousSaver(engine)
        save_checkpoint(engine, tmp_path / step_folder(1), {"step": 1})
        if rank == 1:
            writer.write_parts = lambda *args: os._exit(9)
        saver.start(tmp_path / step_folder(2), {"step": 2})
        saver.wait()

    with pytest.raises(RankFailed):
        run_ranks(run, RANKS)
    assert newest_checkpoint(tmp_path, verify="full") == (tmp_path / step_folder(1), [])


def test_the_memory_of_a_host_is_that_of_its_ranks_together():
    def run(rank, world_size):
        engine = quantized_engine()
        return host_memory(engine)[:2], bytes_to_write(engine)

    (first, mine), (second, other) = run_ranks(run, RANKS)
    assert first == second and first[0] == mine + other and first[1] > first[0]
