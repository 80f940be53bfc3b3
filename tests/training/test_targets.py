"""The trainer counts targets as the model does: losses of unequal micro-batches add up to a mean over targets."""

import pytest
import torch

from lightninglm.training.evaluate import heldout_loss
from lightninglm.training.targets import count_targets
from tests.modeling.tiny_models import VOCABULARY, tiny_model

END = 3


@pytest.fixture(params=[False, True], ids=["whole rows", "document boundaries"])
def model(request):
    return tiny_model(document_boundaries=request.param, eos_token_id=END, num_nextn_predict_layers=1).train()


def batches():
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (4, 24))
    ids[0, ::3] = END  # one row full of short documents
    ids[2, 10] = END
    return ids


def test_micro_batches_add_up_to_the_mean_over_all_targets(model):
    ids = batches()
    whole = model(input_ids=ids, labels=ids)
    next_items, second_items = count_targets(ids, model.config)
    parts = [
        model(
            input_ids=rows, labels=rows, num_items_in_batch=next_items, num_second_items_in_batch=second_items
        )
        for rows in ids.split(1)
    ]  # fmt: skip
    for name in ("next_token_loss", "second_token_loss"):
        total = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(total, getattr(whole, name), rtol=1e-5, atol=1e-6)


def test_heldout_loss_is_a_mean_over_targets_whatever_the_batch(model):
    ids = batches()
    expected = model.eval()(input_ids=ids, labels=ids).next_token_loss.item()
    for micro_batch in (1, 3, 4):
        found = heldout_loss(model, {"prose": ids.int()}, micro_batch=micro_batch)["prose"]
        assert found == pytest.approx(expected, rel=1e-5)
    shares = []
    for rank in range(3):  # 4 rows over 3 ranks: the last rank repeats one without counting it
        heldout_loss(
            model,
            {"prose": ids.int()},
            micro_batch=2,
            rank=rank,
            world_size=3,
            reduce=lambda s: shares.append(s.clone()),
        )
    loss, targets = sum(shares)[0]
    assert (loss / targets).item() == pytest.approx(expected, rel=1e-5)
