"""Learning-rate schedules against their closed forms at every boundary."""

import math
from types import SimpleNamespace

import pytest

from lightninglm.training.schedule import learning_rate_factor, new_tensor_factor, ramped_step_sizes


def schedule(**changes):
    values = {"kind": "cosine", "warmup_steps": 10, "warmup_from": 0.0, "stable_fraction": 0.5, "final_ratio": 0.1}
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak_on_its_last_step(kind):
    factors = [learning_rate_factor(step, 100, schedule(kind=kind)) for step in range(10)]
    assert factors == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_warm_up_starts_from_the_given_fraction():
    first = learning_rate_factor(0, 100, schedule(warmup_from=0.2))
    assert first == pytest.approx(0.2 + 0.8 / 10)
    assert learning_rate_factor(9, 100, schedule(warmup_from=0.2)) == 1


def test_cosine_ends_at_the_final_ratio_and_is_halfway_in_the_middle():
    assert learning_rate_factor(109, 110, schedule()) == pytest.approx(0.1)
    assert learning_rate_factor(59, 110, schedule()) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))


def test_wsd_is_stable_until_its_fraction_then_falls_linearly():
    wsd = schedule(kind="wsd")
    assert {learning_rate_factor(step, 100, wsd) for step in range(10, 50)} == {1.0}
    assert learning_rate_factor(50, 100, wsd) == pytest.approx(1 - 0.9 / 50)
    assert learning_rate_factor(74, 100, wsd) == pytest.approx(1 - 0.9 / 2)
    assert learning_rate_factor(99, 100, wsd) == pytest.approx(0.1)


def test_constant_stays_at_the_peak():
    assert {learning_rate_factor(step, 100, schedule(kind="constant")) for step in range(10, 100)} == {1.0}


def test_no_warm_up_starts_at_the_peak():
    assert learning_rate_factor(0, 100, schedule(kind="constant", warmup_steps=0)) == 1.0


def test_new_tensors_warm_up_on_their_own():
    assert [new_tensor_factor(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert new_tensor_factor(0, 0) == 1


def test_step_sizes_ramp_linearly_and_stay_at_their_target():
    ramp = {"from": [0.125, 0.0], "to": [0.125, 0.25], "steps": 5}
    assert ramped_step_sizes(0, None) is None
    assert ramped_step_sizes(0, ramp) == pytest.approx([0.125, 0.05])
    assert ramped_step_sizes(4, ramp) == ramped_step_sizes(400, ramp) == [0.125, 0.25]


@pytest.mark.parametrize("last", [0.0, 0.25, 1.0, 3.0])
def test_warm_up_from_the_last_rate_is_linear_whether_it_rises_or_falls(last):
    factors = [learning_rate_factor(step, 100, schedule(warmup_from="last"), last) for step in range(10)]
    assert factors == pytest.approx([last + (1 - last) * (step + 1) / 10 for step in range(10)])


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("total", [8, 50])
def test_every_step_is_on_the_closed_form(kind, warmup, total):
    """The schedule as three functions of the step, written down a second time."""
    decay_start = max(warmup, round(0.5 * total)) if kind == "wsd" else warmup
    for step in range(total):
        factor = learning_rate_factor(step, total, schedule(kind=kind, warmup_steps=warmup, warmup_from=0.3))
        done = (step + 1 - decay_start) / (total - decay_start)
        if step < warmup:
            expected = 0.3 + 0.7 * (step + 1) / warmup
        elif kind == "constant" or done <= 0:
            expected = 1.0
        else:
            expected = 1 - 0.9 * done if kind == "wsd" else 0.55 + 0.45 * math.cos(math.pi * done)
        assert factor == pytest.approx(expected, abs=1e-12), step
