"""The gradient norm on any number of ranks is that of one process, and the clip and the skipped step follow from it."""

import functools

import pytest
import torch
import torch.distributed as dist

from lightninglm.modeling.parameter_roles import role
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny import (
    INT8,
    LEARNING_RATE,
    local_rows,
    one_process_gradients,
    tiny_config,
    tiny_engine,
    tiny_model,
    train,
    train_step,
)

CLIP = 1.0


@functools.cache
def expected_norms(quantized: bool) -> dict[str, float]:
    """By plain autograd in one process: per role, and in total."""
    _, gradients = one_process_gradients(tiny_config(expert_quantization=INT8 if quantized else None))
    squares = {"total": 0.0}
    for name, gradient in gradients.items():
        square = float(gradient.double().square().sum())
        squares[role(name)] = squares.get(role(name), 0.0) + square
        squares["total"] += square
    return {name: square**0.5 for name, square in squares.items()}


@pytest.mark.parametrize(
    ("stage", "world_size", "ep_size", "quantized"),
    [(stage, *ranks, False) for stage in (0, 1, 2) for ranks in ((1, 1), (2, 2), (4, 4), (4, 2))]
    + [(0, 2, 2, True), (1, 2, 2, True), (2, 4, 2, True)],
)
def test_the_norm_is_that_of_one_process_on_every_rank(stage, world_size, ep_size, quantized):
    config = tiny_config(expert_quantization=INT8 if quantized else None)
    runs = run_ranks(functools.partial(train, stage=stage, ep_size=ep_size, config=config, steps=1), world_size)
    expected = expected_norms(quantized)
    assert expected["total"] > CLIP
    assert set(expected) == {"total", "router", "rest"} | ({"adapters"} if quantized else set())
    assert runs[0]["norm"][0] == pytest.approx(expected, rel=1e-6)
    assert all(run["norm"] == runs[0]["norm"] for run in runs)


@pytest.mark.parametrize("clip", [CLIP, 0.0, 1e6], ids=["clipped", "off", "above the norm"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_clipped_step_is_the_one_of_one_process(stage, clip):
    """Plain SGD: w - lr * g * min(1, clip / norm), on dense weights and on every rank's experts."""
    weights, gradients = one_process_gradients(tiny_config())
    factor = min(1.0, clip / expected_norms(False)["total"]) if clip else 1.0

    def step(rank, world_size):
        model = tiny_model(tiny_config(), world_size)
        engine = tiny_engine(model, world_size, stage=stage, ep_size=world_size, optimizer="SGD", clip=clip)
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = 0.0
        train_step(engine, 0)
        assert float(engine.get_global_grad_norm()) == pytest.approx(expected_norms(False)["total"], rel=1e-6)
        for name, parameter in model.named_parameters():
            if name in gradients:
                moved = local_rows(model, name, gradients[name]) * (LEARNING_RATE["SGD"] * factor)
                torch.testing.assert_close(
                    parameter.detach(), local_rows(model, name, weights[name]) - moved, rtol=1e-6, atol=2e-7, msg=name
                )

    run_ranks(step, 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(stage):
    def run(rank, world_size):
        model = tiny_model(tiny_config(), world_size)
        engine = tiny_engine(model, world_size, stage=stage, ep_size=world_size)
        train_step(engine, 0)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        biases = {name: buffer.clone() for name, buffer in model.named_buffers() if "bias" in name}
        poison = model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan")) if rank == 1 else None
        train_step(engine, 1)
        if poison:
            poison.remove()
        assert engine.skipped_steps == 1
        assert not engine.was_step_applied()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]), name
        for name, bias in biases.items():
            assert torch.equal(model.get_buffer(name), bias), name
        loss = train_step(engine, 1)
        assert engine.skipped_steps == 1
        assert engine.was_step_applied()
        assert engine.gradient_norm.values()["total"] > 0
        return loss

    losses = run_ranks(run, 2)
    assert losses[0] == losses[1]
    assert torch.isfinite(torch.tensor(losses[0]))


def test_one_collective_measures_all_roles():
    def run(rank, world_size):
        engine = tiny_engine(tiny_model(tiny_config(), world_size), world_size, ep_size=world_size)
        calls, all_reduce = [], dist.all_reduce
        dist.all_reduce = lambda tensor, *args, **kwargs: calls.append(tensor) or all_reduce(tensor, *args, **kwargs)
        engine.gradient_norm._step = lambda: None
        train_step(engine, 0)
        dist.all_reduce = all_reduce
        return sum(tensor is engine.gradient_norm._squares for tensor in calls), sorted(engine.gradient_norm.values())

    for calls, names in run_ranks(run, 2):
        assert calls == 1
        assert names == ["rest", "router", "total"]
