"""Another tokenizer: what is known of a token follows its bytes."""

import json

import pytest
import torch
from small_checkpoints import VOCABULARY, read_all, small_config, write_checkpoint, write_tokenizer

from growth.errors import GrowthError
from growth.receipt import load_model
from growth.verify import verify
from lightninglm.checkpoint import CheckpointReader
from lightninglm.modeling.byte_embedding import token_bytes

HEAD = "lm_head.weight"


@pytest.fixture
def larger(tmp_path):
    """The tokens of the source in reverse order, and two more."""
    return write_tokenizer(tmp_path / "larger", reverse=True, more=["<|user|>", "<|tool|>"])


def test_rows_follow_the_bytes_of_their_tokens(mixture, grown, larger, heldout):
    target = grown(mixture, "resize_vocabulary", heldout=heldout, tokenizer=str(larger))
    old, new = read_all(mixture), read_all(target)
    before, after = token_bytes(mixture / "tokenizer.json"), token_bytes(target / "tokenizer.json")
    assert new[HEAD].shape == (VOCABULARY + 2, 32) and load_model(target).config.vocab_size == VOCABULARY + 2
    for index, token in enumerate(after):
        for part in ("", ".exp_avg", ".exp_avg_sq"):
            if token in before:
                assert torch.equal(new[HEAD + part][index], old[HEAD + part][before.index(token)])
    fresh = [index for index, token in enumerate(after) if token not in before]
    assert len(fresh) == 2
    torch.testing.assert_close(new[HEAD][fresh], old[HEAD].mean(0).expand(2, -1))
    assert not new[f"{HEAD}.exp_avg"][fresh].any()
    torch.testing.assert_close(new[f"{HEAD}.exp_avg_sq"][fresh], old[f"{HEAD}.exp_avg_sq"].mean(0).expand(2, -1))
    same = [name for name in old if not name.startswith(HEAD)]
    assert all(torch.equal(old[name], new[name]) for name in same)


def test_the_receipt_compares_losses_on_the_same_text(mixture, grown, larger, heldout):
    """Two more tokens, each as likely as an average one of 257, take about log(1 + 2/257) from every other token."""
    target = grown(mixture, "resize_vocabulary", heldout=heldout, tokenizer=str(larger))
    receipt = json.loads((target / "growth_receipt.json").read_text())
    assert receipt["details"] == {"tokens_kept": VOCABULARY, "tokens_new": 2, "tokens_dropped": 0}
    measured = receipt["measured"]
    assert measured["unit"] == "nats per byte" and measured["logits"]["relative"] is None
    for loss in measured["heldout"].values():
        assert 0 < loss["after"] - loss["before"] < 0.03
    assert verify(mixture, target, heldout, progress=False)["passed"]


def test_the_same_tokens_in_another_order_are_the_same_model(mixture, grown, tmp_path, heldout):
    tokenizer = write_tokenizer(tmp_path / "reversed", reverse=True)
    target = grown(mixture, "resize_vocabulary", heldout=heldout, tokenizer=str(tokenizer))
    for loss in json.loads((target / "growth_receipt.json").read_text())["measured"]["heldout"].values():
        assert loss["after"] == pytest.approx(loss["before"], abs=1e-5)


def test_tokens_can_be_dropped_and_random_rows_are_seeded(mixture, grown, tmp_path, larger):
    smaller = write_tokenizer(tmp_path / "smaller", drop=5)
    folder = grown(mixture, "resize_vocabulary", tokenizer=str(smaller))
    assert json.loads((folder / "growth_receipt.json").read_text())["details"]["tokens_dropped"] == 5
    first, again = (
        read_all(grown(mixture, "resize_vocabulary", tokenizer=str(larger), strategy="random"))[HEAD] for _ in range(2)
    )
    assert torch.equal(first, again)
    assert first[-2:].std() == pytest.approx(0.02, rel=0.5)


def test_special_tokens_keep_their_meaning(mixture, grown, larger, tmp_path, tokenizer):
    source = write_checkpoint(tmp_path / "source", small_config(eos_token_id=256, bos_token_id=10), tokenizer)
    target = grown(source, "resize_vocabulary", tokenizer=str(larger))
    config, after = CheckpointReader(target).config, token_bytes(larger / "tokenizer.json")
    assert after[config["eos_token_id"]] == b"<|end|>"
    assert after[config["bos_token_id"]] == token_bytes(tokenizer / "tokenizer.json")[10]
    lacking = write_tokenizer(tmp_path / "lacking", special="<|other|>")
    with pytest.raises(GrowthError, match=r"lacks b'<\|end\|>', the model's config.eos_token_id"):
        grown(source, "resize_vocabulary", tokenizer=str(lacking))


def test_tokenizers_that_cannot_be_used(mixture, grown, tmp_path):
    with pytest.raises(GrowthError, match=r"has no tokenizer\.json"):
        grown(mixture, "resize_vocabulary", tokenizer=str(tmp_path))
    with pytest.raises(GrowthError, match="nothing to change"):
        grown(mixture, "resize_vocabulary", tokenizer=str(write_tokenizer(tmp_path / "same")))
    long = write_tokenizer(tmp_path / "long", more=["x" * 40])
    with pytest.raises(GrowthError, match=r"cannot use this tokenizer: token .* has 40 bytes"):
        grown(mixture, "resize_vocabulary", tokenizer=str(long))
