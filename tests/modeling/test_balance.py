"""Load balancing: the rules by hand, and biases that move with the optimizer step alone."""

import pytest
import torch

from lightninglm.modeling.balance import banded_rule, sign_rule, update_bias
from lightninglm.modeling.router import build_router
from tests.modeling.mixers import H
from tests.modeling.moe_configs import grouped_config, moe_config

RULE = {"rule": "sign", "speed": 0.25, "band": (0.5, 2.0), "gain": 50.0}


def test_sign_rule_moves_every_entry_by_the_speed():
    counts = torch.tensor([5, 2, 3, 2, 3])  # uniform is 3 of 15
    torch.testing.assert_close(sign_rule(counts, 0.5), torch.tensor([-0.5, 0.5, 0.0, 0.5, 0.0]))


def test_sign_rule_is_exact_where_floats_are_not():
    share = 2**40 + 1  # the load of each entry, off by one pick in the first two
    counts = torch.tensor([share + 1, share - 1, share])
    torch.testing.assert_close(sign_rule(counts, 1.0), torch.tensor([-1.0, 1.0, 0.0]))


def test_banded_rule_by_hand():
    usage = torch.tensor([0.05, 0.2, 0.25, 0.3, 0.9])  # of n = 5: lo = 0.1, hi = 0.4
    change = banded_rule(usage, speed=0.01, band=(0.5, 2.0), gain=4.0)
    below = 0.01 * (1 + 4 * 0.5**2)
    above = -0.01 * (1 + 4 * 1.25**2)
    torch.testing.assert_close(change, torch.tensor([below, 0.0, -0.01, -0.01, above]))


def test_banded_rule_is_bounded():
    change = banded_rule(torch.tensor([0.0, 1.0]), speed=0.01, band=(0.5, 1.5), gain=1000.0)
    torch.testing.assert_close(change, torch.tensor([0.2, -0.2]))


def test_banded_update_uses_the_running_load():
    bias, usage = torch.zeros(2), torch.tensor([0.5, 0.5])
    update_bias(bias, usage, torch.tensor([3, 1]), **RULE | {"rule": "banded"})
    torch.testing.assert_close(usage, torch.tensor([0.99 * 0.5 + 0.01 * 0.75, 0.99 * 0.5 + 0.01 * 0.25]))
    torch.testing.assert_close(bias, torch.tensor([-0.25, 0.25]))


def test_biases_keep_a_mean_of_zero():
    bias, usage = torch.tensor([1.0, -1.0, 0.0]), torch.full((3,), 1 / 3)
    update_bias(bias, usage, torch.tensor([6, 0, 0]), **RULE)
    torch.testing.assert_close(bias, torch.tensor([0.75, -0.75, 0.25]) - 0.25 / 3)
    uncentered = torch.zeros(3)
    update_bias(uncentered, usage, torch.tensor([6, 0, 0]), center=False, **RULE)
    torch.testing.assert_close(uncentered, torch.tensor([-0.25, 0.25, 0.25]))


def test_a_step_without_picks_changes_nothing():
    bias, usage = torch.tensor([0.5, -0.5]), torch.tensor([0.75, 0.25])
    for rule in ("sign", "banded"):
        update_bias(bias, usage, torch.zeros(2, dtype=torch.int64), **RULE | {"rule": rule})
    assert bias.tolist() == [0.5, -0.5] and usage.tolist() == [0.75, 0.25]


def test_groups_and_members_move_by_their_own_loads():
    router = build_router(grouped_config(groups=2, members=3, members_per_group=2, balance_speed=0.25))
    # group 0: 120 picks, members 60, 40, 20; group 1: 12 picks, too few (16 per member are needed) to move its members
    router.pick_counts.copy_(torch.tensor([60, 40, 20, 12, 0, 0]))
    router.after_optimizer_step(update=True)
    torch.testing.assert_close(router.group_bias, torch.tensor([-0.25, 0.25]))
    torch.testing.assert_close(router.member_bias, torch.tensor([[-0.25, 0.0, 0.25], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(router.member_usage_ema[1], torch.full((3,), 1 / 3))
    assert router.pick_counts.sum() == 0


@pytest.mark.parametrize("balance", ["sign", "banded"])
@pytest.mark.parametrize("make_config", [moe_config, grouped_config])
def test_one_update_per_step_whatever_the_micro_batches_and_ranks(make_config, balance):
    x = torch.randn(64, H, generator=torch.Generator().manual_seed(0))

    def one_step(parts, ranks):
        torch.manual_seed(0)
        routers = [build_router(make_config(balance=balance)) for _ in range(ranks)]
        for router in routers:
            router.load_state_dict(routers[0].state_dict())
        for i, part in enumerate(x.chunk(parts * ranks)):
            routers[i % ranks](part, None, record_statistics=True)
        total = sum(router.statistics()[0] for router in routers)
        for router in routers:
            router.statistics()[0].copy_(total)
            router.after_optimizer_step(update=True)
        return [router.state_dict() for router in routers]

    reference = one_step(parts=1, ranks=1)[0]
    assert any(name.endswith("bias") and tensor.abs().sum() > 0 for name, tensor in reference.items())
    for states in (one_step(4, 1), one_step(1, 2), one_step(4, 2)):
        for state in states:
            for name, tensor in reference.items():
                assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("make_config", [moe_config, grouped_config])
def test_evaluation_recompute_and_skipped_steps_leave_no_trace(make_config):
    router = build_router(make_config())
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    x = torch.randn(16, H)
    router(x, None, record_statistics=False)
    assert router.pick_counts.sum() == 0
    router(x, None, record_statistics=True)
    router.after_optimizer_step(update=False)
    assert router.pick_counts.sum() == 0
    for name, tensor in router.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_padding_is_not_counted():
    router = build_router(moe_config())
    keep = torch.arange(16) < 10
    x = torch.randn(16, H)
    routing = router(x, keep, record_statistics=True)
    expected = torch.bincount(routing.experts[keep].flatten(), minlength=8)
    assert torch.equal(router.pick_counts, expected)


def test_balancing_evens_out_a_skewed_load():
    torch.manual_seed(0)
    router = build_router(moe_config(balance_speed=0.002))
    x = torch.randn(256, H) + 1
    router.weight.data[0] += 0.1  # expert 0 is everybody's first choice

    def step():
        router(x, None, record_statistics=True)
        counts = router.pick_counts.clone()
        router.after_optimizer_step(update=True)
        return counts

    first = step()
    for _ in range(400):
        last = step()
    uniform = first.sum() / 8
    assert first.max() > 3 * uniform
    assert last.max() < 1.3 * uniform and last.min() > 0.7 * uniform
