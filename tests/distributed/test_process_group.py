"""Ranks start and end together: one message for an error, one exit code, no rank left waiting."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from lightninglm.distributed import process_group
from lightninglm.distributed.process_group import PeerError, raise_together
from tests.distributed.ranks import RankFailed, run_ranks


def exit_code_of(main):
    with pytest.raises(SystemExit) as ended:
        process_group.run(main)
    return ended.value.code


def test_a_rank_knows_its_place_and_device():
    def place(rank, world_size):
        assert process_group.world_size() == world_size == dist.get_world_size()
        assert process_group.is_main_rank() == (rank == 0)
        assert torch.get_num_threads() == 1
        process_group.barrier()
        return process_group.rank()

    assert run_ranks(place, 3) == [0, 1, 2]


def test_without_a_launcher_the_process_is_the_only_rank(monkeypatch):
    def alone(rank, world_size):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
        process_group.shutdown()
        process_group.init_distributed()
        return process_group.rank(), process_group.world_size(), process_group.is_main_rank()

    # the harness ends with a barrier, which the new group of one rank passes
    assert run_ranks(alone, 1) == [(0, 1, True)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_on_one_rank_reaches_all(failing):
    def block(rank, world_size):
        with raise_together():
            if rank == failing:
                raise ValueError("model.num_experts = 7: does not fit")

    def attempt(rank, world_size):
        with pytest.raises(ValueError if rank == failing else PeerError, match="does not fit"):
            block(rank, world_size)

    run_ranks(attempt, 3)


def test_the_same_error_on_all_ranks_is_reported_by_the_lowest():
    def attempt(rank, world_size):
        with pytest.raises(PeerError if rank else ValueError), raise_together():
            raise ValueError("everywhere")

    run_ranks(attempt, 2)


def test_nested_blocks_report_once():
    def attempt(rank, world_size):
        with pytest.raises(ValueError if rank == 1 else PeerError, match="inner"), raise_together(), raise_together():
            if rank == 1:
                raise ValueError("inner")

    run_ranks(attempt, 2)


def test_bad_input_is_one_line_and_exit_code_2_on_all_ranks(capfd):
    def main():
        with raise_together():
            if process_group.is_main_rank():
                raise ValueError("recipe.yaml: train.tokns: unknown key")

    assert run_ranks(lambda rank, world_size: exit_code_of(main), 3) == [2, 2, 2]
    assert capfd.readouterr().err.splitlines() == ["error: recipe.yaml: train.tokns: unknown key"]


def test_success_and_a_failed_check_have_their_exit_codes():
    assert run_ranks(lambda rank, world_size: exit_code_of(lambda: None), 2) == [0, 0]
    assert run_ranks(lambda rank, world_size: exit_code_of(lambda: 1), 2) == [1, 1]


def test_a_defect_keeps_its_traceback():
    def main():
        raise ValueError("not found by a check")

    with pytest.raises(RankFailed, match="not found by a check"):
        run_ranks(lambda rank, world_size: process_group.run(main), 1)


def test_a_rank_that_dies_ends_the_run():
    def die(rank, world_size):
        if rank == 1:
            os._exit(7)
        dist.barrier()

    with pytest.raises(RankFailed):
        run_ranks(die, 2)


def test_a_rank_that_hangs_is_named():
    def hang(rank, world_size):
        if rank == 1:
            time.sleep(30)

    with pytest.raises(RankFailed, match=r"no result within 1 s from ranks \[0, 1\]"):
        run_ranks(hang, 2, timeout=1)
