"""Held-out loss per domain, the same number on any number of ranks."""

from collections.abc import Callable

import torch


@torch.no_grad()
def heldout_loss(
    model: torch.nn.Module,
    heldout: dict[str, torch.Tensor],
    *,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
    reduce: Callable[[torch.Tensor], None] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """
    Mean next-token cross-entropy (nats per token) of each domain.

    Every rank runs the same number of forward passes, because the experts of one rank may serve the tokens of
    another; where the sequences do not divide, a rank repeats one with weight zero.

    Args:
        model: a `LightningLMForCausalLM`; left in the mode (train or eval) it came in.
        heldout: domain -> token ids [n, S], all real tokens.
        micro_batch: sequences per forward pass.
        rank, world_size: this rank takes the rows rank, rank + world_size, ...
        reduce: sums a tensor over the ranks in place.
    """
    was_training = model.training
    model.eval()
    domains = sorted(heldout)
    sums = torch.zeros(len(domains), dtype=torch.float64, device=device)
    for i, domain in enumerate(domains):
        rows = heldout[domain]
        per_rank = -(-len(rows) // world_size)
        mine = torch.arange(per_rank) * world_size + rank
        weights = (mine < len(rows)).to(torch.float64)
        mine = mine.clamp_max(len(rows) - 1)
        for start in range(0, per_rank, micro_batch):
            index = mine[start : start + micro_batch]
            ids = rows[index].long().to(device)
            labels = ids.masked_fill(weights[start : start + micro_batch, None].to(device) == 0, -100)
            loss = model(input_ids=ids, labels=labels, return_logits=False).next_token_loss
            sums[i] += loss.double() * weights[start : start + micro_batch].sum()
    if reduce is not None:
        reduce(sums)
    model.train(was_training)
    return {domain: (sums[i] / len(heldout[domain])).item() for i, domain in enumerate(domains)}
