"""How many targets packed sequences have, for losses that are means over a whole optimizer step."""

import torch


def count_targets(ids: torch.Tensor, config) -> torch.Tensor:
    """
    Targets of packed sequences without padding, as the model counts them.

    Without `config.document_boundaries` every token but the last is followed by a target. With them, an end token
    closes its document, and no target lies in another document than the position that predicts it.

    Args:
        ids: [B, S] token ids.
        config: reads document_boundaries and eos_token_id.
    Returns:
        int64 [2]: next-token targets, second-token targets.
    """
    inside = torch.ones_like(ids, dtype=torch.bool)
    if config.document_boundaries:
        ends = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id
        inside = ~torch.isin(ids, torch.tensor(ends, device=ids.device))
    first = inside[:, :-1]
    second = inside[:, :-2] & inside[:, 1:-1]
    return torch.stack((first.sum(), second.sum()))
