"""A whole training run of a tiny model on ranks: what the tests of this folder compare."""

from pathlib import Path

import torch
import torch.distributed as dist

from lightninglm.distributed.ds_config import load_ds_config
from lightninglm.distributed.engine import build_engine, parameter_groups
from lightninglm.distributed.expert_parallel import apply_expert_parallel
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.initialization import initialize_model
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM

GLOBAL_BATCH, LENGTH, VOCABULARY = 8, 16, 64
INT8 = {"kind": "int8", "group_size": 16, "rank": 4, "seed": 0}
LOUD = {".experts.": 20, ".router.": 20, "lm_head": 10, "embed_tokens.proj": 100}
"""Factors on the initial weights; they give experts and routers a share of the gradient, so that an error shows."""
LEARNING_RATE = {"AdamW": 1e-3, "SGD": 0.02}
MULTIPLIERS = {"router": 1.0, "adapters": 1.0, "rest": 1.0}


def tiny_config(**changes) -> LightningLMConfig:
    """Three layers (one of them sparse attention), five experts, two picks."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "num_streams": 2,
        "sinkhorn_iterations": 4,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "num_attention_heads": 2,
        "head_dim": 16,
        "indexer_num_heads": 2,
        "indexer_head_dim": 8,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "max_token_bytes": 4,
        "decay_init": "slow",
    }
    return LightningLMConfig(**values | changes)


def tiny_model(config: LightningLMConfig, ep_size: int = 1) -> LightningLMForCausalLM:
    """The model as a run builds it: on the meta device, sharded, then materialized and filled from one seed."""
    with torch.device("meta"):
        model = LightningLMForCausalLM(config)
    apply_expert_parallel(model, ep_size)
    initialize_model(model, seed=0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            for part, factor in LOUD.items():
                if part in name and tensor.is_floating_point() and "_ema" not in name:
                    tensor *= factor
    model.set_token_bytes([bytes([i]) for i in range(config.vocab_size)])
    return model


def tiny_batch(step: int) -> torch.Tensor:
    """Token ids [8, 16]: arithmetic progressions, other ones for every step."""
    generator = torch.Generator().manual_seed(7000 + step)
    start = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (GLOBAL_BATCH, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH)) % VOCABULARY


def tiny_engine(
    model, world_size, *, stage=1, accumulation=1, ep_size=1, optimizer="AdamW", clip=1.0, dtype="fp32", lr=None
):
    """The engine of a run with the JSON of `ds_configs/`, or with SGD: Adam hides a wrong scale of the gradient."""
    lr = LEARNING_RATE[optimizer] if lr is None else lr
    config = load_ds_config(
        Path(__file__).parents[2] / "ds_configs" / f"zero{stage}.json",
        micro_batch=GLOBAL_BATCH // world_size // accumulation,
        accumulation=accumulation,
        world_size=world_size,
        dtype=dtype,
        optimizer={"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01},
        gradient_clipping=clip,
        expert_parallel=ep_size,
    )
    if optimizer == "SGD":
        config["optimizer"] = {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}}
        config["zero_allow_untested_optimizer"] = True
    return build_engine(model, config, parameter_groups(model, lr=lr, weight_decay=0.01, multipliers=MULTIPLIERS))


def train_step(engine, step: int) -> float:
    """One optimizer step on the global batch of this step; returns its mean loss over all ranks."""
    accumulation, world_size = engine.gradient_accumulation_steps(), dist.get_world_size()
    shares = tiny_batch(step).chunk(world_size * accumulation)
    total = torch.zeros((), dtype=torch.float64)
    for ids in shares[dist.get_rank() * accumulation :][:accumulation]:
        output = engine(input_ids=ids, labels=ids)
        engine.backward(output.loss)
        total += output.next_token_loss.detach()
        engine.step()
    engine.module.after_optimizer_step(reduce=dist.all_reduce, update=engine.was_step_applied())
    dist.all_reduce(total)
    return float(total) / len(shares)


def train(rank, world_size, *, steps=4, ep_size=None, config=None, **engine_options):
    """
    A run from scratch.

    Returns:
        {"loss": one per step, "norm": `GradientNorm.values()` of each step}.
    """
    ep_size = world_size if ep_size is None else ep_size
    model = tiny_model(config or tiny_config(), ep_size)
    engine = tiny_engine(model, world_size, ep_size=ep_size, **engine_options)
    run = {"loss": [], "norm": []}
    for step in range(steps):
        run["loss"].append(train_step(engine, step))
        run["norm"].append(engine.gradient_norm.values())
    return run


def one_process_gradients(config: LightningLMConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(weights, gradients) by name of the first step, by plain autograd over the whole batch, without DeepSpeed."""
    model = tiny_model(config).train()
    ids = tiny_batch(0)
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    return {n: p.detach() for n, p in trained.items()}, {n: p.grad for n, p in trained.items()}


def local_rows(model, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Of a whole tensor, what this rank holds: the rows of its experts, padded with zeros, or everything."""
    if ".experts." not in name:
        return tensor
    experts = model.get_submodule(name.partition(".experts.")[0] + ".experts")
    rows = tensor.new_zeros(experts.num_local_experts, *tensor.shape[1:])
    rows[: experts.expert_count] = tensor[experts.expert_start :][: experts.expert_count]
    return rows
