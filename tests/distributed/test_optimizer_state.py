"""Master copies and moments, read from and written to DeepSpeed's partitions, against what Adam computes."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from ranks import RankFailed, run_ranks
from tiny import tiny_config, tiny_engine, tiny_model, train_step

from lightninglm.distributed.optimizer_state import MOMENTS, OptimizerState

KEYS = ("master", *MOMENTS)


def build(world_size, ep_size=1, **options):
    model = tiny_model(tiny_config(num_hidden_layers=1, layer_types=["indexed_attention"]), ep_size)
    return tiny_engine(model, world_size, ep_size=ep_size, **options)


def state_of_run(rank, world_size, ep_size, options):
    """The optimizer's state after two steps, each tensor on the rank that gathers it, and Adam's step."""
    engine = build(world_size, ep_size, **options)
    for step in range(2):
        train_step(engine, step)
    state = OptimizerState(engine)
    found = {}
    for name, param in engine.module.named_parameters():
        destination = 0
        if not getattr(param, "allreduce", True):
            destination = dist.get_global_rank(groups._get_expert_data_parallel_group(param.group_name), 0)
        for key in KEYS:
            value = state.gather(param, key, destination)
            if value is not None:
                found[name, key] = value.clone()
    return found, state.adam_step


@pytest.fixture(scope="module")
def unpartitioned():
    return run_ranks(state_of_run, 1, 1, {"stage": 0})[0]


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_gathered_state_is_that_of_an_unpartitioned_run(unpartitioned, stage, ep_size):
    expected, step = unpartitioned
    assert step == 2
    results = run_ranks(state_of_run, 2, ep_size, {"stage": stage})
    found = {}
    for rank, (part, adam_step) in enumerate(results):
        assert adam_step == 2
        for (name, key), value in part.items():
            found.setdefault((name, key), {})[rank] = value
    assert found.keys() == expected.keys()
    for key, parts in found.items():
        whole = torch.cat([parts[rank] for rank in sorted(parts)])[: len(expected[key])] if len(parts) > 1 else parts[0]
        torch.testing.assert_close(whole, expected[key], rtol=1e-3, atol=1e-5)


def test_reading_before_the_first_step_gives_zeros_and_step_0():
    def run(rank, world_size):
        engine = build(world_size, stage=1)
        state = OptimizerState(engine)
        moments = [state.gather(p, key, 0) for p in engine.module.parameters() for key in MOMENTS]
        got = [moment for moment in moments if moment is not None]
        return state.adam_step, len(got), any(bool(moment.any()) for moment in got)

    (step, count, nonzero), (_, none, _) = run_ranks(run, 2)
    assert step == 0 and count > 0 and none == 0 and not nonzero


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_written_is_read_back_signed_zeros_too_and_the_next_step_uses_it(stage):
    def run(rank, world_size):
        engine = build(world_size, stage=stage)
        state = OptimizerState(engine)
        state.create(adam_step=10)
        generator = torch.Generator().manual_seed(0)
        wanted = {}
        for name, param in engine.module.named_parameters():
            for key in KEYS:
                value = torch.rand(param.shape, generator=generator).view(-1)
                value[::3] = -0.0
                start, fragment = state.fragment(param, key)
                if fragment is not None:
                    fragment.copy_(value[start : start + fragment.numel()])
                wanted[name, key] = value.view(param.shape)
        state.publish()
        for name, param in engine.module.named_parameters():
            assert torch.equal(param, wanted[name, "master"])
            for key in KEYS:
                read = state.gather(param, key, destination=1)
                assert (read is None) == (rank != 1)
                if read is not None:
                    assert torch.equal(read.view(torch.int32), wanted[name, key].view(torch.int32))
        train_step(engine, 0)
        return state.adam_step

    assert run_ranks(run, 2) == [11.0, 11.0]


def test_buffers_and_frozen_parameters_have_no_state():
    def run(rank, world_size):
        model = tiny_model(tiny_config())
        model.lm_head.weight.requires_grad_(False)
        engine = tiny_engine(model, world_size, stage=1)
        state = OptimizerState(engine)
        return [state.trains(t) for t in (model.lm_head.weight, model.model.step_size, model.model.norm.weight)]

    assert run_ranks(run, 1) == [[False, False, True]]


def test_an_optimizer_without_moments_is_refused():
    def run(rank, world_size):
        OptimizerState(build(world_size, stage=1, optimizer="SGD"))

    with pytest.raises(RankFailed, match="SGD: only Adam"):
        run_ranks(run, 1)
