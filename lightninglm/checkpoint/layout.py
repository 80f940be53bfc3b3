"""Where everything lies in a checkpoint: names of folders and files, names of tensors, and the head of a shard.

    step-00001000/
      config.json generation_config.json + tokenizer files   AutoModelForCausalLM.from_pretrained(folder) reads it
      configuration_lightninglm.py modeling_lightninglm.py... the model's source files, for trust_remote_code
      model-RRRRR-NNNNN.safetensors                           weights and buffers: rank that wrote, number
      model.safetensors.index.json                            tensor name -> file
      optimizer-RRRRR-NNNNN.safetensors optimizer.index.json  <parameter>.master, .exp_avg, .exp_avg_sq (fp32)
      published-*.safetensors published.index.json published.json   in an imported checkpoint only: what the published
                                                              file holds and the model does not
      trainer_state.json
      manifest.json                                           size of every file; SHA-256 of every small file, of every
                                                              shard's head and of every tensor; written last

`.master` is present only for a parameter whose weight is not fp32: an fp32 weight is its own master copy.
Experts are stacked in memory and one tensor each on disk: the expert's number is inserted after `.experts.`.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from lightninglm.checkpoint.errors import CheckpointError

FORMAT = 2
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TRAINER_STATE = "trainer_state.json"
MANIFEST = "manifest.json"
INDEX = {
    "model": "model.safetensors.index.json",
    "optimizer": "optimizer.index.json",
    "published": "published.index.json",
}
OPTIONAL_KINDS = ("published",)  # no index when there is nothing of the kind
PUBLISHED_PREFIX = "published."
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
TEMPORARY_PREFIX = ".tmp-"

MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"
OPTIMIZER_KEYS = (MASTER, EXP_AVG, EXP_AVG_SQ)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEAD_KEYS = ("dtype", "shape", "data_offsets")

_STACKED = re.compile(r"(?<=\.experts\.)(?=(?:gate_proj|up_proj|down_proj)\.)")
_ONE_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.(?=(?:gate_proj|up_proj|down_proj)\.)")
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: dtype, shape, the file that holds it, SHA-256 of its raw bytes (hex)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    sha256: str


def step_folder(step: int) -> str:
    """Name of the checkpoint of a step: `step-00000100`."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint's folder name, None when it is not one."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def is_stacked(memory_name: str) -> bool:
    """Whether the tensor holds one row per expert in memory (and is one tensor per expert on disk)."""
    return _STACKED.search(memory_name) is not None


def to_disk_name(memory_name: str, expert: int | None = None) -> str:
    """`...experts.gate_proj.weight`, 17 -> `...experts.17.gate_proj.weight`; any other name stays as it is."""
    return memory_name if expert is None else _STACKED.sub(f"{expert}.", memory_name)


def from_disk_name(disk_name: str) -> tuple[str, int | None]:
    """`...experts.17.gate_proj.weight` -> (`...experts.gate_proj.weight`, 17); any other name -> (name, None)."""
    match = _ONE_EXPERT.search(disk_name)
    return (_ONE_EXPERT.sub("", disk_name), int(match[1])) if match else (disk_name, None)


def kind_of(name: str) -> str:
    """`"published"` for `published.<key>`, `"optimizer"` for `<parameter>.exp_avg` etc., `"model"` for the rest."""
    if name.startswith(PUBLISHED_PREFIX):
        return "published"
    return "optimizer" if name.rpartition(".")[2] in OPTIMIZER_KEYS else "model"


def encode_head(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """The first bytes of a safetensors file that holds these tensors back to back, in this order."""
    head, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors:
        end = offset + tensor.numel() * tensor.element_size()
        head[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def read_head(path: Path) -> bytes:
    """The bytes of a safetensors file before its tensors. Raises CheckpointError when the file ends inside them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if length > size - 8:
            raise CheckpointError(f"{path}: its head claims {length:,} bytes, but the file has {size:,}")
        return prefix + file.read(length)


def decode_head(path: Path, whole: bool = True) -> tuple[dict[str, dict], int]:
    """
    Reads the head of a safetensors file.

    Args:
        whole: refuse a file of another size than its head describes.
    Returns:
        Per tensor `{"dtype", "shape", "data_offsets"}`, and the position in the file at which offset 0 lies.
    Raises CheckpointError when the head is damaged or does not describe the whole file.
    """
    size, raw = path.stat().st_size, read_head(path)
    try:
        head = json.loads(raw[8:])
        head.pop("__metadata__", None)
        head = {name: {key: entry[key] for key in _HEAD_KEYS} for name, entry in head.items()}
        end = 0
        for start, stop in sorted(entry["data_offsets"] for entry in head.values()):
            if start != end or stop < start:
                raise ValueError(f"its tensors do not follow each other: one starts at {start}, not at {end}")
            end = stop
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: its head is not that of a safetensors file ({error!r})") from error
    if whole and len(raw) + end != size:
        raise CheckpointError(f"{path}: its head describes {len(raw) + end:,} bytes, but the file has {size:,}")
    return head, len(raw)
