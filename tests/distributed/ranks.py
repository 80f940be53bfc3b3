"""Runs a function on several DeepSpeed ranks within a second: imports happen once, then the ranks are forked."""

import gc
import importlib
import io
import multiprocessing
import os
import pickle
import time
import traceback
from multiprocessing.connection import wait

import torch

from lightninglm.distributed import process_group

for name in ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"):
    importlib.import_module(name)  # 4 s of the first deepspeed.initialize of a process, paid once for all ranks


class RankFailed(RuntimeError):
    """A rank raised, died or did not finish in time."""


def run_ranks(function, world_size: int, *args, timeout: float = 120.0) -> list:
    """
    Calls `function(rank, world_size, *args)` on `world_size` forked ranks with a gloo group, returns results by rank.

    The function may be a closure; results are pickled (tensors by value). The first failure ends all ranks.
    Raises RankFailed with the rank's traceback.
    """
    torch.set_num_threads(1)  # a fork does not carry a thread pool
    context = multiprocessing.get_context("fork")
    port = process_group.free_port()
    ranks, pipes = [], {}
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(function, rank, world_size, port, sender, args), daemon=True)
        process.start()
        sender.close()
        ranks.append(process)
        pipes[receiver] = rank
    deadline = time.monotonic() + timeout
    results, failure = {}, None
    while pipes and failure is None:
        ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failure = f"no result within {timeout} s from ranks {sorted(pipes.values())}"
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                succeeded, payload = pipe.recv()
            except EOFError:
                ranks[rank].join()
                succeeded, payload = False, f"rank {rank} died with exit code {ranks[rank].exitcode}"
            if not succeeded:
                failure = payload
                break
            results[rank] = pickle.loads(payload)
    for process in ranks:
        if failure is not None:
            process.kill()
        process.join()
    if failure is not None:
        raise RankFailed(failure)
    return [results[rank] for rank in range(world_size)]


def _rank_main(function, rank, world_size, port, sender, args) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    gc.freeze()  # what was imported is not collected; looking at it would copy it into every rank
    try:
        process_group.init_distributed(timeout_minutes=1)
        torch.manual_seed(0)
        buffer = io.BytesIO()
        pickle.dump(function(rank, world_size, *args), buffer)
        process_group.barrier()  # a rank that leaves early resets the connections of the others
        sender.send((True, buffer.getvalue()))
    except BaseException:
        sender.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    sender.close()
    os._exit(0)  # skips the parent's exit handlers
