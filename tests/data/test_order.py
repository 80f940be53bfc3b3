"""The global order is a pure function of the position, exact in its mixture and fair to every row."""

from collections import Counter

import pytest

from lightninglm.data.order import GlobalOrder, micro_batches, shuffled

SIZES = {"code": 17, "english": 40, "hindi": 5}
MIXTURE = {"code": 0.5, "english": 0.3, "hindi": 0.2}


def test_every_period_holds_the_mixture_exactly():
    order = GlobalOrder(SIZES, MIXTURE)
    assert order.period == 10
    for start in range(0, 200, 10):
        drawn = Counter(order[k][0] for k in range(start, start + 10))
        assert drawn == {"code": 5, "english": 3, "hindi": 2}


@pytest.mark.parametrize(
    "mixture",
    [
        {"a": 0.42, "b": 0.30, "c": 0.13, "d": 0.07, "e": 0.08},
        {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3},
        {"a": 0.90909, "b": 0.09091},
        {"a": 0.123456, "b": 0.876544},
    ],
)
def test_every_window_is_within_two_sequences_of_the_mixture(mixture):
    order = GlobalOrder(dict.fromkeys(mixture, 100), mixture)
    assert order.period <= 10_000
    for window in (8, 64, 500):
        for start in range(0, 300, 7):
            drawn = Counter(order[k][0] for k in range(start, start + window))
            assert all(abs(drawn[d] - w * window) < 2 for d, w in mixture.items())


def test_every_row_comes_once_in_each_epoch_and_epochs_differ():
    order = GlobalOrder(SIZES, MIXTURE, seed=3)
    rows = {domain: [] for domain in SIZES}
    for k in range(2000):
        domain, row = order[k]
        rows[domain].append(row)
    for domain, size in SIZES.items():
        epochs = [rows[domain][start : start + size] for start in range(0, len(rows[domain]) - size + 1, size)]
        assert len(epochs) > 3
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > len(epochs) / 2  # of 120 permutations when there are 5 rows


def test_counts_are_what_was_drawn():
    order = GlobalOrder(SIZES, MIXTURE)
    drawn = Counter()
    for k in range(300):
        assert order.counts(k) == {domain: drawn[domain] for domain in SIZES}
        drawn[order[k][0]] += 1


def test_lookup_does_not_depend_on_what_was_looked_up_before():
    in_order = [GlobalOrder(SIZES, MIXTURE, seed=1)[k] for k in range(100)]
    order = GlobalOrder(SIZES, MIXTURE, seed=1)
    assert [order[k] for k in reversed(range(100))][::-1] == in_order
    assert order[10**15] == GlobalOrder(SIZES, MIXTURE, seed=1)[10**15]


def test_a_later_stage_with_another_mixture_goes_on_behind_the_rows_already_used():
    first = GlobalOrder(SIZES, MIXTURE, seed=2)
    used = Counter(first[k] for k in range(60))
    offsets = first.offsets_after(60)
    assert offsets == {"code": 30, "english": 18, "hindi": 12}
    second = GlobalOrder(SIZES, {"code": 0.1, "english": 0.9}, seed=2, domain_offsets=offsets)
    english = [second[k][1] for k in range(100) if second[k][0] == "english"][: 40 - 18]
    assert not {("english", row) for row in english} & set(used)
    assert {row for domain, row in used if domain == "english"} | set(english) == set(range(40))
    assert second.offsets_after(10) == {"code": 31, "english": 27, "hindi": 12}


def test_seeds_and_domains_shuffle_differently():
    def rows(seed, domain):
        order = GlobalOrder({domain: 50}, {domain: 1.0}, seed=seed)
        return [order[k][1] for k in range(50)]

    assert rows(0, "a") != rows(1, "a") != rows(0, "b") != rows(0, "a")
    assert rows(0, "a") == rows(0, "a")


@pytest.mark.parametrize("size", [*range(1, 70), 1000, 4097])
def test_shuffled_is_a_permutation(size):
    assert sorted(shuffled(i, size, key=12345) for i in range(size)) == list(range(size))


def test_shuffled_looks_uniform():
    """Over many keys every row takes every place about equally often."""
    size, keys = 7, 7000
    table = Counter((i, shuffled(i, size, key * 0x9E3779B97F4A7C15)) for key in range(keys) for i in range(size))
    expected = keys / size
    chi_square = sum((table[i, j] - expected) ** 2 / expected for i in range(size) for j in range(size))
    assert chi_square < 75  # 36 degrees of freedom: mean 36, 99.99th percentile 74


@pytest.mark.parametrize(("micro_batch", "world_size"), [(8, 1), (2, 1), (2, 2), (1, 4), (4, 2)])
def test_any_number_of_ranks_reads_the_same_positions_in_a_step(micro_batch, world_size):
    for step in range(3):
        read = [
            k
            for rank in range(world_size)
            for part in micro_batches(step, 8, micro_batch, rank, world_size, base=5)
            for k in part
        ]
        assert sorted(read) == list(range(5 + 8 * step, 5 + 8 * (step + 1)))


def test_bad_mixtures_are_refused_by_name():
    with pytest.raises(ValueError, match=r"mixture\.tamil"):
        GlobalOrder(SIZES, {"tamil": 1.0})
    with pytest.raises(ValueError, match=r"sums to 0\.9"):
        GlobalOrder(SIZES, {"code": 0.5, "hindi": 0.4})
    with pytest.raises(ValueError, match="no sequences"):
        GlobalOrder({"code": 0}, {"code": 1.0})
    with pytest.raises(ValueError, match=r"mixture\.hindi = 1e-07"):
        GlobalOrder(SIZES, {"code": 1 - 1e-7, "hindi": 1e-7})
    with pytest.raises(ValueError, match="multiple of micro_batch"):
        micro_batches(0, 8, 3, 0, 1)
    with pytest.raises(IndexError):
        GlobalOrder(SIZES, MIXTURE)[-1]
