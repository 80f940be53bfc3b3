"""The checkpoint folder: one format for training, growth, fine-tuning and HuggingFace, written and read here only."""

from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.expert_bases import ExpertBaseError, base_hashes, check_bases, is_base
from lightninglm.checkpoint.hashes import Comparison, compare_hashes, read_hashes, write_hashes
from lightninglm.checkpoint.layout import (
    OPTIMIZER_KEYS,
    TensorInfo,
    from_disk_name,
    is_stacked,
    parse_step,
    step_folder,
    to_disk_name,
)
from lightninglm.checkpoint.reader import CheckpointReader
from lightninglm.checkpoint.retention import (
    Skipped,
    list_checkpoints,
    newest_checkpoint,
    prune,
    remove_checkpoint,
    remove_leftovers,
    set_aside,
)
from lightninglm.checkpoint.verification import Finding, explain
from lightninglm.checkpoint.writer import CheckpointWriter, require_space

__all__ = [
    "OPTIMIZER_KEYS",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "Comparison",
    "ExpertBaseError",
    "Finding",
    "Skipped",
    "TensorInfo",
    "base_hashes",
    "check_bases",
    "compare_hashes",
    "explain",
    "from_disk_name",
    "is_base",
    "is_stacked",
    "list_checkpoints",
    "newest_checkpoint",
    "parse_step",
    "prune",
    "read_hashes",
    "remove_checkpoint",
    "remove_leftovers",
    "require_space",
    "set_aside",
    "step_folder",
    "to_disk_name",
    "write_hashes",
]
