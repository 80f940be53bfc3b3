"""Noise on the selection scores of a router, so that experts are sampled: a pure function of token, layer and expert.

The top K of s + tau * Gumbel noise are K draws without replacement from softmax(s / tau) (Kool et al., 2019). Nothing
comes from a generator: the number of a token in the run and the number of an expert are hashed. So the picks do not
depend on how the batch is spread over ranks, and a recompute in the backward pass repeats them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SelectionNoise:
    """
    The noise of one micro-batch.

    Attributes:
        tokens: [T] int64, the number of each token in the run, counted over the global order of sequences.
        temperature: tau > 0, in units of the selection score.
        key: hash of the seed; with `for_layer`, of the layer, too.
    """

    tokens: torch.Tensor
    temperature: float
    key: int

    @classmethod
    def of_sequences(cls, rows: torch.Tensor, length: int, temperature: float, seed: int) -> SelectionNoise:
        """For the sequences with numbers rows [B] int64 in the global order, each of `length` tokens."""
        tokens = rows[:, None] * length + torch.arange(length, device=rows.device)
        return cls(tokens.flatten(), temperature, _mix_int(seed & _MASK64))

    def for_layer(self, layer: int) -> SelectionNoise:
        """The noise of one layer's router."""
        return replace(self, key=_mix_int(self.key + layer & _MASK64))

    def draw(self, slots: torch.Tensor) -> torch.Tensor:
        """
        tau * Gumbel(0, 1) for every token and slot, fp32 [T, ...].

        slots: int64 [n], the same for all tokens, or [T, ...].
        """
        per_token = _mix(self.tokens ^ _signed(self.key))
        hashed = _mix(per_token.view(-1, *[1] * max(1, slots.dim() - 1)) + slots)
        uniform = (_shift_right(hashed, 12).double() + 0.5) * 2.0**-52
        return (-self.temperature * (-uniform.log()).log()).float()  # in fp64: the last bit of fp32 is then the same


def sampling_temperature(step: int, steps: int, temperature: float) -> float:
    """tau for optimizer step `step` (0-based): falls linearly from `temperature`, 0 from step `steps` on."""
    return temperature * max(0.0, 1 - step / steps)


def _mix_int(x: int) -> int:
    """The finalizer of splitmix64 (Steele et al., 2014) on a Python integer."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`_mix_int` elementwise; int64 arithmetic wraps around."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64 >> keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    return x - (1 << 64) if x >> 63 else x
