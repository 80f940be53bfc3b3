"""The model's source files: a checkpoint carries them, so that transformers reads it where this package is missing."""

from pathlib import Path

MODEL_TYPE = "lightninglm"
AUTO_MAP = {
    "AutoConfig": "configuration_lightninglm.LightningLMConfig",
    "AutoModel": "modeling_lightninglm.LightningLMModel",
    "AutoModelForCausalLM": "modeling_lightninglm.LightningLMForCausalLM",
}
"""The entry of config.json by which `from_pretrained(folder, trust_remote_code=True)` finds the classes."""


def model_code() -> dict[str, bytes]:
    """File name -> content of every module of lightninglm/modeling."""
    folder = Path(__file__).parents[1] / "modeling"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"}
