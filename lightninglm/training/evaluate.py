"""Held-out loss per domain, the same number on any number of ranks."""

from collections.abc import Callable

import torch

from lightninglm.training.targets import count_targets


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
    another; where the sequences do not divide, a rank repeats one without counting it.

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
    sums = torch.zeros(len(domains), 2, dtype=torch.float64, device=device)  # loss, targets
    for i, domain in enumerate(domains):
        rows = heldout[domain]
        per_rank = -(-len(rows) // world_size)
        mine = torch.arange(per_rank) * world_size + rank
        real = mine < len(rows)
        mine = mine.clamp_max(len(rows) - 1)
        for start in range(0, per_rank, micro_batch):
            index = mine[start : start + micro_batch]
            ids = rows[index].long().to(device)
            counted = real[start : start + micro_batch].to(device)
            labels = ids.masked_fill(~counted[:, None], -100)
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=1, return_logits=False).next_token_loss
            sums[i, 0] += loss.double()
            sums[i, 1] += count_targets(ids[counted], model.config)[0]
    if reduce is not None:
        reduce(sums)
    model.train(was_training)
    return {domain: (loss / targets).item() for domain, (loss, targets) in zip(domains, sums, strict=True)}
