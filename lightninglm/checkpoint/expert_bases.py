"""
The frozen bases of quantized experts, by content: adapters are worth something only beside the base they trained on.

A layer's hash covers the codes, scales, rotation signs and levels of all its experts, by their names on disk. It is
recorded in trainer_state.json (`expert_bases`) and compared whenever the adapters are trained or grown further.
"""

import hashlib
import re
from collections.abc import Mapping

from lightninglm.checkpoint.errors import CheckpointError

_BASE = re.compile(r"(?P<layer>.*\.experts)\.((\d+\.)?(gate|up|down)_proj\.(codes|scales)|\w+_(signs|levels))")


class ExpertBaseError(CheckpointError):
    """The base of quantized experts is not the one that their adapters were trained on."""


def is_base(name: str) -> bool:
    """Whether a tensor, by its name in memory or on disk, belongs to the frozen base of quantized experts."""
    return _BASE.fullmatch(name) is not None


def base_hashes(sha256: Mapping[str, str]) -> dict[str, str]:
    """
    One hash per layer with quantized experts, `{"model.layers.1.mlp.experts": hex}`; empty without any.

    Args:
        sha256: name on disk -> SHA-256 of the tensor's raw bytes; other tensors than those of bases are ignored.
    """
    layers: dict[str, list[str]] = {}
    for name in sorted(sha256):
        if match := _BASE.fullmatch(name):
            layers.setdefault(match["layer"], []).append(f"{name} {sha256[name]}\n")
    return {layer: hashlib.sha256("".join(rows).encode()).hexdigest() for layer, rows in layers.items()}


def check_bases(where: object, recorded: Mapping[str, str] | None, found: Mapping[str, str]) -> None:
    """
    Raises ExpertBaseError, naming a layer, unless the bases are those on record.

    Args:
        where: the checkpoint, for the message.
        recorded: `expert_bases` of its trainer state. None: nothing has trained on the bases yet.
        found: `base_hashes` of what it holds.
    """
    if recorded is None or recorded == found:
        return
    wrong = sorted(layer for layer in recorded.keys() | found.keys() if recorded.get(layer) != found.get(layer))
    layer = wrong[0]
    raise ExpertBaseError(
        f"{where}: the adapters of {layer} were trained on another quantized base ({len(wrong)} such layer(s)): its "
        f"SHA-256 is {found.get(layer, 'none')[:16]}, that of the adapters' base {recorded.get(layer, 'none')[:16]}. "
        "Restore the base from the checkpoint that the adapters come from, or merge there and quantize again"
    )
