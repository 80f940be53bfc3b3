"""Expert parallelism: the experts of a layer spread over ranks, their tokens exchanged by one all-to-all each way.

Any number of experts over any number of ranks: the first E mod P ranks hold one expert more, and every rank allocates
that many, the last slot staying zero where there is no expert. DeepSpeed reduces the gradients of a sharded expert over
its replicas only; it recognizes the layers by a parameter-free marker module, and the parameters by two attributes.

T tokens of this rank, K picks per token, R rows, H hidden size, P ranks of the expert-parallel group, E_local slots.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from deepspeed.utils import groups
from torch import nn
from torch.autograd.function import once_differentiable

from lightninglm.distributed import process_group
from lightninglm.modeling.experts import shard_experts
from lightninglm.modeling.moe import MoEBlock
from lightninglm.modeling.token_dispatch import (
    SortedPicks,
    TokenDispatcher,
    gather_tokens,
    permute_rows,
    sort_picks,
    weighted_sum,
)


def expert_shares(num_experts: int, ep_size: int) -> list[tuple[int, int]]:
    """(first expert, number of experts) of each rank of an expert-parallel group; sizes differ by one at most."""
    size, longer = divmod(num_experts, ep_size)
    return [(rank * size + min(rank, longer), size + (rank < longer)) for rank in range(ep_size)]


def dispatch_rows(tokens: int, picks: int, num_experts: int, ep_size: int) -> tuple[int, int]:
    """
    Rows that one MoE layer keeps on one rank at once: (with a balanced load, at most).

    No pick is dropped, so the routers decide how many rows R a rank's experts get: as many as leave it, S = tokens *
    picks, when the load is balanced, and at most ep_size * tokens * min(picks, experts of the rank), when all tokens of
    all ranks choose its experts. The most is alive in the forward pass: the rows in the order of the experts, their
    outputs, these in the order of the ranks, and what has come back, 3 R + S.

    Args:
        tokens: of one rank, per micro-batch.
        picks: experts per token.
    """
    sent = tokens * picks
    most = ep_size * tokens * min(picks, expert_shares(num_experts, ep_size)[0][1])
    return 4 * sent, 3 * most + sent


class RowExchange:
    """
    One all-to-all of rows over a group, differentiable, in two halves: `start` sends, `finish` waits for what arrives.

    The backward pass sends the gradients back from `finish` and waits for them in `start`. Autograd runs what is ready
    in the reverse order of its creation, so what is computed between the two calls overlaps with the transfer in both
    passes. The results do not depend on that order. On a GPU the stream waits, not the host.

    Args:
        group: process group of P ranks.
        send_sizes, receive_sizes: rows for and from each rank, [P].
    """

    def __init__(self, group: dist.ProcessGroup, send_sizes: list[int], receive_sizes: list[int]):
        self.group, self.send_sizes, self.receive_sizes = group, send_sizes, receive_sizes
        self._in_flight = None

    def start(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Sends blocks of rows to the ranks of the group; returns an empty tensor, the ticket for `finish`."""
        return _StartExchange.apply(rows_RH, self)

    def finish(self, ticket: torch.Tensor) -> torch.Tensor:
        """Waits for the rows of the other ranks and returns them, in the order of the ranks."""
        return _FinishExchange.apply(ticket, self)

    def _send(self, rows_RH, send_sizes, receive_sizes) -> None:
        rows_RH = rows_RH.contiguous()
        arriving_RH = rows_RH.new_empty(sum(receive_sizes), rows_RH.shape[1])
        work = dist.all_to_all_single(arriving_RH, rows_RH, receive_sizes, send_sizes, group=self.group, async_op=True)
        self._in_flight = work, arriving_RH, rows_RH  # the rows must live until they have left

    def _wait(self) -> torch.Tensor:
        (work, arriving_RH, _), self._in_flight = self._in_flight, None
        work.wait()
        return arriving_RH


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RH, exchange: RowExchange):
        ctx.exchange = exchange
        exchange._send(rows_RH, exchange.send_sizes, exchange.receive_sizes)
        return rows_RH.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_ticket):
        return ctx.exchange._wait(), None


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ticket, exchange: RowExchange):
        ctx.exchange = exchange
        return exchange._wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RH):
        ctx.exchange._send(grad_RH, ctx.exchange.receive_sizes, ctx.exchange.send_sizes)
        return grad_RH.new_empty(0), None


class Dispatched(NamedTuple):
    """
    The tokens of one layer, away from home.

    Attributes:
        picks: the sort by expert, at home.
        outward: the exchange that brings the rows to their experts.
        ticket: of the exchange.
        tokens_per_expert: [E_local] int64, on the host.
        order, inverse: [R], the sort by local expert on arrival.
    """

    picks: SortedPicks
    outward: RowExchange
    ticket: torch.Tensor
    tokens_per_expert: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor


