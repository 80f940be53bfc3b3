"""Rotary embedding: relative positions, the interleaved formula, fp32 tables whatever the model's dtype."""

import pytest
import torch

from lightninglm.modeling.rotary import RotaryEmbedding, apply_rotary, rotary_frequencies
from tests.modeling.mixers import mixer_config


def test_rotates_interleaved_pairs_by_position_times_frequency():
    head_dim = 8
    position_ids = torch.tensor([[0, 3, 11]])
    x = torch.randn(1, 3, 2, head_dim)
    rotary = RotaryEmbedding(mixer_config(linear_num_heads=4, linear_head_dim=head_dim))
    y = apply_rotary(x, rotary(position_ids)[head_dim])
    for t, position in enumerate([0, 3, 11]):
        for j in range(head_dim // 2):
            angle = torch.tensor(position * 100_000.0 ** (-2 * j / head_dim))
            even, odd = x[0, t, :, 2 * j], x[0, t, :, 2 * j + 1]
            expected = torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1)
            torch.testing.assert_close(y[0, t, :, 2 * j : 2 * j + 2], expected)


def test_products_depend_on_the_distance_only():
    rotary = RotaryEmbedding(mixer_config())
    q, k = torch.randn(2, 1, 1, 1, 16)

    def product(query_position, key_position):
        place = torch.tensor([[query_position, key_position]])
        rotated = apply_rotary(torch.cat([q, k], dim=1), rotary(place)[16])
        return (rotated[:, 0] * rotated[:, 1]).sum()

    torch.testing.assert_close(product(7, 2), product(105, 100), rtol=1e-4, atol=1e-4)
    assert (product(7, 2) - product(7, 3)).abs() > 1e-3


def test_one_table_per_head_dim_and_none_when_off():
    position_ids = torch.arange(5).unsqueeze(0)
    tables = RotaryEmbedding(mixer_config())(position_ids)
    assert {head_dim: table[0].shape for head_dim, table in tables.items()} == {8: (1, 5, 4), 16: (1, 5, 8)}
    assert RotaryEmbedding(mixer_config(rope_enabled=False))(position_ids) == {}
    x = torch.randn(1, 5, 2, 16)
    assert apply_rotary(x, None) is x


@pytest.mark.parametrize("source", ["config", "checkpoint"])
def test_a_bf16_model_keeps_its_angles(source):
    position_ids = torch.arange(9000).unsqueeze(0)
    rotary = RotaryEmbedding(mixer_config(rope_source=source))
    before, after = rotary(position_ids)[16], rotary.bfloat16()(position_ids)[16]
    assert after[0].dtype == torch.float32
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_frequencies_from_the_config_are_not_stored_and_published_ones_are():
    assert not RotaryEmbedding(mixer_config()).state_dict()
    rotary = RotaryEmbedding(mixer_config(rope_source="checkpoint"))
    assert set(rotary.state_dict()) == {"inv_freq_8", "inv_freq_16"}
    rotary.load_state_dict({"inv_freq_8": torch.full((4,), 0.5), "inv_freq_16": torch.full((8,), 0.25)})
    cos, _ = rotary(torch.tensor([[2]]))[8]
    torch.testing.assert_close(cos, torch.full((1, 1, 4), 1.0).cos())


@pytest.mark.parametrize(("theta", "bound"), [(1e4, 0.0037), (1e5, 0.0033)])
def test_bf16_rounding_of_published_frequencies_is_as_large_as_documented(theta, bound):
    """Up to 0.37 % at theta 1e4 (D = 256), 0.33 % at 1e5 (D = 128): many radians at position 8192."""
    exact = rotary_frequencies(256 if theta == 1e4 else 128, theta)
    error = ((exact.bfloat16().float() - exact) / exact).abs().max()
    assert 0.9 * bound < error < bound * 1.05


def test_dtype_of_the_input_is_kept():
    table = RotaryEmbedding(mixer_config())(torch.arange(3).unsqueeze(0))[16]
    assert apply_rotary(torch.randn(1, 3, 2, 16, dtype=torch.bfloat16), table).dtype == torch.bfloat16
