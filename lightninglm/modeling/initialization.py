"""
Initial values of every tensor of the model, by name: one table for training, growth and `from_pretrained`.

A tensor's values depend on its canonical name and the seed alone, so they are the same on any number of ranks and in
any order. Canonical names are those on disk: one tensor per expert, `model.layers.3.mlp.experts.17.gate_proj.weight`.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator

import torch
from torch import nn

from .configuration_lightninglm import LightningLMConfig
from .quantized_experts import shared_tensors, weight_formats
from .rotary import rotary_frequencies

SMALLEST_DECAY_RATE = 1e-4  # lower end of exp(A_log)
STACKED_EXPERTS = re.compile(r"(.*\.experts\.)((?:gate|up|down)_proj\..+)")


def _normal(generator: torch.Generator, shape: tuple[int, ...], std: float) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * std


def _uniform(generator: torch.Generator, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * (high - low) + low


def _decay_rate(name, generator, shape, config):
    """A_log: the logarithm of a rate uniform in (0, 16], or in [1, 16] with `decay_init="slow"`."""
    low = 1.0 if config.decay_init == "slow" else 0.0
    return _uniform(generator, shape, low, 16.0).clamp(min=SMALLEST_DECAY_RATE).log()


def _decay_step(name, generator, shape, config):
    """dt_bias: near 0, or with `decay_init="slow"` such that its softplus is log-uniform in [1e-3, 1e-1]."""
    if config.decay_init == "slow":
        step = _uniform(generator, shape, math.log(1e-3), math.log(1e-1)).exp()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    return _uniform(generator, shape, -0.01, 0.01)


def _linear(name, generator, shape, config):
    return _normal(generator, shape, config.initializer_range)


def _convolution(name, generator, shape, config):
    bound = 1 / math.sqrt(config.linear_conv_kernel_dim)
    return _uniform(generator, shape, -bound, bound)


def _layer_idx(name: str, config: LightningLMConfig) -> int:
    """The layer that a tensor belongs to; the second-token layer counts behind the last one."""
    layer = re.search(r"layers\.(\d+)\.", name)
    return int(layer[1]) if layer else config.num_hidden_layers


def _quantization_constant(name, generator, shape, config):
    """Rotation signs and codebooks, which follow from the config."""
    return shared_tensors(config, _layer_idx(name, config))[name.rpartition(".")[2]]


def _constant(value: float) -> Callable:
    return lambda name, generator, shape, config: torch.full(shape, value)


RULES: list[tuple[str, Callable]] = [
    (r"embed_tokens\.proj\.weight", lambda n, g, s, c: _normal(g, s, c.initializer_range / math.sqrt(s[1]))),
    (r"[qkv]_conv1d\.(weight|bias)", _convolution),
    (r"mixer\.A_log", _decay_rate),
    (r"mixer\.dt_bias", _decay_step),
    (r"mixer\.D", _constant(1.0)),
    (r"(mixer|mlp)_connection\.alpha_(pre|post|res)", _constant(0.1)),
    (r"(mixer|mlp)_connection\.b_res", lambda n, g, s, c: c.b_res_init * torch.eye(s[0])),
    (r"(mixer|mlp)_connection\.b_(pre|post)|indexer\.gate_bias", _constant(0.0)),
    (r"memory\.scale", _constant(-2.5)),
    (r"router\.(logit|group|member)_bias|router\.null_logit", _constant(0.0)),
    (r"router\.null_bias", _constant(-5.0)),
    (r"router\.(group_|member_)?usage_ema", lambda n, g, s, c: torch.full(s, 1 / s[-1])),
    (r"mixer\.variance_ema", _constant(1.0)),
    (r"model\.step_size", lambda n, g, s, c: torch.tensor(c.step_sizes)),
    (r"model\.blend", lambda n, g, s, c: torch.tensor(c.blends)),
    (r"rotary\.inv_freq_\d+", lambda n, g, s, c: rotary_frequencies(2 * s[0], c.rope_theta).bfloat16().float()),
    (r"experts\.(hidden|intermediate|up)_(signs|levels)", _quantization_constant),
    (r"experts\.\d+\.(gate|up|down)_proj\.A", _constant(0.0)),
    (r"experts\.\d+\.(gate|up|down)_proj\.B", lambda n, g, s, c: _normal(g, s, 1 / math.sqrt(s[1]))),
    (r"norm\.weight", _constant(1.0)),
    (r"bias", _constant(0.0)),
    (r"([a-z]+_proj|lm_head|memory\.gate|phi_(pre|post|res)|router|router\.group|router\.member)\.weight", _linear),
]
"""What a name ends with, from a component on -> values(name, generator, shape, config); the first match counts."""


def generator_for(name: str, seed: int) -> torch.Generator:
    """The random generator of one tensor, seeded by its canonical name and `seed`."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def initial_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, config: LightningLMConfig, seed: int
) -> torch.Tensor:
    """
    The initial values of one parameter or persistent buffer, on the CPU.

    Args:
        name: canonical name (as on disk).
        shape, dtype: what the tensor has; values are drawn in fp32 and cast.
        config: the model's configuration (initializer_range, b_res_init, decay_init, ...).
        seed: any integer.
    Raises:
        ValueError: the table has no rule for the name, or it names a stack of experts.
    """
    if STACKED_EXPERTS.fullmatch(name):
        raise ValueError(f"{name!r} stacks the experts of a layer: each has a name and values of its own")
    shape = tuple(shape)
    if match := re.fullmatch(r"(.*\.experts\.\d+\.(?:gate|up|down)_proj)\.(codes|scales)", name):
        return _quantized(match[1], match[2], shape, config, seed)
    for pattern, rule in RULES:
        if re.fullmatch(rf"(?:.*[._])?(?:{pattern})", name):
            return rule(name, generator_for(name, seed), shape, config).to(dtype).reshape(shape)
    raise ValueError(f"no initial values are known for a tensor named {name!r} of shape {shape}")


