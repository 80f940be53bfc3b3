"""Adapters of quantized experts on ranks: which move and when, and merging them into their base."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import INT8, tiny_batch, tiny_config, tiny_engine, tiny_model, train_step

from lightninglm.checkpoint import CheckpointReader, step_folder
from lightninglm.distributed.adapters import AdapterMovement, merge_adapters, quantized_layers
from lightninglm.distributed.checkpointing import load_checkpoint, save_checkpoint
from lightninglm.distributed.expert_bases import hash_expert_bases
from lightninglm.distributed.optimizer_state import MOMENTS, OptimizerState
from lightninglm.modeling.quantized_experts import PROJECTIONS
from lightninglm.modeling.reversible import ReversibilityError

ADAPTERS_PER_EXPERT = len(PROJECTIONS)
ENGINES = {"zero0": {"stage": 0}, "zero1": {"stage": 1}, "zero2-bf16": {"stage": 2, "dtype": "bf16"}}


def build(world_size, *, ep_size=None, kind="int8", **options):
    config = tiny_config(expert_quantization=INT8 | {"kind": kind})
    ep_size = world_size if ep_size is None else ep_size
    engine = tiny_engine(tiny_model(config, ep_size), world_size, ep_size=ep_size, **options)
    for group in engine.optimizer.param_groups:
        group["weight_decay"] = 0.0  # it moves B without a gradient
    return engine


def watched_step(engine, step):
    """One optimizer step as the trainer makes it; (picks per layer, what AdapterMovement counts)."""
    movement = AdapterMovement(engine.module)
    ids = tiny_batch(step).chunk(dist.get_world_size())[dist.get_rank()]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    picks = engine.module.after_optimizer_step(reduce=dist.all_reduce)
    return picks, movement.counts(picks)


@pytest.mark.parametrize("ranks,ep_size", [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_the_first_step_moves_a_of_every_expert_with_tokens_and_the_second_b_too(ranks, ep_size):
    def run(rank, world_size):
        engine = build(world_size, ep_size=ep_size)
        return [watched_step(engine, step) for step in range(2)]

    for (first_picks, first), (second_picks, second) in run_ranks(run, ranks):
        with_tokens = sum(int((count > 0).sum()) for count in first_picks) * ADAPTERS_PER_EXPERT
        assert with_tokens > 30
        assert first == {"with_tokens": with_tokens, "A": with_tokens, "B": 0, "without_tokens": 0}
        with_tokens = sum(int((count > 0).sum()) for count in second_picks) * ADAPTERS_PER_EXPERT
        assert second["with_tokens"] == second["A"] == second["B"] == with_tokens


def test_an_expert_without_tokens_does_not_move():
    """A bias that no token overcomes keeps two experts of the first layer out of the picks."""

    def run(rank, world_size):
        engine = build(world_size)
        bias = engine.module.get_submodule("model.layers.0.mlp.router").logit_bias
        bias[:2] = -100
        return watched_step(engine, 0)

    for picks, moved in run_ranks(run, 2):
        assert picks[0][:2].tolist() == [0, 0]
        assert moved["A"] == moved["with_tokens"] and moved["without_tokens"] == 0


def loss_after(engine, steps, first=0):
    return [train_step(engine, step) for step in range(first, first + steps)]


def test_the_trajectory_is_the_same_on_any_number_of_ranks():
    """Merging after three steps included."""

    def run(rank, world_size, ep_size):
        engine = build(world_size, ep_size=ep_size)
        losses = loss_after(engine, 3)
        merge_adapters(engine)
        return losses + loss_after(engine, 3, first=3)

    alone = run_ranks(run, 1, 1)[0]
    assert alone[0] != alone[-1]
    for ranks, ep_size in ((2, 1), (2, 2), (4, 2), (4, 4)):
        for losses in run_ranks(run, ranks, ep_size):
            assert losses == pytest.approx(alone, rel=1e-5), (ranks, ep_size)


@torch.no_grad()
def outputs(engine):
    """
    What this rank's experts make of fixed rows, layer by layer, in fp32.

    Not the logits: a change of rounding size can send a token to another expert, and then they are others.
    """
    generator = torch.Generator().manual_seed(3)
    results = []
    for _, experts in quantized_layers(engine.module):
        counts = torch.zeros(experts.num_local_experts, dtype=torch.int64)
        counts[: experts.expert_count] = 8
        x_RH = torch.randn(int(counts.sum()), experts.config.hidden_size, generator=generator)
        results.append(experts(x_RH, counts).float())
    return torch.cat(results)


def relative(change, reference):
    return float((change - reference).norm() / reference.norm())


def idle_step(engine):
    """An optimizer step of learning rate zero: it only copies master copies into the weights."""
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    train_step(engine, 50)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("kind,tolerance", [("int8", 0.02), ("int4", 0.15)])
def test_merging_keeps_the_function_and_the_next_step_keeps_the_merge(kind, tolerance, options):
    def run(rank, world_size):
        engine = build(world_size, kind=kind, **options)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.02
        loss_after(engine, 4)
        trained = [experts.merged() for _, experts in quantized_layers(engine.module)]
        before, bases = outputs(engine), hash_expert_bases(engine.module)
        report = merge_adapters(engine)
        now = [experts.merged() for _, experts in quantized_layers(engine.module)]
        change = max(
            relative(new[name][e], old[name][e])
            for old, new, (_, experts) in zip(trained, now, quantized_layers(engine.module), strict=True)
            for name in PROJECTIONS
            for e in range(experts.expert_count)
        )
        merged, new_bases = outputs(engine), hash_expert_bases(engine.module)
        state = OptimizerState(engine)
        moments = [
            float(fragment.abs().sum())
            for _, experts in quantized_layers(engine.module)
            for parameter in experts.parameters()
            for key in MOMENTS
            if (fragment := state.fragment(parameter, key)[1]) is not None
        ]
        idle_step(engine)
        return report, change, bases != new_bases, before, merged, moments, outputs(engine)

    results = run_ranks(run, 2)
    if options.get("dtype") != "bf16":  # weights there are master copies rounded
        assert results[0][0]["relative_change"] == pytest.approx(max(change for _, change, *_ in results), rel=1e-3)
    for report, _, changed, before, merged, moments, after in results:
        assert changed
        assert report["signal_to_noise_db"] > {"int8": 40, "int4": 15}[kind]
        assert report["relative_change"] < {"int8": 0.01, "int4": 0.2}[kind]
        assert relative(merged, before) < tolerance
        assert moments and not any(moments)
        assert relative(after, merged) < 1e-6


def test_merged_adapters_go_on_at_the_rate_of_fresh_ones():
    """The gradient of A is as large as B: its rows keep the norm that fresh ones have on average."""

    def run(rank, world_size):
        engine = build(world_size)
        loss_after(engine, 2)
        merge_adapters(engine)
        _, experts = next(quantized_layers(engine.module))
        return [getattr(experts, name).B.norm(dim=-1)[: experts.expert_count] for name in PROJECTIONS]

    for norms in run_ranks(run, 2)[0]:
        torch.testing.assert_close(norms, torch.ones_like(norms))


def test_a_stale_master_copy_undoes_the_merge():
    """What the merge must not forget: with the old master copies, one step later the old adapters act twice."""

    def run(rank, world_size):
        engine = build(world_size)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.02
        loss_after(engine, 4)
        state = OptimizerState(engine)
        adapters = [p for _, experts in quantized_layers(engine.module) for p in experts.parameters()]
        stale = [state.fragment(p, "master")[1].clone() for p in adapters]
        merge_adapters(engine)
        merged = outputs(engine)
        for parameter, old in zip(adapters, stale, strict=True):
            state.fragment(parameter, "master")[1].copy_(old)
        unchanged = outputs(engine)
        idle_step(engine)
        return merged, unchanged, outputs(engine)

    merged, unchanged, after = run_ranks(run, 1)[0]
    assert torch.equal(unchanged, merged)  # the weights still look right
    assert relative(after, merged) > 0.05


def changes_by_repeated_merges(stale, kind, merges=4):
    """
    Relative change of the experts' function from before each merge to after the idle step that follows, on one rank.

    Nothing trains between the merges (learning rate zero), so that every change comes from merging alone.
    """

    def run(rank, world_size):
        engine = build(world_size, kind=kind)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.02
        loss_after(engine, 4)
        state, trained, changes = OptimizerState(engine), outputs(engine), []
        adapters = [p for _, experts in quantized_layers(engine.module) for p in experts.parameters()]
        for _ in range(merges):
            masters = [state.fragment(p, "master")[1].clone() for p in adapters]
            before = outputs(engine)
            merge_adapters(engine)
            if stale:
                for parameter, old in zip(adapters, masters, strict=True):
                    state.fragment(parameter, "master")[1].copy_(old)
            idle_step(engine)
            after = outputs(engine)
            changes.append((relative(after, before), relative(after, trained)))
        return changes

    return run_ranks(run, 1)[0]


@pytest.mark.parametrize("kind,tolerance", [("int8", 0.02), ("int4", 0.15)])
def test_repeated_merges_drift_without_bound_only_when_the_master_copies_are_stale(kind, tolerance):
    """A stale master adds the product A B to the base again at every merge: the error grows merge by merge."""
    for at_merge, in_all in changes_by_repeated_merges(False, kind):
        assert at_merge < tolerance and in_all < 2 * tolerance
    stale = changes_by_repeated_merges(True, kind)
    assert all(at_merge > 0.05 for at_merge, _ in stale)
    in_all = [total for _, total in stale]
    assert in_all == sorted(in_all)
    assert in_all[-1] > 3 * in_all[0]


def losses_of_a_merging_run(rank, world_size, way, steps):
    """
    Losses of a run whose adapters learn at three times the rate and, unless `way` is "never", are merged every 5 steps.

    "stale": each merge is followed by writing the old master copies and moments back. Ends where the hidden state
    leaves the range of the reversible stack.
    """
    engine = build(world_size, lr=3e-3)
    rates = [3 * group["lr"] if group["role"] == "adapters" else group["lr"] for group in engine.optimizer.param_groups]
    state = OptimizerState(engine)
    adapters = [p for _, experts in quantized_layers(engine.module) for p in experts.parameters()]
    losses = []
    for step in range(steps):
        for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1, (step + 1) / 10)
        try:
            losses.append(train_step(engine, step))
        except ReversibilityError:
            break
        if way != "never" and step % 5 == 4:
            fragments = [state.fragment(p, key)[1] for p in adapters for key in ("master", *MOMENTS)]
            before = [fragment.clone() for fragment in fragments]
            merge_adapters(engine)
            if way == "stale":
                for fragment, old in zip(fragments, before, strict=True):
                    fragment.copy_(old)
    return losses


def test_merging_often_trains_on_and_stale_master_copies_ruin_the_run():
    never, merging, stale = (run_ranks(losses_of_a_merging_run, 1, way, 60)[0] for way in ("never", "merging", "stale"))
    assert len(never) == len(merging) == 60

    def end(losses):
        return sum(losses[-5:]) / 5

    assert end(merging) < end(never) + 0.1 < never[0] - 1  # both learn
    assert len(stale) < 60 or end(stale) > end(merging) + 1  # rounding decides when the range is left


@pytest.mark.parametrize("saved_on,loaded_on", [(2, 1), (1, 4)])
def test_a_merged_run_goes_on_from_its_checkpoint_on_other_ranks(saved_on, loaded_on, tmp_path):
    folder = tmp_path / step_folder(3)

    def first(rank, world_size):
        engine = build(world_size)
        loss_after(engine, 2)
        merge_adapters(engine)
        loss_after(engine, 1, first=2)
        save_checkpoint(engine, folder, {"step": 3})
        return hash_expert_bases(engine.module), loss_after(engine, 2, first=3)

    def second(rank, world_size):
        engine = build(world_size)
        load_checkpoint(engine, CheckpointReader(folder))
        return hash_expert_bases(engine.module), loss_after(engine, 2, first=3)

    bases, losses = run_ranks(first, saved_on)[0]
    for other_bases, other_losses in run_ranks(second, loaded_on):
        assert other_bases == bases
        assert other_losses == pytest.approx(losses, rel=1e-5)
        assert all(math.isfinite(loss) for loss in losses)
