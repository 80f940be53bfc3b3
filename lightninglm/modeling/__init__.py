"""The LightningLM model for HuggingFace transformers: importing this package registers it with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .byte_embedding import token_bytes, tokens_sha256
from .cache import LightningLMCache
from .configuration_lightninglm import LightningLMConfig
from .initialization import initial_tensor, initialize_model
from .modeling_lightninglm import (
    LightningLMCausalLMOutput,
    LightningLMForCausalLM,
    LightningLMModel,
    LightningLMModelOutput,
    LightningLMPreTrainedModel,
)
from .parameter_count import ParameterCount, count_parameters
from .parameter_roles import role
from .presets import PRESETS, preset

AutoConfig.register("lightninglm", LightningLMConfig, exist_ok=True)
AutoModel.register(LightningLMConfig, LightningLMModel, exist_ok=True)
AutoModelForCausalLM.register(LightningLMConfig, LightningLMForCausalLM, exist_ok=True)
# Saved folders carry these files, so that trust_remote_code loads them where this package is not installed.
LightningLMConfig.register_for_auto_class()
LightningLMModel.register_for_auto_class("AutoModel")
LightningLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "PRESETS",
    "LightningLMCache",
    "LightningLMCausalLMOutput",
    "LightningLMConfig",
    "LightningLMForCausalLM",
    "LightningLMModel",
    "LightningLMModelOutput",
    "LightningLMPreTrainedModel",
    "ParameterCount",
    "count_parameters",
    "initial_tensor",
    "initialize_model",
    "preset",
    "role",
    "token_bytes",
    "tokens_sha256",
]
