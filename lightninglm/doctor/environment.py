"""Whether this machine and this installation can run a recipe: versions, GPUs, communication, memory, disk."""

import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from packaging.version import Version

from lightninglm.checkpoint.errors import free_bytes
from lightninglm.doctor.checks import Check

GIB = 2**30
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
GPU_REQUIREMENTS = REQUIREMENTS.with_name("requirements-gpu.txt")
SHARED_MEMORY = 2**30  # NCCL between the GPUs of a node takes less
OPEN_FILES = 4096
_PIN = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[\w.+]+)")


@dataclass(frozen=True)
class KnownProblem:
    """
    A pair of things that do not work together.

    Attributes:
        package, first, last: versions of a package, both ends included.
        where: "Hopper" for GPUs of compute capability 9, "anywhere" else.
        what, fix: what goes wrong, and the way out.
        source: where it is recorded.
    """

    package: str
    first: str
    last: str
    where: str
    what: str
    fix: str
    source: str


KNOWN_PROBLEMS = (
    KnownProblem(
        "triton", "3.4.0", "3.7.0", "Hopper",
        "the kernels of flash-linear-attention compute a wrong backward pass",
        "Triton below 3.4.0 or above 3.7.0, or delta_rule_backend: torch (auto does not use the kernels then)",
        "flash-linear-attention issue 640",
    ),
    KnownProblem(
        "deepspeed", "0", "0.18.99", "anywhere",
        "the engine here works around the internals of 0.19.8; defaults of clipping and of the overflow check differ",
        "pip install -r requirements.txt",
        "docs/distributed.md",
    ),
)  # fmt: skip


def check_environment(run_folder: Path | None = None, gpus: int | None = None) -> list[Check]:
    """
    The machine and the installation.

    Args:
        run_folder: where checkpoints will be; the current folder unless given.
        gpus: how many a run will use; all unless given.
    """
    return [
        Check("python", "ok", f"{platform.python_version()}, {platform.platform()}"),
        *_packages(),
        *known_problems(_installed, _compute_capabilities()),
        *_gpus(gpus),
        _collective(),
        _compiler(),
        _shared_memory(),
        _open_files(),
        Check("memory", "ok", f"{psutil.virtual_memory().total / GIB:.0f} GiB, {psutil.cpu_count()} cores"),
        _disk(run_folder or Path.cwd()),
    ]


def check_plan(plan: dict[str, Any], run_folder: Path | None = None) -> Iterator[Check]:
    """
    The recipe's ledger against this machine.

    Args:
        plan: from `planning.plan_lineage`, made for the smallest GPU of this machine, or for the memory of a CPU run
            divided by its ranks.
    """
    for stage in plan["stages"]:
        asked, needed = stage["asked"], stage["per_gpu"]["needed"] / GIB
        found = f"needs {needed:.2f} GiB per rank of {asked['gpu_memory_gib']:.2f}"
        advice = ""
        if not asked["fits"]:
            change = asked["smallest_change"]
            advice = (
                "it fits with " + ", ".join(change) if change else "no single change makes it fit: more or larger GPUs"
            )
        yield Check(f"stage {stage['name']}", "ok" if asked["fits"] else "problem", found, advice)
    folder = run_folder or Path.cwd()
    needed, free = plan["total"]["disk"], free_bytes(folder)
    found = f"{free / GIB:.1f} GiB free at {folder}, {needed / GIB:.1f} GiB needed at the most"
    yield Check(
        "disk for the recipe", "ok" if free >= needed else "problem", found,
        "" if free >= needed else "a larger disk for --run, fewer checkpoints (checkpoint.keep), finished stages moved",
    )  # fmt: skip


def rank_memory(ranks: int) -> float:
    """GiB that each of so many ranks can have: its GPU's, or its share of this machine's memory."""
    if torch.cuda.is_available():
        return min(_properties(i).total_memory for i in range(torch.cuda.device_count())) / GIB
    return psutil.virtual_memory().total / GIB / ranks


def known_problems(installed: Callable[[str], str | None], capabilities: Sequence[tuple[int, int]]) -> list[Check]:
    """
    The pairs of `KNOWN_PROBLEMS` that this machine has.

    Args:
        installed: package name -> version, None when it is not there.
        capabilities: compute capability of every GPU.
    """
    checks = []
    for known in KNOWN_PROBLEMS:
        version = installed(known.package)
        if version is None or not Version(known.first) <= Version(version) <= Version(known.last):
            continue
        if known.where == "Hopper" and not any(major == 9 for major, _ in capabilities):
            continue
        found = f"{version}: {known.what} ({known.source})"
        checks.append(Check(f"{known.package} {known.first} to {known.last}", "problem", found, known.fix))
    return checks


def _packages() -> Iterator[Check]:
    """Every pinned package: missing ones are problems, other versions warnings; those for GPUs matter on GPUs only."""
    wrong = 0
    pinned = dict(pins(REQUIREMENTS))
    for name, version in pinned.items():
        found = _installed(name)
        if found is None:
            yield Check(name, "problem", "not installed", f"pip install {name}=={version}")
        elif found.partition("+")[0] != version:
            advice = f"everything was measured with {version}: pip install {name}=={version}"
            yield Check(name, "warning", found, advice)
        else:
            continue
        wrong += 1
    if pinned and not wrong:
        yield Check("packages", "ok", f"{len(pinned)} as pinned in requirements.txt; torch {torch.__version__}")
    for name, version in pins(GPU_REQUIREMENTS):
        found = _installed(name)
        if found == version:
            yield Check(name, "ok", found)
        elif found is not None:
            yield Check(name, "warning", found, f"pip install {name}=={version}, the version of requirements-gpu.txt")
        elif torch.cuda.is_available():
            yield Check(name, "warning", "not installed", f"optional, slower without it: pip install {name}=={version}")
        else:
            yield Check(name, "ok", "not installed; it is for GPUs")


