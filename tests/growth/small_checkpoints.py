"""Small real checkpoints: all modules on, nothing at its initial value, Adam moments that are not zero."""

import hashlib
import json
import re

import torch

from lightninglm.checkpoint import CheckpointReader, CheckpointWriter
from lightninglm.checkpoint.layout import decode_head
from lightninglm.checkpoint.model_tensors import model_tensors
from lightninglm.checkpoint.writer import encode_manifest
from lightninglm.modeling.byte_embedding import byte_alphabet, token_bytes, tokens_sha256
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM

VOCABULARY = 257  # all bytes and one special token
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "num_attention_heads": 2,
    "head_dim": 16,
    "indexer_num_heads": 2,
    "indexer_head_dim": 8,
    "sparse_key_budget": 8,
    "sparse_min_keys": 4,
    "sparse_max_keys": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 64,
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2}
QUANTIZABLE = {"intermediate_size": 64, "moe_intermediate_size": 32}  # the rotation needs a power of two
TRAINER_STATE = {
    "format": 1,
    "stage": "parent",
    "step": 300,
    "total_steps": 300,
    "tokens": 1000,
    "lineage_tokens": 5000,
    "finished": True,
    "adam_step": 297.0,
    "data": {
        "position": 2400,
        "domain_offsets": {"code": 3, "english": 5},
        "next_domain_offsets": {"code": 1203, "english": 1205},
        "seed": 11,
    },
    "ramps": {},
    "new_tensors": {"names": [], "warmup_steps": 100},
    "seed": 11,
    "recipe": {},
    "lineage": [{"stage": "parent", "steps": 300, "tokens": 1000, "recipe_sha256": "00"}],
    "skipped_steps": 3,
}


def write_tokenizer(folder, special="<|end|>", *, reverse=False, drop=0, more=()):
    """A byte-level BPE tokenizer without merges: all bytes but the first `drop`, `special`, then `more` specials."""
    tokens = [*list(byte_alphabet())[drop:], special]
    tokens = [*(reversed(tokens) if reverse else tokens), *more]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    added = [
        {"id": vocabulary[token], "content": token, "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
        for token in (special, *more)
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special}))
    return folder


@torch.no_grad()
def perturbed_model(config, seed=0, dtype=torch.float32):
    """A model in which no parameter, bias or average is at its initial value."""
    torch.manual_seed(seed)
    model = LightningLMForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += torch.randn(parameter.shape, generator=generator) * 0.05
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[2]
        if leaf.endswith("_bias"):
            buffer += torch.randn(buffer.shape, generator=generator) * 0.02
        elif leaf.endswith("_ema"):
            buffer *= 1 + 0.1 * torch.rand(buffer.shape, generator=generator)
    for name, parameter in model.named_parameters():
        if not any(re.search(pattern, name) for pattern in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.to(dtype)
    return model


def write_checkpoint(folder, config, tokenizer, *, seed=0, moments=True, state=None, dtype=torch.float32, edit=None):
    """Writes a perturbed model with random Adam state. `edit(name, tensor)` may change or (None) drop a tensor."""
    config.tokenizer_sha256 = config.tokenizer_sha256 or tokens_sha256(token_bytes(tokenizer / "tokenizer.json"))
    model = perturbed_model(config, seed, dtype)
    tensors = {name: value for item in model_tensors(model) for name, value in item.split(item.tensor.detach())}
    trained = {name for item in model_tensors(model) if item.tensor.requires_grad for name in item.disk_names}
    if moments:
        generator = torch.Generator().manual_seed(seed + 1)
        for name in sorted(trained):
            value = tensors[name]
            if value.dtype != torch.float32:
                tensors[f"{name}.master"] = value.float()
            tensors[f"{name}.exp_avg"] = torch.randn(value.shape, generator=generator)
            tensors[f"{name}.exp_avg_sq"] = torch.rand(value.shape, generator=generator)
    with CheckpointWriter(folder, shard_bytes=2**16) as writer:
        for name, value in tensors.items():
            value = value if edit is None else edit(name, value)
            if value is not None:
                writer.add(name, value)
        architecture = {"architectures": ["LightningLMForCausalLM"], "dtype": str(dtype).removeprefix("torch.")}
        writer.commit(config.to_dict() | architecture, TRAINER_STATE | (state or {}), tokenizer_folder=tokenizer)
    return folder


def small_config(**changes):
    return LightningLMConfig(**{**SMALL, **changes})


def read_all(folder):
    """{name: tensor} of everything in a checkpoint, optimizer state included."""
    with CheckpointReader(folder) as reader:
        return {name: reader.read(name).clone() for name in (*reader.weights, *reader.optimizer)}


def rewrite(folder, target, edit):
    """Copies a checkpoint as a consistent one; `edit(tensors)` may change, add and remove tensors on the way."""
    tensors = read_all(folder)
    edit(tensors)
    reader = CheckpointReader(folder)
    receipt = folder / "growth_receipt.json"
    extra = {receipt.name: receipt.read_bytes()} if receipt.exists() else {}
    with CheckpointWriter(target) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.commit(reader.config, reader.trainer_state, tokenizer_folder=folder, extra_files=extra)
    return target


def rewrite_config(folder, target, changes):
    """Copies a checkpoint as a consistent one with another configuration."""
    tensors, reader = read_all(folder), CheckpointReader(folder)
    receipt = folder / "growth_receipt.json"
    with CheckpointWriter(target) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        extra = {receipt.name: receipt.read_bytes()}
        writer.commit(reader.config | changes, reader.trainer_state, tokenizer_folder=folder, extra_files=extra)
    return target


def plant_nan(folder, name):
    """Makes the first value of a stored fp32 tensor NaN, behind the writer's back, with hashes that match."""
    file = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    head, start = decode_head(folder / file)
    data = bytearray((folder / file).read_bytes())
    low, high = (start + offset for offset in head[name]["data_offsets"])
    data[low : low + 4] = b"\x00\x00\xc0\x7f"
    (folder / file).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"][name]["sha256"] = hashlib.sha256(data[low:high]).hexdigest()
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