class ExpertParallelDispatcher(TokenDispatcher):
    """
    Experts in blocks over the ranks of a group.

    Rows leave sorted by expert, which is by rank; on arrival they are sorted by local expert, within one by source
    rank and token, so that the order never depends on timing. One exchange of counts, one host read of sizes and one
    all-to-all each way per layer. The weighted sum runs on the token's own rank, in pick order.

    Args:
        num_experts: experts of the layer, on all ranks.
        group: process group of P ranks.
        device: where the tokens are.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup, device: torch.device):
        self.num_experts = num_experts
        self.group = group
        self.ep_size = dist.get_world_size(group)
        shares = expert_shares(num_experts, self.ep_size)
        self.num_slots = shares[0][1]
        slots = [rank * self.num_slots + i for rank, (_, count) in enumerate(shares) for i in range(count)]
        self._slot_of_expert = torch.tensor(slots, device=device)
        self._local_slot = torch.arange(self.num_slots, device=device).repeat(self.ep_size)

    def dispatch(self, x_TH, experts_TK):
        picks = sort_picks(experts_TK, self.num_experts, null_picks=False)
        send_PE = picks.counts.new_zeros(self.ep_size * self.num_slots)
        send_PE[self._slot_of_expert] = picks.counts
        receive_PE = torch.empty_like(send_PE)
        dist.all_to_all_single(receive_PE, send_PE, group=self.group)

        sent, received = (counts.view(self.ep_size, self.num_slots) for counts in (send_PE, receive_PE))
        sizes = torch.cat((sent.sum(1), received.sum(1), received.sum(0))).cpu()  # the one host read
        send_sizes, receive_sizes, tokens_per_expert = sizes.split((self.ep_size, self.ep_size, self.num_slots))

        outward = RowExchange(self.group, send_sizes.tolist(), receive_sizes.tolist())
        picks = picks.without_null(sum(outward.send_sizes))
        ticket = outward.start(gather_tokens(x_TH, picks))
        slot_R = self._local_slot.repeat_interleave(receive_PE, output_size=sum(outward.receive_sizes))
        order = slot_R.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return Dispatched(picks, outward, ticket, tokens_per_expert, order, inverse)

    def receive(self, state):
        arrived_RH = state.outward.finish(state.ticket)
        return permute_rows(arrived_RH, state.order, state.inverse), state.tokens_per_expert

    def combine(self, y_RH, weights_TK, state):
        homeward = RowExchange(self.group, state.outward.receive_sizes, state.outward.send_sizes)
        home_RH = homeward.finish(homeward.start(permute_rows(y_RH, state.inverse, state.order)))
        return weighted_sum(home_RH, weights_TK, state.picks)


class ExpertParallelMarker(DeepSpeedMoE):
    """Tells the DeepSpeed engine that its block has sharded experts; holds no parameter, computes nothing."""

    def __init__(self, num_experts: int, ep_size: int, num_local_experts: int):
        nn.Module.__init__(self)  # not DeepSpeed's own layer, which wants equal shares and builds experts
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.num_local_experts = num_local_experts
        self.expert_group_name = expert_group_name(ep_size)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by the engine to create the groups; `apply_expert_parallel` has done so."""


def expert_group_name(ep_size: int) -> str:
    """DeepSpeed's name of the expert-parallel group of this size."""
    return f"ep_size_{ep_size}"


def apply_expert_parallel(model: nn.Module, ep_size: int) -> None:
    """
    Shards the experts of every MoE layer over groups of `ep_size` consecutive ranks, in place.

    Works on the meta device, before anything is allocated; the caller then materializes and fills the local block
    (`experts.expert_start`, `expert_count`). Experts are replicated over the world_size / ep_size groups. With
    ep_size 1 every rank holds all experts and nothing changes.

    Raises:
        ValueError: ep_size does not divide the ranks, or a layer has fewer experts than ep_size.
    """
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, MoEBlock)}
    world = process_group.world_size()
    if ep_size < 1 or world % ep_size:
        valid = [n for n in range(1, world + 1) if world % n == 0]
        raise ValueError(f"train.expert_parallel = {ep_size}: must divide the {world} ranks; valid: {valid}")
    if ep_size == 1:
        return
    if not blocks:
        raise ValueError(f"train.expert_parallel = {ep_size}: the model has no experts; use 1")
    for name, block in blocks.items():
        if block.experts.num_experts < ep_size:
            raise ValueError(
                f"train.expert_parallel = {ep_size}: more ranks than the {block.experts.num_experts} experts of {name}"
            )
    group_name = expert_group_name(ep_size)
    if group_name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(ep_size)
    group = groups._get_expert_parallel_group(group_name)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for block in blocks.values():
        num_experts = block.experts.num_experts
        shares = expert_shares(num_experts, ep_size)
        start, count = shares[dist.get_rank(group)]
        shard_experts(block.experts, start, count, padded=shares[0][1])
        block.dispatcher = ExpertParallelDispatcher(num_experts, group, device)
        block.expert_parallel = ExpertParallelMarker(num_experts, ep_size, shares[0][1])


def sharded_experts(model: nn.Module) -> Iterator[tuple[ExpertParallelMarker, nn.Module]]:
    """(marker of the layer, module) for every module whose parameters and buffers are one row per local expert."""
    for block in model.modules():
        if isinstance(block, MoEBlock) and hasattr(block, "expert_parallel"):
            for stack in (block.experts.gate_proj, block.experts.up_proj, block.experts.down_proj):
                yield block.expert_parallel, stack


def mark_expert_parameters(model: nn.Module) -> None:
    """
    Marks the parameters of sharded experts for DeepSpeed, which otherwise averages them over all ranks.

    Marks do not survive materialization (it replaces the Parameter objects), so this runs just before the engine.
    """
    for marker, stack in sharded_experts(model):
        for parameter in stack.parameters():
            parameter.allreduce = False
            parameter.group_name = marker.expert_group_name
