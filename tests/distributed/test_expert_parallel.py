"""Experts spread over ranks compute what they compute in one process, for any counts and any routing."""

import functools
import hashlib

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch.utils._python_dispatch import TorchDispatchMode

from lightninglm.distributed.expert_parallel import (
    ExpertParallelDispatcher,
    apply_expert_parallel,
    dispatch_rows,
    expert_group_name,
    expert_shares,
)
from lightninglm.modeling.initialization import initialize_model
from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM
from lightninglm.modeling.token_dispatch import LocalDispatcher
from tests.distributed.experts_460 import config_460
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny import INT8, tiny_config, tiny_engine, tiny_model, train, train_step
from tests.planning.live_bytes import LiveBytes

TOKENS, PICKS, HIDDEN, EXPERTS = 24, 3, 8, 7


def test_shares_tile_the_experts_and_differ_by_one_at_most():
    for num_experts in range(1, 40):
        for ep_size in range(1, num_experts + 1):
            shares = expert_shares(num_experts, ep_size)
            assert [e for start, count in shares for e in range(start, start + count)] == list(range(num_experts))
            counts = [count for _, count in shares]
            assert max(counts) == counts[0] <= min(counts) + 1
    assert [count for _, count in expert_shares(460, 8)] == [58] * 4 + [57] * 4


