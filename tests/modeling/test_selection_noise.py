"""Sampled selection: the law of the noise, the same picks on any ranks and in a recompute, off in evaluation."""

import pytest
import torch
import torch.distributed as dist

from lightninglm.modeling.router import FlatRouter, GroupedRouter, build_router
from lightninglm.modeling.selection_noise import SelectionNoise, _mix, _mix_int, _signed, sampling_temperature
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny import LENGTH, tiny_batch, tiny_config, tiny_model
from tests.modeling.mixers import H
from tests.modeling.moe_configs import grouped_config, moe_config


def noise(rows=range(64), length=16, temperature=0.5, seed=0, layer=0):
    return SelectionNoise.of_sequences(torch.tensor(rows), length, temperature, seed).for_layer(layer)


def test_tensors_are_hashed_like_integers():
    values = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    hashed = _mix(torch.tensor([_signed(value) for value in values]))
    assert hashed.tolist() == [_signed(_mix_int(value)) for value in values]
    assert _mix_int(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 with seed 0


def test_the_noise_is_gumbel_and_independent_between_tokens_slots_and_layers():
    drawn = noise(temperature=2.0).draw(torch.arange(64)) / 2.0
    assert drawn.dtype == torch.float32 and drawn.shape == (1024, 64)
    points = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    quantiles = torch.quantile(drawn.flatten()[::3].double(), points)
    torch.testing.assert_close(quantiles, -(-points.log()).log(), atol=0.05, rtol=0)
    others = {
        "tokens": drawn.roll(1, 0),
        "slots": drawn.roll(1, 1),
        "layers": noise(temperature=1.0, layer=1).draw(torch.arange(64)),
        "seeds": noise(temperature=1.0, seed=1).draw(torch.arange(64)),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack((drawn.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 0.02, name


def test_top_k_of_noisy_scores_samples_from_the_softmax():
    scores, temperature = torch.tensor([0.5, 0.3, 0.1, 0.0]), 0.2
    first = (scores + noise(range(2048), temperature=temperature).draw(torch.arange(4))).argmax(-1)
    shares = torch.bincount(first, minlength=4) / len(first)
    torch.testing.assert_close(shares, (scores / temperature).softmax(-1), atol=0.01, rtol=0)


def initialized(router):
    generator = torch.Generator().manual_seed(0)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return router


def test_the_temperature_falls_to_zero():
    assert [sampling_temperature(step, 4, 0.5) for step in (0, 1, 2, 3, 4, 5)] == [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]


@pytest.mark.parametrize("make_config", [moe_config, grouped_config])
def test_noise_changes_the_picks_and_not_how_they_are_weighed(make_config):
    router = initialized(build_router(make_config()))
    x = torch.randn(1024, H, generator=torch.Generator().manual_seed(0))
    plain, noisy = router(x, None, False), router(x, None, False, noise())
    changed = (plain.experts.sort(-1).values != noisy.experts.sort(-1).values).any(-1)
    assert 0.5 < changed.float().mean() < 1
    torch.testing.assert_close(noisy.weights[~changed].sort(-1).values, plain.weights[~changed].sort(-1).values)
    torch.testing.assert_close(noisy.weights.sum(-1), torch.ones(1024, dtype=torch.float64))


def test_early_on_every_expert_of_a_router_of_clones_gets_tokens():
    flat = initialized(FlatRouter(moe_config(num_experts=64)))
    grouped = initialized(GroupedRouter(grouped_config()))
    with torch.no_grad():
        flat.weight.copy_(flat.weight[:1].expand_as(flat.weight))  # equal scores: ties go to the first experts
        grouped.member.weight.zero_()
        grouped.group.weight.copy_(grouped.group.weight[:1].expand_as(grouped.group.weight))
    x = torch.randn(1024, H)
    for router, top in ((flat, 2), (grouped, 6)):
        assert len(router(x, None, False).experts.unique()) == top
        counts = torch.bincount(router(x, None, False, noise(temperature=0.1)).experts.flatten())
        assert len(counts) == router.num_experts and counts.min() > 0.4 * counts.float().mean()


def picks_and_gradients(rank, world_size, backend, seen):
    """Each rank runs its rows of the batch; returns the picks of the whole batch by layer, and the summed gradients."""
    model = tiny_model(tiny_config(stack_backend=backend, num_nextn_predict_layers=1)).train()
    rows = torch.arange(8).chunk(world_size)[rank]
    model.model.selection_noise = SelectionNoise.of_sequences(rows, LENGTH, 0.1, seed=3)
    picks = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(lambda m, a, out, name=name: picks.setdefault(name, []).append(out.experts))
    ids = tiny_batch(0)[rows]
    model(input_ids=ids, labels=ids).loss.backward()
    for times in picks.values():
        assert len(times) == seen[0] or len(times) == seen[1]
        assert all(torch.equal(times[0], again) for again in times)  # in the recompute, too
    whole = {}
    for name, times in picks.items():
        parts = [torch.empty_like(times[0]) for _ in range(world_size)]
        dist.all_gather(parts, times[0])
        whole[name] = torch.cat(parts)
    return whole, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_picks_are_the_same_on_one_and_two_ranks_and_in_the_recompute():
    (one, rebuilt), *_ = run_ranks(picks_and_gradients, 1, "reversible", (2, 2))
    (two, _), *_ = run_ranks(picks_and_gradients, 2, "reversible", (2, 2))
    (_, stored), *_ = run_ranks(picks_and_gradients, 1, "stored", (1, 2))
    assert one.keys() == two.keys() and len(one) == 4
    for name in one:
        assert torch.equal(one[name], two[name]), name
    for name in stored:
        assert torch.equal(rebuilt[name], stored[name]), name


def test_evaluation_has_no_noise():
    model = tiny_model(tiny_config()).eval()
    ids = tiny_batch(0)
    plain = model(input_ids=ids).logits
    model.model.selection_noise = SelectionNoise.of_sequences(torch.arange(8), LENGTH, 10.0, seed=3)
    assert torch.equal(model(input_ids=ids).logits, plain)
    assert not torch.equal(model.train()(input_ids=ids).logits, plain)
