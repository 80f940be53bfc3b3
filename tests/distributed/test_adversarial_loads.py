"""Loads that no router should make: a layer neither hangs nor breaks, and its gradients are where the tokens went."""

import pytest
import torch
import torch.distributed as dist

from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.router import Routing
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny import INT8, tiny_config, tiny_engine, tiny_model, train_step

BATCH, LENGTH = 4, 6
LOADS = {
    "all on one expert": lambda t: [4],
    "none on most": lambda t: [1] if t == 7 else [],
    "only the last experts": lambda t: [3, 4],
    "no picks in the first half": lambda t: [] if t < BATCH * LENGTH // 2 else [0, 4],
    "none at all": lambda t: [],
}


class GivenRouter(torch.nn.Module):
    """The picks of a list, for the tokens of this rank."""

    def __init__(self, picks):
        super().__init__()
        self.picks = picks

    def forward(self, x_TH, keep_T, record_statistics, noise=None):
        return Routing(self.picks, (self.picks >= 0).double() / self.picks.shape[1], None)


def given_load(rank, world_size, picks, keep, quantization):
    """Output, input gradient and gradients of this rank's experts, by name, of one layer; padding has no loss."""
    config = tiny_config(num_null_experts=1, expert_quantization=quantization)
    block = tiny_model(config, world_size).model.layers[0].mlp
    start, count = block.experts.expert_start, block.experts.expert_count
    for name, parameter in block.experts.named_parameters():
        if name.endswith(".A"):  # fresh ones are zero
            whole = torch.randn(5, *parameter.shape[1:], generator=torch.Generator().manual_seed(2)) / 10
            parameter.data[:count] = whole[start : start + count]
    share = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    block.router = GivenRouter(picks.unflatten(0, (BATCH, LENGTH))[share].flatten(0, 1))
    x = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(0))[share].requires_grad_()
    positions = torch.arange(LENGTH).expand(x.shape[:2])
    y, _ = block(x, LayerContext(position_ids=positions, keep_mask=keep[share]))
    (y.square() * keep[share, :, None]).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters() if parameter.requires_grad)
    grads = {name: parameter.grad[:count] for name, parameter in block.experts.named_parameters()}
    return {"output": y.detach(), "input gradient": x.grad, **grads}


@pytest.mark.parametrize("quantization", [None, INT8], ids=["dense experts", "quantized experts"])
def test_gradients_are_exactly_where_the_tokens_went_on_one_two_and_four_ranks(quantization):
    """Padding fills the last rank of four: its tokens are routed and have no loss."""
    keep = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    keep[-1] = False
    loads = {
        load: torch.tensor([[*experts_of(t), -1, -1][:2] for t in range(BATCH * LENGTH)])
        for load, experts_of in LOADS.items()
    }

    def run(rank, world_size):
        return {load: given_load(rank, world_size, picks, keep, quantization) for load, picks in loads.items()}

    expected = run_ranks(run, 1)[0]
    for world_size in (1, 2, 4):
        results = run_ranks(run, world_size)
        for load, picks in loads.items():
            used = set(picks[keep.flatten()].flatten().tolist())
            for name, whole in expected[load].items():
                found = torch.cat([rank[load][name] for rank in results])
                assert torch.isfinite(found).all(), (load, name)
                torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))
                if name not in ("output", "input gradient"):
                    has_gradient = (found != 0).flatten(1).any(1).tolist()
                    assert has_gradient == [e in used for e in range(5)], (load, name)


def test_an_expert_without_tokens_for_1000_steps_rests_and_comes_back():
    def run(rank, world_size):
        block = tiny_model(tiny_config(balance_speed=1e-3), world_size).model.layers[0].mlp
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3, weight_decay=0.0)
        bias, experts = block.router.logit_bias, block.experts
        bias[3] = -9.0
        before = [parameter.detach().clone() for parameter in experts.parameters()]
        generator = torch.Generator().manual_seed(rank)
        ctx = LayerContext(position_ids=torch.arange(6).expand(2, 6), record_statistics=True)

        def step():
            optimizer.zero_grad()
            x = torch.randn(2, 6, 32, generator=generator)
            y, _ = block(x, ctx)
            (y - x).square().mean().backward()
            optimizer.step()
            dist.all_reduce(block.router.pick_counts)
            counts = block.router.pick_counts.clone()
            block.router.after_optimizer_step(update=True)
            return counts

        counts = sum(step() for _ in range(1000))
        rested = [experts.expert_start + slot == 3 for slot in range(experts.expert_count)]
        for parameter, start in zip(experts.parameters(), before, strict=True):
            assert torch.isfinite(parameter).all()
            moved = (parameter != start).flatten(1).any(1)
            assert moved.tolist()[: experts.expert_count] == [not rest for rest in rested]
        bias[3] = 9.0
        assert step()[3] == 2 * world_size * 6
        for parameter in experts.parameters():
            assert all(parameter.grad[slot].count_nonzero() > 0 for slot, rest in enumerate(rested) if rest)
        return counts.tolist()

    first, second = run_ranks(run, 2)
    assert first == second
    assert first[3] == 0 and min(first[:3] + first[4:]) > 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_adversarial_routing_trains_as_one_process_does(stage):
    """All tokens pick experts 0 and 1: of four ranks only the first gets tokens, and no rank hangs."""

    def run(rank, world_size):
        model = tiny_model(tiny_config(balance="none"), world_size)
        for layer in model.model.layers:
            layer.mlp.router.logit_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0]))
        engine = tiny_engine(model, world_size, stage=stage, ep_size=world_size, optimizer="SGD")
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = 0.0
        experts = model.model.layers[1].mlp.experts
        before = experts.down_proj.weight.detach().clone()
        losses = [train_step(engine, step) for step in range(3)]
        moved = (experts.down_proj.weight != before).flatten(1).any(1)
        assert moved.tolist() == [experts.expert_start + row < 2 for row in range(experts.num_local_experts)]
        return losses

    expected = run_ranks(run, 1)[0]
    for losses in run_ranks(run, 4):
        assert losses == pytest.approx(expected, abs=1e-5)