def _quantized(matrix: str, part: str, shape: tuple[int, ...], config: LightningLMConfig, seed: int) -> torch.Tensor:
    """Codes or scales of the dense matrix that an unquantized model would start from."""
    stem, _, projection = matrix.rpartition(".")
    hidden, width = config.hidden_size, config.moe_intermediate_size
    size = (hidden, width) if projection == "down_proj" else (width, hidden)
    weight = _normal(generator_for(f"{matrix}.weight", seed), size, config.initializer_range)
    shared = shared_tensors(config, _layer_idx(stem, config))
    codes, scales = weight_formats(config, shared)[projection].encode(weight)
    return (codes if part == "codes" else scales).reshape(shape)


def canonical_tensors(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, str, bool]]:
    """
    All parameters and persistent buffers of a model.

    Yields:
        (canonical name, the module that holds the tensor, its name there, whether it stacks experts); for stacked
        experts the canonical name is that of the stack, without the expert's number.
    """
    for module_name, module in model.named_modules():
        names = [*module._parameters, *(b for b in module._buffers if b not in module._non_persistent_buffers_set)]
        for name in names:
            if getattr(module, name) is not None:
                full = prefix + (f"{module_name}.{name}" if module_name else name)
                yield full, module, name, STACKED_EXPERTS.fullmatch(full) is not None


@torch.no_grad()
def initialize_model(
    model: nn.Module, seed: int, device: str | torch.device = "cpu", only_missing: bool = False
) -> None:
    """
    Gives every parameter and buffer of a model its initial values, one tensor at a time.

    Works on a model whose experts are a local block (`shard_experts`); padding is zero. Tensors on the meta device are
    made real on `device`, keeping the attributes that were set on them. Counters are cleared, the byte table stays.

    Args:
        model: LightningLMForCausalLM or LightningLMModel.
        seed: see `initial_tensor`.
        only_missing: leave alone what `from_pretrained` loaded or an earlier pass initialized.
    """
    config = model.config
    prefix = "" if model.base_model is not model else f"{model.base_model_prefix}."
    blocks = {f"{prefix}{name}.": m for name, m in model.named_modules() if hasattr(m, "expert_start")}
    skip = set()
    if only_missing:
        skip = {module for module in model.modules() if getattr(module, "_is_hf_initialized", False)}
    for full, module, name, stacked in canonical_tensors(model, prefix):
        tensor = getattr(module, name)
        if module in skip or (only_missing and getattr(tensor, "_is_hf_initialized", False)):
            continue
        tensor = _materialize(module, name, device)
        if not stacked:
            tensor.copy_(initial_tensor(full, tensor.shape, tensor.dtype, config, seed))
            continue
        stem, leaf = STACKED_EXPERTS.fullmatch(full).groups()
        block = blocks[stem]
        tensor[block.expert_count :] = 0
        for row in range(block.expert_count):
            expert = f"{stem}{block.expert_start + row}.{leaf}"
            tensor[row].copy_(initial_tensor(expert, tensor.shape[1:], tensor.dtype, config, seed))
    for module in model.modules():
        if module not in skip:
            for name in module._non_persistent_buffers_set - {"token_bytes", "token_lengths"}:
                if getattr(module, name) is not None:
                    _materialize(module, name, device).zero_()
        module._is_hf_initialized = True


@torch.no_grad()
def allocate_model(model: nn.Module, device: str | torch.device = "cpu") -> None:
    """
    Makes the meta tensors of a model real, all zero, for a caller that then loads every one of them.

    Much quicker than `initialize_model` for a large model; works on local blocks of experts as that does.
    """
    for module in model.modules():
        for name in [*module._parameters, *module._buffers]:
            tensor = getattr(module, name)
            if tensor is not None and tensor.device.type == "meta":
                _materialize(module, name, device).zero_()
        module._is_hf_initialized = True


def _materialize(module: nn.Module, name: str, device: str | torch.device) -> torch.Tensor:
    """The tensor, made real on `device` if it is on the meta device."""
    tensor = getattr(module, name)
    if tensor.device.type != "meta":
        return tensor
    real = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    setattr(module, name, real)
    return getattr(module, name)
