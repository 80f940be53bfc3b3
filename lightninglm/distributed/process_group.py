"""Start and end of the ranks: one process group per run, one message per error, one exit code for all ranks."""

import os
import socket
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import deepspeed
import torch
import torch.distributed as dist

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


class PeerError(RuntimeError):
    """Another rank failed in a `raise_together` block. That rank reports the error; this one only ends, silently."""

    def __init__(self, rank: int, message: str, exit_code: int):
        super().__init__(f"rank {rank} failed: {message}")
        self.exit_code = exit_code


def init_distributed(timeout_minutes: float = 30.0) -> torch.device:
    """
    Joins the process group of this run: NCCL with a GPU, gloo without, and returns the device of this rank.

    The ranks come from the `deepspeed` (or `torchrun`) launcher. Without a launcher the process is the only rank. On
    the CPU each rank computes with one thread, so that ranks share the cores and sums have one order.

    Args:
        timeout_minutes: how long a collective may wait for the other ranks before it is an error.
    """
    if "RANK" not in os.environ:
        single = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        os.environ.update({name: str(value) for name, value in single.items()})
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        # No compiled kernel is used without a GPU. Left to itself, DeepSpeed tries the compiler on each of them and
        # then builds one, a minute of g++ at the first start, for a collective that only its inference calls.
        deepspeed.ops.__compatible_ops__ = {}
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+_tensor. is deprecated")  # DeepSpeed's calls
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timedelta(minutes=timeout_minutes))
    return device


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main_rank() -> bool:
    """Whether this rank prints, logs and writes what is written once."""
    return rank() == 0


def barrier() -> None:
    """Waits until every rank is here."""
    if world_size() > 1:
        dist.barrier()


class raise_together:
    """
    A block that all ranks leave together: when it raised on one rank, no rank goes on.

        with raise_together():
            if is_main_rank():
                check_the_recipe()

    The lowest rank that failed keeps its own exception, every other rank gets `PeerError`, and `run` prints the error
    once. The block must hold no collective: a rank that failed before it would leave the others waiting in it.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, PeerError) or getattr(error, "raised_together", False):
            return  # an inner block has told the other ranks already
        report = None if error is None else (f"{kind.__name__}: {error}", exit_code(error))
        reports = [report]
        if world_size() > 1:
            reports = [None] * world_size()
            dist.all_gather_object(reports, report)
        failed = [r for r, other in enumerate(reports) if other is not None]
        if not failed:
            return
        if failed[0] != rank():
            raise PeerError(failed[0], *reports[failed[0]]) from error
        error.raised_together = True


def exit_code(error: BaseException) -> int:
    """2 for bad input (ValueError and its kind, a file that is not there), 1 for anything else."""
    return EXIT_BAD_INPUT if isinstance(error, ValueError | FileNotFoundError) else EXIT_FAILED


def run(main: Callable[[], int | None]) -> NoReturn:
    """
    Runs `main` on this rank and ends the process with its exit code (None is 0).

    Bad input found in a `raise_together` block prints as one line, on one rank, and all ranks exit with code 2. Any
    other exception is a defect and keeps its traceback. The launcher ends all ranks as soon as one exits with an
    error, so the ranks wait for each other before they leave.
    """
    try:
        code = main() or 0
    except PeerError as error:
        code = error.exit_code
    except (ValueError, FileNotFoundError) as error:
        if not getattr(error, "raised_together", False):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_BAD_INPUT
    shutdown()
    sys.exit(code)


def shutdown() -> None:
    """Waits for the other ranks and leaves the process group."""
    if dist.is_initialized():
        dist.barrier()
        deepspeed.comm.destroy_process_group()
