"""Which configuration a published checkpoint has: what the user names, or the preset of its sizes."""

import json
import re
from pathlib import Path

from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.published.source import PublishedSource
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.presets import PRESETS, preset


def resolve_config(source: PublishedSource, named: str | None = None) -> LightningLMConfig:
    """
    The configuration to import a checkpoint with.

    Quantized experts need no mention: where the source has codes, `expert_quantization` is set to suit them.

    Args:
        named: a preset, which is meant in published mode, or a JSON file with fields of LightningLMConfig, in published
            mode unless it says otherwise. None: the preset with the source's sizes.
    Raises CheckpointError for an unknown preset, a bad file, a bad field, or sizes that no preset has.
    """
    if named is None:
        config = preset(_preset_of(source), mode="published")
        if not any(key.startswith("mtp_block.") for key in source.tensors):
            config.num_nextn_predict_layers = 0
    elif named in PRESETS:
        config = preset(named, mode="published")
    else:
        config = _read_config(Path(named))
    ranks = [shape[-1] for key, shape in source.shapes.items() if key.endswith(".tqp_A") and shape]
    if config.expert_quantization is None and any(key.endswith(".weight_indices") for key in source.tensors) and ranks:
        # group_size and seed belong to the other kinds: a row is one group, the signs come from the file
        quantization = {"kind": "codebook", "group_size": 128, "rank": ranks[0], "seed": 0}
        config = _build({**config.to_dict(), "expert_quantization": quantization}, source.path)
    return config


def _preset_of(source: PublishedSource) -> str:
    """The preset with the number of layers, hidden size, vocabulary and number of experts of a source."""
    shapes = source.shapes
    layers = {int(match[1]) for key in shapes if (match := re.match(r"layers\.(\d+)\.", key))}
    routers = [shape for key, shape in shapes.items() if re.fullmatch(r"layers\.\d+\..*\.gate\.gate\.weight", key)]
    head = shapes.get("lm_head.weight", (0, 0))
    found = (len(layers), *head[::-1], routers[0][0] if routers else 0)
    for name in PRESETS:
        config = preset(name, mode="published")
        if (config.num_hidden_layers, config.hidden_size, config.vocab_size, config.num_experts) == found:
            return name
    raise CheckpointError(
        f"{source.path}: {found[0]} layers, lm_head.weight {list(head)}, {found[3]} experts: no preset has these "
        f"sizes; name the configuration with --config (a JSON file, or one of {', '.join(PRESETS)})"
    )


def _read_config(path: Path) -> LightningLMConfig:
    if not path.is_file():
        raise CheckpointError(f"--config {path}: neither a file nor one of {', '.join(PRESETS)}")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must be an object with fields of LightningLMConfig")
    unknown = sorted(content.keys() - LightningLMConfig().to_dict().keys() - {"auto_map"})
    if unknown:
        raise CheckpointError(f"{path}: LightningLMConfig has no field {', '.join(unknown)}")
    return _build({"mode": "published"} | content, path)


def _build(fields: dict, origin: Path) -> LightningLMConfig:
    try:
        return LightningLMConfig.from_dict(fields)
    except ValueError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    except TypeError as error:
        raise CheckpointError(
            f"{origin}: a field of LightningLMConfig has a value of the wrong type ({error})"
        ) from error
