"""Documents in one row: padding joins the document before it, starts are where the document changes."""

import torch

from lightninglm.modeling.documents import document_starts, fill_padding


def test_padding_takes_the_document_of_the_real_token_before_it():
    ids = torch.tensor([[9, 9, 1, 1, 8, 2, 7], [3, 3, 0, 4, 4, 0, 0]])
    keep = torch.tensor([[0, 0, 1, 1, 0, 1, 0], [1, 1, 0, 1, 1, 1, 1]]).bool()
    assert fill_padding(ids, keep).tolist() == [[1, 1, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 0, 0]]
    assert fill_padding(ids, keep, torch.tensor([5, 6])).tolist() == [[5, 5, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 0, 0]]
    assert fill_padding(ids, None) is ids


def test_starts_are_changes_also_back_to_an_earlier_id():
    ids = torch.tensor([[1, 1, 2, 1]])
    assert document_starts(ids).tolist() == [[False, False, True, True]]
    assert document_starts(ids, torch.tensor([0])).tolist() == [[True, False, True, True]]
    assert document_starts(ids, torch.tensor([1])).tolist() == [[False, False, True, True]]
