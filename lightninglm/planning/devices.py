"""The GPUs that a plan is made for: memory that a process sees, and dense bf16 matrix products per second."""

from dataclasses import dataclass

GIB = 2**30
OVERHEAD_BYTES = 2 * GIB
"""CUDA context, NCCL's buffers, workspaces of cuBLAS: an allowance, not measured here."""
CPU_OVERHEAD_BYTES = GIB // 2
"""What a CPU rank has to itself: 0.44 GiB of a rank of a rehearsal, which held some 20 MB of weights and moments."""
FRAGMENTATION = 0.05
"""Share of what is allocated that the allocator cannot hand out: an allowance, not measured here."""


@dataclass(frozen=True)
class Device:
    """name; memory in GiB; peak flops per second in bf16, dense, from the makers' data sheets."""

    name: str
    memory: float
    peak_flops: float


DEVICES = {
    device.name: device
    for device in (
        Device("A100-40", 40, 312e12),
        Device("A100-80", 80, 312e12),
        Device("H100", 80, 989e12),
        Device("H200", 140, 989e12),
        Device("B200", 179, 2250e12),
    )
}


def needed_bytes(allocated: int, overhead: int = OVERHEAD_BYTES) -> int:
    """Memory that a GPU must have for a process that allocates so much; a CPU rank with its own `overhead`."""
    return round(allocated * (1 + FRAGMENTATION)) + overhead