def pins(file: Path) -> list[tuple[str, str]]:
    """(name, version) of every exact pin in a requirements file; none where the file is not (an installed package)."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return [(match["name"], match["version"]) for match in map(_PIN.match, lines) if match]


def _gpus(wanted: int | None) -> Iterator[Check]:
    driver = _driver()
    if not torch.cuda.is_available():
        built = "a CPU build of torch" if torch.version.cuda is None else f"torch for CUDA {torch.version.cuda}"
        if driver is not None:
            advice = (
                f"install a build of torch {torch.__version__.partition('+')[0]} for a CUDA that this driver supports"
            )
            yield Check("GPUs", "problem", f"NVIDIA driver {driver}, but {built} sees none", advice)
        else:
            advice = "runs on CPU ranks, in fp32, for trying things out; training of real sizes needs GPUs"
            yield Check("GPUs", "warning", f"none ({built}, no NVIDIA driver)", advice)
        return
    count = torch.cuda.device_count()
    kinds = {(p.name, round(p.total_memory / GIB)) for p in map(_properties, range(count))}
    found = ", ".join(f"{name} {memory} GiB" for name, memory in sorted(kinds))
    enough = wanted is None or count >= wanted
    advice = "" if enough else f"the run wants {wanted}: --num_gpus {count}, or see CUDA_VISIBLE_DEVICES"
    yield Check(
        "GPUs", "ok" if enough else "problem", f"{count}: {found}; driver {driver}, CUDA {torch.version.cuda}", advice
    )
    if len(kinds) > 1:
        yield Check(
            "GPUs alike", "warning", "of different kinds", "the smallest decides what fits, the slowest the speed"
        )
    if torch.cuda.is_bf16_supported(including_emulation=False):
        yield Check("bf16", "ok", "the GPUs compute in bf16")
    else:
        yield Check("bf16", "problem", "these GPUs do not compute in bf16", "Ampere or newer, or train.dtype: fp32")
    if count > 1:
        peers = all(torch.cuda.can_device_access_peer(i, j) for i in range(count) for j in range(count) if i != j)
        found = "every GPU reaches every other directly" if peers else "some reach each other through the host only"
        yield Check("GPU to GPU", "ok" if peers else "warning", found, "" if peers else "expect slow expert exchange")


def _driver() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    lines = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()
    return lines[0] if lines else None


def _output(command: list[str]) -> str:
    """What a command prints; nothing if it fails."""
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout if result.returncode == 0 else ""


def _collective() -> Check:
    """One sum over a process group of this process alone, through the backend that training uses."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    name = f"communication ({backend})"
    try:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            value = torch.ones(4, device="cuda" if backend == "nccl" else "cpu")
            dist.all_reduce(value)
            assert value.sum().item() == 4
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        return Check(name, "problem", str(error).splitlines()[0], "see NCCL_DEBUG=INFO, firewalls on 127.0.0.1")
    version = "" if backend == "gloo" else " " + ".".join(map(str, torch.cuda.nccl.version()))
    return Check(name, "ok", f"{backend}{version} works in one process")


def _compiler() -> Check:
    """DeepSpeed compiles its CUDA operators at their first use; the ds_configs here need none (`torch_adam`)."""
    missing = [tool for tool in ("g++", "nvcc", "ninja") if shutil.which(tool) is None]
    if not torch.cuda.is_available():
        return Check(
            "compilers", "ok", f"{', '.join(missing)} missing; not needed on a CPU" if missing else "all there"
        )
    lacking = "offloading and fused operators of DeepSpeed cannot be built"
    if missing:
        return Check(
            "compilers", "warning", f"{', '.join(missing)} missing: {lacking}", "install them if you want those"
        )
    release = re.search(r"release (\d+)\.", _output(["nvcc", "--version"]))
    major = torch.version.cuda.partition(".")[0]
    if release is None or release[1] != major:
        found = f"nvcc of CUDA {release[1] if release else '?'}, torch of CUDA {torch.version.cuda}: {lacking}"
        return Check("compilers", "warning", found, f"a CUDA {major} toolkit first in PATH, if you want those")
    return Check("compilers", "ok", f"g++, ninja, nvcc of CUDA {major}")


def _shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check("shared memory", "warning", "no /dev/shm", "NCCL and data workers use it")
    size = shutil.disk_usage(path).total
    small = size < SHARED_MEMORY
    return Check(
        "shared memory", "warning" if small else "ok", f"/dev/shm of {size / GIB:.2f} GiB",
        "in a container: --shm-size=8g or --ipc=host" if small else "",
    )  # fmt: skip


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    small = soft < OPEN_FILES and soft != resource.RLIM_INFINITY
    advice = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}" if small else ""
    return Check("open files", "warning" if small else "ok", f"at most {soft:,} per process", advice)


def _disk(folder: Path) -> Check:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check("disk", "problem", f"{existing} is no folder that this user can write to", "another --run")
    return Check("disk", "ok", f"{free_bytes(folder) / GIB:.1f} GiB free at {folder}")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _compute_capabilities() -> list[tuple[int, int]]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_capability(i) for i in range(count)]


def _properties(index: int):
    return torch.cuda.get_device_properties(index)
