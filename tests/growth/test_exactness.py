"""Exact growth changes nothing that the model computes, with every module on and no parameter at its initial value."""

import json

import pytest
import torch
from small_checkpoints import VOCABULARY, small_config, write_checkpoint
from small_training import train

from growth.receipt import load_model

EXACT = {
    "dense_to_moe": {"num_experts": 6, "experts_per_token": 2},
    "deepen": {"source_layers": [0, 1, 2, 3, 0, 1, 2, 3]},
    "multiply_experts": {"num_experts": 18, "members_per_group": 2},
}


def outputs(folder):
    """Everything the model computes: logits, second-token logits, memory; with padding and a previous memory."""
    model = load_model(folder)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (3, 30), generator=random)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    memory = torch.randn(3, model.config.hidden_size, generator=random)
    with torch.no_grad():
        out = model(
            input_ids=ids, attention_mask=mask, prev_memory=memory, labels=ids, output_mtp_logits=True, use_cache=False
        )
    real = mask.bool()
    return out.logits[real], out.mtp_logits[real], out.memory, out.next_token_loss, out.second_token_loss


def relative(new, old):
    if new.dim() > 1:
        new, old = new - new.mean(-1, keepdim=True), old - old.mean(-1, keepdim=True)
    return ((new.double() - old.double()).norm() / old.double().norm()).item()


@pytest.mark.parametrize("operator", EXACT)
def test_exact_growth_preserves_every_output(operator, dense, mixture, grown, heldout):
    source = dense if operator == "dense_to_moe" else mixture
    target = grown(source, operator, heldout=heldout, **EXACT[operator])
    for new, old in zip(outputs(target), outputs(source), strict=True):
        assert relative(new, old) <= 1e-6
    receipt = json.loads((target / "growth_receipt.json").read_text())
    assert receipt["passed"]
    assert receipt["measured"]["logits"]["relative"] <= 1e-6
    assert receipt["measured"]["logits"]["second_token_relative"] <= 1e-6


def test_exact_growth_of_trained_models_changes_no_domain(dense, grown, heldout, tmp_path):
    """A lineage as in practice: train, grow, train on what was grown, grow again; every receipt on every domain."""
    folder = dense
    for i, (operator, options) in enumerate(EXACT.items()):
        trained = train(folder, 15, tmp_path / f"trained-{i}")
        folder = grown(trained, operator, heldout=heldout, **options)
        measured = json.loads((folder / "growth_receipt.json").read_text())["measured"]
        assert measured["logits"]["relative"] <= 1e-6
        assert measured["logits"]["second_token_relative"] <= 1e-6
        assert set(measured["heldout"]) == {"code", "english"}
        for loss in measured["heldout"].values():
            assert abs(loss["after"] - loss["before"]) <= 1e-4
        for new, old in zip(outputs(folder), outputs(trained), strict=True):
            assert relative(new, old) <= 1e-6


@pytest.mark.parametrize("operator", ["dense_to_moe", "deepen"])
def test_growth_by_zeros_and_zero_steps_is_bitwise(operator, dense, mixture, grown):
    source = dense if operator == "dense_to_moe" else mixture
    target = grown(source, operator, **EXACT[operator])
    for new, old in zip(outputs(target), outputs(source), strict=True):
        assert torch.equal(new, old)


@pytest.mark.parametrize("layers", [[0, 1, 0, 1, 2, 3, 2, 3], [0, 1, 0, 1, 0, 1, 2, 3], [0, 1, 2, 1, 2, 3, 2, 3]])
def test_deepen_is_exact_wherever_even_runs_are_inserted(layers, tmp_path, tokenizer, grown):
    config = small_config(layer_types=["linear_attention"] * 4, num_nextn_predict_layers=0)
    source = write_checkpoint(tmp_path / "source", config, tokenizer)
    target = grown(source, "deepen", source_layers=layers)
    model, old = load_model(target), load_model(source)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, old(input_ids=ids).logits)


def test_deepen_of_a_damped_stack_inserts_undamped_pairs(tmp_path, tokenizer, grown):
    source = write_checkpoint(tmp_path / "source", small_config(default_blend=0.5), tokenizer)
    target = grown(source, "deepen", source_layers=[0, 1, 2, 3, 0, 1])
    assert load_model(target).config.blends == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]
    for new, old in zip(outputs(target), outputs(source), strict=True):
        assert torch.equal(new, old)


def test_bf16_checkpoints_grow_exactly_too(tmp_path, tokenizer, grown):
    source = write_checkpoint(tmp_path / "source", small_config(), tokenizer, dtype=torch.bfloat16)
    mixture = grown(source, "dense_to_moe", num_experts=4)
    many = grown(mixture, "multiply_experts", num_experts=8)
    for new, old in zip(outputs(many), outputs(source), strict=True):
        assert relative(new, old) <= 1e-6


@pytest.mark.parametrize("strategy", ["paper", "scaled_halves", "clones", "drop_upcycling", "random"])
def test_other_ways_to_a_mixture_state_their_cost(strategy, dense, grown, heldout):
    target = grown(dense, "dense_to_moe", heldout=heldout, num_experts=6, strategy=strategy)
    receipt = json.loads((target / "growth_receipt.json").read_text())
    assert receipt["tolerance"]["relative_logit_difference"] is None and receipt["passed"]
    assert receipt["measured"]["logits"]["relative"] > 1e-4


@pytest.mark.parametrize("strategy", ["paper", "duplicate"])
def test_other_ways_to_many_experts_state_their_cost(strategy, mixture, grown, heldout):
    target = grown(mixture, "multiply_experts", heldout=heldout, num_experts=12, strategy=strategy)
    receipt = json.loads((target / "growth_receipt.json").read_text())
    assert receipt["measured"]["logits"]["relative"] > 1e-4


def test_residual_adapters_shrink_the_change(quantizable, grown, heldout):
    change = {}
    for residual in (False, True):
        target = grown(
            quantizable, "quantize_experts", heldout=heldout, kind="int4", group_size=32, rank=8, residual_init=residual
        )
        receipt = json.loads((target / "growth_receipt.json").read_text())
        change[residual] = receipt["measured"]["logits"]["second_token_relative"]
        assert receipt["passed"]
    assert change[True] < change[False]
