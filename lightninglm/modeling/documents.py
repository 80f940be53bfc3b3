"""Several documents in one row: what document each column belongs to when padding lies between tokens."""

import torch


def fill_padding(
    document_ids: torch.Tensor, keep_mask: torch.Tensor | None, before: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Gives padding the document of the real token before it, so that only real tokens start documents.

    Args:
        document_ids: [B, T] int64, equal inside a document; anything at padding.
        keep_mask: [B, T] bool, True for real tokens; None when all are.
        before: [B] int64, the document that leading padding continues; None: that of the first real token.
    Returns:
        [B, T] int64.
    """
    if keep_mask is None:
        return document_ids
    columns = torch.arange(keep_mask.shape[1], device=keep_mask.device)
    source = torch.where(keep_mask, columns, -1).cummax(dim=1).values
    if before is None:
        source = torch.where(source < 0, keep_mask.int().argmax(dim=1, keepdim=True), source)
        return document_ids.gather(1, source)
    return torch.where(source < 0, before.unsqueeze(1), document_ids.gather(1, source.clamp(min=0)))


def document_starts(document_ids: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """
    Marks the columns whose document differs from that of the column before.

    Args:
        document_ids: [B, T] int64.
        before: [B] int64, the document in front of the first column; None: that column starts nothing.
    Returns:
        [B, T] bool.
    """
    before = document_ids[:, 0] if before is None else before
    return document_ids != torch.cat([before.unsqueeze(1), document_ids[:, :-1]], dim=1)