def random_picks(kind: str) -> torch.Tensor:
    """[T, K] distinct picks per token, -1 for null ones."""
    generator = torch.Generator().manual_seed(3)
    picks = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :PICKS]
    if kind == "nulls":
        picks[torch.rand(picks.shape, generator=generator) < 0.4] = -1
    elif kind == "all null":
        picks.fill_(-1)
    elif kind == "one expert":
        picks = torch.full_like(picks, -1)
        picks[:, 1] = 5
    elif kind == "one rank idle":  # the tokens of the first rank go nowhere
        picks[: TOKENS // 4] = -1
    return picks


def dispatched(dispatcher, scale_E, x, picks, weights):
    """(output, gradient of x, gradient of weights) of experts y = x * scale."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    state = dispatcher.dispatch(x, picks)
    rows, counts = dispatcher.receive(state)
    assert rows.shape[0] == int(counts.sum())
    scale_R = scale_E.repeat_interleave(counts)
    y = dispatcher.combine(rows * scale_R[:, None], weights, state)
    (y * torch.arange(1.0, HIDDEN + 1)).sum().backward()
    return y.detach(), x.grad, weights.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["all real", "nulls", "all null", "one expert", "one rank idle"])
def test_dispatch_over_ranks_equals_local_dispatch_bit_for_bit(kind, world_size):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    weights = torch.rand(TOKENS, PICKS, generator=generator)
    scale = torch.randn(EXPERTS, generator=generator)
    picks = random_picks(kind)
    weights[picks < 0] = 0
    expected = dispatched(LocalDispatcher(EXPERTS), scale, x, picks, weights)

    def over_ranks(rank, world_size):
        dispatcher = ExpertParallelDispatcher(EXPERTS, dist.group.WORLD, torch.device("cpu"))
        start, count = expert_shares(EXPERTS, world_size)[rank]
        local_scale = torch.zeros(dispatcher.num_slots)
        local_scale[:count] = scale[start : start + count]
        share = slice(rank * TOKENS // world_size, (rank + 1) * TOKENS // world_size)
        return dispatched(dispatcher, local_scale, x[share], picks[share], weights[share])

    results = run_ranks(over_ranks, world_size)
    for parts, whole in zip(zip(*results, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_ranks_may_have_different_numbers_of_tokens():
    def uneven(rank, world_size):
        dispatcher = ExpertParallelDispatcher(EXPERTS, dist.group.WORLD, torch.device("cpu"))
        x = torch.ones(0 if rank == 1 else 5 + rank, HIDDEN)
        picks = torch.arange(x.shape[0])[:, None] % EXPERTS
        state = dispatcher.dispatch(x, picks)
        rows, counts = dispatcher.receive(state)
        y = dispatcher.combine(rows, torch.ones(picks.shape), state)
        return torch.equal(y, x), int(counts.sum())

    results = run_ranks(uneven, 3)
    assert all(equal for equal, _ in results)
    assert sum(rows for _, rows in results) == 5 + 0 + 7


def test_a_layer_costs_one_exchange_of_counts_and_one_all_to_all_each_way():
    def count_calls(rank, world_size):
        calls, all_to_all = [], dist.all_to_all_single
        dist.all_to_all_single = lambda out, *args, **kwargs: calls.append(out) or all_to_all(out, *args, **kwargs)
        dispatcher = ExpertParallelDispatcher(EXPERTS, dist.group.WORLD, torch.device("cpu"))
        x, picks, scale = torch.ones(TOKENS, HIDDEN), random_picks("nulls"), torch.ones(dispatcher.num_slots)
        dispatched(dispatcher, scale, x, picks, (picks >= 0).float())
        return [out.dtype for out in calls]

    forward = [torch.int64, torch.float32, torch.float32]
    assert run_ranks(count_calls, 2) == [forward + [torch.float32] * 2] * 2


@pytest.mark.parametrize("null_experts", [0, 2])
def test_the_host_reads_the_sizes_and_nothing_else_of_a_layer(null_experts):
    """No operation whose result the host would wait for on a GPU, in both passes; the sizes are read by a copy."""

    class ReadsOfTheHost(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.masked_select):
                reads.append(str(function))
            return function(*args, **(kwargs or {}))

    aten, reads = torch.ops.aten, []

    def run(rank, world_size):
        block = tiny_model(tiny_config(num_null_experts=null_experts), world_size).model.layers[0].mlp
        x = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        ctx = LayerContext(position_ids=torch.arange(TOKENS).expand(2, TOKENS), record_statistics=True)
        with ReadsOfTheHost():
            block(x, ctx)[0].square().sum().backward()
            assert not reads and x.grad is not None
            block.dispatcher = LocalDispatcher(5)
            block.dispatcher.dispatch(x.flatten(0, 1), torch.zeros(2 * TOKENS, 2, dtype=torch.int64))
        return reads

    assert run_ranks(run, 2) == [["aten._local_scalar_dense.default"]] * 2  # of the last two lines


class LoggedWork:
    """The handle of an all-to-all, which notes when it is waited for."""

    def __init__(self, work, log):
        self.work, self.log = work, log

    def wait(self):
        self.log.append("arrived")
        self.work.wait()


@pytest.mark.parametrize("quantization", [None, INT8], ids=["dense experts", "quantized experts"])
def test_the_shared_expert_runs_while_rows_travel_in_both_passes_and_changes_no_bit(quantization):
    def run(rank, world_size):
        block = tiny_model(tiny_config(expert_quantization=quantization), world_size).model.layers[0].mlp
        log, all_to_all, results = [], dist.all_to_all_single, []
        block.shared_expert.register_forward_hook(lambda *_: log.append("shared"))
        block.shared_expert.gate_proj.weight.register_hook(lambda _: log.append("shared"))

        def overlapping(*args, **kwargs):
            work = all_to_all(*args, **kwargs)
            log.append("sent" if kwargs.get("async_op") else "counts")
            return work and LoggedWork(work, log)

        def blocking(*args, **kwargs):
            work = all_to_all(*args, **kwargs)
            if work:
                work.wait()
            return work

        for exchange in (overlapping, blocking):
            dist.all_to_all_single = exchange
            x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            block.zero_grad()
            y, _ = block(x, LayerContext(position_ids=torch.arange(24).expand(2, 24)))
            log.append("backward")
            y.square().sum().backward()
            grads = [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
            results.append([y.detach(), x.grad, *(grad.clone() for grad in grads)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        return log

    forward = ["counts", "sent", "shared", "arrived", "sent", "arrived"]
    backward = ["backward", "sent", "arrived", "sent", "shared", "arrived"]
    for log in run_ranks(run, 2):
        assert log[: len(forward + backward)] == forward + backward


@pytest.mark.parametrize("receiver", [0, 1, None], ids=["all to the first rank", "all to the last rank", "balanced"])
def test_the_buffers_of_any_load_stay_within_the_bound_that_the_worst_reaches(receiver):
    picks = {0: [[0, 1, 2], [1, 2, 3]], 1: [[4, 5, 6], [4, 5, 6]], None: [[0, 1, 4], [2, 5, 6]]}[receiver]
    tokens, hidden = 64, 256

    def measure(rank, world_size):
        dispatcher = ExpertParallelDispatcher(EXPERTS, dist.group.WORLD, torch.device("cpu"))
        x = torch.randn(tokens, hidden, requires_grad=True)
        weights = torch.full((tokens, PICKS), 1 / PICKS, requires_grad=True)
        experts = torch.tensor(picks).repeat(tokens // 2, 1)
        x.grad, weights.grad, grad = torch.zeros_like(x), torch.zeros_like(weights), torch.ones(tokens, hidden)
        matrix = torch.eye(hidden)
        with LiveBytes([x, weights, experts, x.grad, weights.grad, grad, matrix]) as live:
            state = dispatcher.dispatch(x, experts)
            rows, _ = dispatcher.receive(state)
            dispatcher.combine(rows @ matrix, weights, state).backward(grad)
        return live.peak

    def lowest(rank, world_size):
        """Of several: a thread of gloo may let go of a buffer a moment after the exchange is over."""
        return min(measure(rank, world_size) for _ in range(8))

    balanced, most = (4 * hidden * rows for rows in dispatch_rows(tokens, PICKS, EXPERTS, 2))
    peaks = run_ranks(lowest, 2)
    per_token = 1.2  # tensors of one row per token, indices and sizes are not in the bound
    if receiver is None:
        assert balanced <= max(peaks) <= per_token * balanced
    else:
        assert most <= peaks[receiver] <= per_token * most
        assert peaks[1 - receiver] < balanced


def test_sharding_keeps_names_and_moves_every_expert_to_one_rank():
    whole = tiny_model(tiny_config()).state_dict()

    def shard(rank, world_size):
        model = tiny_model(tiny_config(), world_size)
        assert list(model.state_dict()) == list(whole)
        experts = model.model.layers[0].mlp.experts
        name = "model.layers.0.mlp.experts.up_proj.weight"
        block = slice(experts.expert_start, experts.expert_start + experts.expert_count)
        assert torch.equal(model.state_dict()[name][: experts.expert_count], whole[name][block])
        assert model.state_dict()[name][experts.expert_count :].count_nonzero() == 0
        return experts.expert_start, experts.expert_count, experts.num_local_experts

    assert run_ranks(shard, 2) == [(0, 3, 3), (3, 2, 3)]
    assert run_ranks(shard, 4) == [(0, 2, 2), (2, 1, 2), (3, 1, 2), (4, 1, 2)]


@pytest.mark.parametrize(
    ("world_size", "ep_size", "num_experts", "said"),
    [
        (2, 3, 5, r"train\.expert_parallel = 3: must divide the 2 ranks; valid: \[1, 2\]"),
        (4, 4, 3, r"train\.expert_parallel = 4: more ranks than the 3 experts of model\.layers\.0\.mlp"),
        (2, 2, 0, r"train\.expert_parallel = 2: the model has no experts; use 1"),
        (2, 0, 5, r"train\.expert_parallel = 0: must divide"),
    ],
)
def test_what_cannot_be_sharded_is_refused(world_size, ep_size, num_experts, said):
    def attempt(rank, world_size):
        with torch.device("meta"):
            model = LightningLMForCausalLM(tiny_config(num_experts=num_experts))
        with pytest.raises(ValueError, match=said):
            apply_expert_parallel(model, ep_size)

    run_ranks(attempt, world_size)


def digest(model) -> dict[str, str]:
    """The hash of every parameter and buffer on this rank, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flat = {name: tensor.detach().reshape(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}
    return {name: hashlib.sha256(values).hexdigest() for name, values in flat.items()}


@pytest.mark.parametrize("quantization", [None, INT8], ids=["dense experts", "quantized experts"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_rank_keeps_its_experts_and_shares_the_rest(stage, quantization):
    """At the start and after steps: expert tensors (quantized codes too) differ by rank, everything else is equal."""
    config = tiny_config(expert_quantization=quantization)

    def run(rank, world_size):
        model = tiny_model(config, world_size)
        filled = digest(model)
        engine = tiny_engine(model, world_size, stage=stage, ep_size=world_size)
        started = digest(model)
        for step in range(2):
            train_step(engine, step)
        return filled, started, digest(model)

    first, second = run_ranks(run, 2)
    for filled, started, _ in (first, second):
        assert filled == started
    for moment in (1, 2):
        for name, value in first[moment].items():
            sharded = ".experts." in name and "signs" not in name and not (name.endswith(".A") and moment == 1)
            assert (second[moment][name] != value) == sharded, name
    moved = {name for name, value in first[2].items() if value != first[1][name]}
    assert any(".experts." in name for name in moved)
    assert not any(name.endswith((".codes", ".scales")) for name in moved)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicas_of_an_expert_stay_equal(stage):
    def run(rank, world_size):
        model = tiny_model(tiny_config(), 2)
        engine = tiny_engine(model, world_size, stage=stage, ep_size=2)
        for step in range(2):
            train_step(engine, step)
        replicas = groups._get_expert_data_parallel_group(expert_group_name(2))
        return dist.get_process_group_ranks(replicas), digest(model)

    results = run_ranks(run, 4)
    assert [ranks for ranks, _ in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert results[0][1] == results[2][1]
    assert results[1][1] == results[3][1]


def test_quantized_experts_train_over_ranks_as_in_one_process():
    config = tiny_config(expert_quantization=INT8)
    run = functools.partial(train, config=config, optimizer="SGD")
    expected = run_ranks(run, 1)[0]
    for ranks in (2, 4):
        for result in run_ranks(run, ranks):
            assert result["loss"] == pytest.approx(expected["loss"], abs=1e-5)


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_460_experts_train_on_8_ranks_as_in_one_process(form):
    """`experts_460.py` does the same for 20 steps through the launcher."""
    run = functools.partial(train, config=config_460(form), steps=3, lr=1e-4)
    expected = run_ranks(run, 1)[0]
    results = run_ranks(run, 8)
    assert results[0]["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    for norm, expected_norm in zip(results[0]["norm"], expected["norm"], strict=True):
        assert norm["total"] == pytest.approx(expected_norm["total"], rel=1e-6)
    assert all(result == results[0] for result in results)


def test_expert_parallel_size_1_changes_nothing():
    def run(rank, world_size):
        with torch.device("meta"):
            model = LightningLMForCausalLM(tiny_config())
        apply_expert_parallel(model, 1)
        initialize_model(model, seed=0)
        assert all(isinstance(layer.mlp.dispatcher, LocalDispatcher) for layer in model.model.layers)
        assert not any("expert_parallel" in name for name, _ in model.named_modules())

    run_ranks(run, 2)
