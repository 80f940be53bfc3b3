"""One endless, deterministic order of training sequences: which one comes at position k is a function of k alone."""

from collections.abc import Mapping
from functools import lru_cache

_MASK64 = 2**64 - 1
MAX_PERIOD = 10_000
FEISTEL_ROUNDS = 6


class GlobalOrder:
    """
    Position k -> (domain, row), for every k >= 0, with no state: a run resumes anywhere knowing one integer, and how
    many ranks share the positions changes nothing.

    sizes: sequences of each domain. mixture: share of each domain, summing to 1. seed: of the shuffles.
    domain_offsets: sequences of each domain that earlier stages have used; this order goes on behind them.

    The domains follow a fixed pattern that repeats after `period` positions and spreads each domain evenly; one
    period holds the mixture exactly (the least such period; 10,000 with rounding when there is none below). The n-th
    sequence of a domain is row `shuffle(n mod size)` with a new shuffle for each epoch `n // size`.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        mixture: Mapping[str, float],
        seed: int = 0,
        domain_offsets: Mapping[str, int] | None = None,
    ):
        for domain, weight in mixture.items():
            if domain not in sizes:
                raise ValueError(f"mixture.{domain}: no such domain, there are {', '.join(sizes)}")
            if weight != 0 and weight < 1 / MAX_PERIOD:
                raise ValueError(f"mixture.{domain} = {weight}: must be 0 or at least {1 / MAX_PERIOD}")
            if weight > 0 and sizes[domain] < 1:
                raise ValueError(f"mixture.{domain} = {weight}: the domain has no sequences")
        self.domains = [domain for domain, weight in mixture.items() if weight > 0]
        self.sizes = {domain: sizes[domain] for domain in self.domains}
        self.seed = seed
        self.domain_offsets = dict(domain_offsets or {})
        quotas = _quotas([mixture[domain] for domain in self.domains])
        self.period = sum(quotas)
        self._pattern = _even_pattern(quotas)
        self._drawn = [[0] * len(quotas)]  # per position of the pattern: draws of each domain before it
        for d in self._pattern:
            self._drawn.append([count + (i == d) for i, count in enumerate(self._drawn[-1])])

    def __getitem__(self, k: int) -> tuple[str, int]:
        """(domain, row) of the sequence at position k."""
        if k < 0:
            raise IndexError(f"position {k}: the order starts at 0")
        d = self._pattern[k % self.period]
        domain = self.domains[d]
        n = self.domain_offsets.get(domain, 0) + self._before(k, d)
        epoch, i = divmod(n, self.sizes[domain])
        return domain, shuffled(i, self.sizes[domain], _epoch_key(self.seed, domain, epoch))

    def counts(self, k: int) -> dict[str, int]:
        """Sequences of each domain at positions 0 .. k-1 (offsets not included)."""
        return {domain: self._before(k, d) for d, domain in enumerate(self.domains)}

    def offsets_after(self, k: int) -> dict[str, int]:
        """`domain_offsets` for an order that goes on where this one is at position k (unused domains kept)."""
        counts = self.counts(k)
        domains = [*self.domain_offsets, *(d for d in counts if d not in self.domain_offsets)]
        return {d: self.domain_offsets.get(d, 0) + counts.get(d, 0) for d in domains}

    def _before(self, k: int, d: int) -> int:
        periods, rest = divmod(k, self.period)
        return periods * self._drawn[-1][d] + self._drawn[rest][d]


def micro_batches(
    step: int, global_batch: int, micro_batch: int, rank: int, world_size: int, base: int = 0
) -> list[range]:
    """
    Positions that one rank reads in optimizer step `step` (from 0), one range per micro-batch.

    The step owns positions base + step * global_batch + [0, global_batch); the ranks take them in turns, a
    micro-batch each. Raises ValueError when micro_batch * world_size does not divide global_batch.
    """
    if global_batch % (micro_batch * world_size):
        raise ValueError(
            f"global_batch = {global_batch}: must be a multiple of micro_batch * ranks = {micro_batch} * {world_size}"
        )
    first = base + step * global_batch
    starts = range(first + rank * micro_batch, first + global_batch, micro_batch * world_size)
    return [range(start, start + micro_batch) for start in starts]


def shuffled(i: int, size: int, key: int) -> int:
    """
    Image of i under a pseudo-random permutation of 0 .. size-1 chosen by `key`, in constant time and memory.

    A Feistel network permutes the numbers of an even bit width; images beyond `size` are permuted again until they
    fall inside (cycle walking), which keeps the map one-to-one.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for r in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(key + (r << half) + right) & mask)
        i = left << half | right
        if i < size:
            return i


def _mix(x: int) -> int:
    """The finalizer of splitmix64: 64 bits in, 64 well-mixed bits out."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=1024)
def _epoch_key(seed: int, domain: str, epoch: int) -> int:
    key = _mix(seed & _MASK64)
    for byte in domain.encode():
        key = _mix(key ^ byte)
    return _mix(key ^ (epoch & _MASK64))


def _quotas(weights: list[float]) -> list[int]:
    """Whole numbers in the proportions of the weights, with the least sum up to MAX_PERIOD that is exact to 1e-6."""
    total = sum(weights)
    if abs(total - 1) > 1e-6:
        raise ValueError(f"mixture sums to {total:g}: must sum to 1")
    for period in range(1, MAX_PERIOD + 1):
        quotas = [round(weight * period) for weight in weights]
        errors = (abs(quota / period - weight) for quota, weight in zip(quotas, weights, strict=True))
        if sum(quotas) == period and 0 not in quotas and max(errors) < 1e-6:
            return quotas
    quotas = [int(weight * MAX_PERIOD) for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: quotas[i] - weights[i] * MAX_PERIOD)
    for i in by_remainder[: MAX_PERIOD - sum(quotas)]:
        quotas[i] += 1
    return quotas


def _even_pattern(quotas: list[int]) -> list[int]:
    """One period of domain indices, domain d `quotas[d]` times, each always the one furthest behind its share."""
    period, credit, pattern = sum(quotas), [0] * len(quotas), []
    for _ in range(period):
        credit = [c + q for c, q in zip(credit, quotas, strict=True)]
        chosen = max(range(len(quotas)), key=credit.__getitem__)
        credit[chosen] -= period
        pattern.append(chosen)
    return pattern
