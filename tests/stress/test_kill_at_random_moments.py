"""A stage that is killed at random moments loses no more than it may, and ends as if nobody had killed it."""

from tests.stress.kill_at_random_moments import kill_at_random_moments


def test_two_kills(tmp_path):
    assert kill_at_random_moments(tmp_path, kills=2, seed=1).kills == 2
