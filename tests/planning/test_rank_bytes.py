"""Weights, gradients and optimizer state of a rank are as planned, on real DeepSpeed ranks."""

from pathlib import Path

import pytest
import torch

from lightninglm.checkpoint import CheckpointReader
from lightninglm.distributed.checkpointing import save_checkpoint
from lightninglm.distributed.ds_config import load_ds_config
from lightninglm.distributed.optimizer_state import OptimizerState
from lightninglm.planning.memory import checkpoint_bytes, rank_bytes
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny import INT8, tiny_batch, tiny_config, tiny_engine, tiny_model

CASES = [(0, "fp32"), (1, "bf16"), (2, "bf16")]
DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"


def planned(config, stage, dtype, world_size, ep_size):
    ds_config = load_ds_config(
        DS_CONFIGS / f"zero{stage}.json", micro_batch=2, accumulation=2, world_size=world_size, dtype=dtype,
        optimizer={"lr": 1.0, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}, gradient_clipping=1.0,
        expert_parallel=ep_size,
    )  # fmt: skip
    return rank_bytes(config, ds_config, world_size=world_size, expert_parallel=ep_size, dtype=dtype)


def gradient_bytes(engine):
    """What holds gradients between two micro-batches: those of the parameters, and the optimizer's own."""
    own = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    own += getattr(engine.optimizer, "fp32_groups_actual_gradients_flat", [])
    own += [group.flat_partition for group in getattr(engine.optimizer, "averaged_gradients", {}).values()]
    return sum(tensor.nbytes for tensor in own)


@pytest.mark.parametrize("quantization", [None, INT8], ids=["moe", "int8"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_ranks_hold_what_was_planned(ep_size, quantization):
    config = tiny_config(expert_quantization=quantization, num_nextn_predict_layers=1)

    def run(rank, world_size):
        found = []
        for stage, dtype in CASES:
            engine = tiny_engine(
                tiny_model(config, ep_size), world_size, stage=stage, accumulation=2, ep_size=ep_size, dtype=dtype
            )
            ids = tiny_batch(0)[2 * rank : 2 * rank + 2]
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            gradients = gradient_bytes(engine)
            state = OptimizerState(engine)
            state.create(adam_step=0)
            parameters = {p: None for p in engine.module.parameters() if state.trains(p)}
            optimizer = [state.fragment(p, key)[1] for p in parameters for key in ("master", "exp_avg", "exp_avg_sq")]
            weights = [*engine.module.state_dict().values(), engine.module.model.embed_tokens.token_bytes]
            weights.append(engine.module.model.embed_tokens.token_lengths)
            pointers = {tensor.data_ptr() for tensor in weights}  # without ZeRO a weight is its own master copy
            found.append(
                {
                    "weights": sum(tensor.nbytes for tensor in weights),
                    "gradients": gradients,
                    "optimizer": sum(t.nbytes for t in optimizer if t is not None and t.data_ptr() not in pointers),
                    "groups": len(engine.optimizer.param_groups),
                }
            )
        return found

    ranks = run_ranks(run, 2)
    for (stage, dtype), *found in zip(CASES, *ranks, strict=True):
        plan = planned(config, stage, dtype, 2, ep_size)
        alignment = 4 * 2 * 2 * found[0]["groups"]  # at most 2 * ranks elements in every group
        for measured in found:
            assert measured["weights"] == plan.weights + plan.quantized_base + plan.adapters
            assert 0 <= measured["gradients"] - plan.gradients <= (alignment if stage == 2 else 0)
        total = sum(measured["optimizer"] for measured in found)
        assert 0 <= 2 * plan.optimizer - total <= 2 * 4, (stage, total)
        assert (plan.communication > 0) == (stage == 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_has_the_planned_bytes(tmp_path, dtype):
    config = tiny_config(expert_quantization=INT8)

    def run(rank, world_size):
        engine = tiny_engine(tiny_model(config, 2), world_size, ep_size=2, dtype=dtype)
        OptimizerState(engine).create(adam_step=0)
        save_checkpoint(engine, tmp_path / "step-00000001", {"format": 1})

    run_ranks(run, 2)
    with CheckpointReader(tmp_path / "step-00000001") as reader:
        infos = [*reader.weights.values(), *reader.optimizer.values()]
        stored = sum(torch.Size(info.shape).numel() * info.dtype.itemsize for info in infos)
        weights = sum(torch.Size(info.shape).numel() * info.dtype.itemsize for info in reader.weights.values())
    assert stored == checkpoint_bytes(config, dtype)
    assert weights == checkpoint_bytes(config, dtype, moments=False)
