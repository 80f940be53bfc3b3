"""A small checkpoint to write, read, damage and kill."""

import tempfile
from pathlib import Path

import torch

from lightninglm.checkpoint import CheckpointWriter

CONFIG = {"model_type": "toy", "bos_token_id": 1, "eos_token_id": 2}
STATE = {"format": 1, "step": 7, "adam_step": 7.0}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every kind and dtype that a training checkpoint holds."""
    generator = torch.Generator().manual_seed(seed)
    weights = {f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": (6, 5) for i in range(2) for e in range(3)}
    weights["model.norm.weight"] = (8,)
    found = {name: torch.randn(shape, generator=generator) for name, shape in weights.items()}
    found["lm_head.weight"] = torch.randn(9, 4, generator=generator).bfloat16()
    found |= {f"{name}.exp_avg": torch.randn(found[name].shape, generator=generator) for name in list(weights)}
    found["lm_head.weight.master"] = torch.randn(9, 4, generator=generator)
    found["model.codes"] = torch.randint(-128, 128, (4, 3), generator=generator, dtype=torch.int8)
    found["model.counts"] = torch.randint(0, 2**40, (3,), generator=generator)
    found["model.mask"] = torch.tensor([True, False, True])
    found["model.memory.scale"] = torch.tensor(-2.5)
    found["model.signed_zero"] = torch.tensor([0.0, -0.0])
    found["model.empty"] = torch.empty(0, 3)
    return found


def write(folder: Path, seed: int = 0, shard_bytes: int = 400) -> Path:
    """Writes the tensors of `seed` as a checkpoint, in several shards, with every kind of file."""
    receipt = {"growth_receipt.json": b'{"growth": "deepen", "layers": 14}'}
    with tempfile.TemporaryDirectory() as tokenizer, CheckpointWriter(folder, shard_bytes=shard_bytes) as writer:
        Path(tokenizer, "tokenizer.json").write_bytes(b'{"model": {"type": "BPE", "vocab": {"a": 1}}}')
        for name, tensor in tensors(seed).items():
            writer.add(name, tensor)
        return writer.commit(CONFIG, STATE, tokenizer, receipt)
