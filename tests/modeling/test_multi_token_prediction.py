"""The second-token layer: the formula, what it sees, how its losses enter the total."""

import pytest
import torch

from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.multi_token_prediction import next_token_mask, second_token_config, split_streams
from tests.modeling.tiny_models import (
    ROUTERS,
    assert_same_but_for_rounding,
    random_ids,
    spread_weights,
    tiny_config,
    tiny_model,
)


def mtp_logits(model, ids, **arguments):
    with torch.no_grad():
        return model(ids, output_mtp_logits=True, **arguments).mtp_logits


@pytest.mark.parametrize("kind", ROUTERS)
def test_prediction_sees_the_next_token_and_nothing_later(kind):
    model = spread_weights(tiny_model(kind, sparse_variance="valid_keys")).eval()
    ids = random_ids(1, 20)
    changed = ids.clone()
    changed[:, 12:] = random_ids(1, 8, seed=9)
    first, second = mtp_logits(model, ids), mtp_logits(model, changed)
    assert torch.allclose(first[:, :11], second[:, :11], atol=1e-5)
    assert not torch.allclose(first[:, 11], second[:, 11], atol=1e-3)


@pytest.mark.parametrize("stack", ["sequential", "midpoint"])
def test_block_is_the_formula(stack):
    model = spread_weights(tiny_model("flat", mtp_stack=stack, frac_bits=20)).eval()
    layer = model.mtp.layer
    ids = random_ids(2, 10)
    with torch.no_grad():
        outputs = model.model(ids)
        hidden, ctx = outputs.last_hidden_state, outputs.context
        embeds = torch.cat([outputs.embeddings[:, 1:], torch.zeros(2, 1, 64)], dim=1)
        keep = torch.ones(2, 10, dtype=torch.bool)
        keep[:, -1] = False
        ctx = LayerContext(ctx.position_ids, keep, rotary=ctx.rotary)
        p0 = split_streams(torch.cat([hidden, embeds], -1) @ model.mtp.fusion_proj.weight.T, 4)
        mixed, _ = layer.mixer_connection(p0, lambda x: layer.mixer(x, ctx))
        if stack == "midpoint":
            mixed = 7 / 8 * p0 + 1 / 8 * mixed
        out, _ = layer.mlp_connection(mixed, lambda x: layer.mlp(x, ctx))
        if stack == "midpoint":
            out = 0.5 * p0 + 0.5 * out
        expected = model._logits(model.model.norm(out.mean(2)))
    assert_same_but_for_rounding(mtp_logits(model, ids), expected, frac_bits=20)


def test_tokens_without_a_next_token_are_masked():
    positions = torch.zeros(2, 4, dtype=torch.long)
    keep = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    assert next_token_mask(LayerContext(positions, keep)).tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    documents = torch.tensor([[0, 0, 1, 1], [5, 5, 5, 6]])
    assert next_token_mask(LayerContext(positions, None, documents)).tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]


def test_experts_of_the_layer_follow_the_config():
    grouped = second_token_config(tiny_config("grouped"))
    assert (grouped.num_experts, grouped.num_experts_per_tok, grouped.router_layout) == (4, 2, "flat")
    assert second_token_config(tiny_config("flat", num_experts=6)).num_experts == 6
    assert second_token_config(tiny_config("dense")).num_experts == 0
    with pytest.raises(ValueError, match=r"config\.mtp_num_experts_per_tok = 1"):
        tiny_config("flat", mtp_num_experts_per_tok=1)


def test_weight_and_auxiliary_loss_enter_the_total():
    ids = random_ids(2, 24)
    for counted in (True, False):
        model = tiny_model("published softmax", mtp_aux=counted, mtp_loss_weight=0.5)
        out = model(ids, labels=ids)
        assert torch.isclose(out.loss, out.next_token_loss + 0.5 * out.second_token_loss + out.aux_loss)
        own = model.model(ids).aux_loss * model.config.aux_loss_scale
        assert (out.aux_loss - own > 1e-4) == counted


def test_layer_trains_and_the_head_sums_both_losses():
    model = tiny_model("flat").train()
    ids = random_ids(2, 24)
    out = model(ids, labels=ids)
    out.loss.backward()
    assert all(p.grad is not None for p in model.mtp.parameters())
    total = model.lm_head.weight.grad
    parts = []
    for term in ("next_token_loss", "second_token_loss"):
        model.zero_grad()
        getattr(model(ids, labels=ids), term).backward()
        parts.append(model.lm_head.weight.grad)
    assert torch.allclose(total, parts[0] + 0.3 * parts[1], atol=1e-6)


def test_without_the_layer_its_logits_are_refused():
    model = tiny_model("dense", num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"config\.num_nextn_predict_layers"):
        model(random_ids(1, 4), output_mtp_logits=True)
    assert model(random_ids(1, 4), labels=random_ids(1, 4)).second_token_loss is None
