"""Stages without a growth step, and other ways to run the same weights."""

import json

import pytest
import torch
from small_checkpoints import TRAINER_STATE, read_all, rewrite_config, small_config, write_checkpoint

import growth.chain
from growth.chain import grow_chain
from growth.errors import GrowthError
from growth.receipt import load_model
from growth.verify import verify
from lightninglm.checkpoint import CheckpointReader, remove_leftovers


@pytest.mark.parametrize("name", ["dense", "mixture", "quantizable"])
def test_a_chain_without_steps_copies_everything_into_the_new_stage(name, request, tmp_path, heldout):
    source = request.getfixturevalue(name)
    target = tmp_path / "stage" / "step-00000000"
    (receipt,) = grow_chain(source, target, [], stage="stage", seed=0, heldout=heldout, progress=False)
    before, after = CheckpointReader(source), CheckpointReader(target, verify="full")
    assert after.manifest["tensors"] == before.manifest["tensors"]
    assert all(after.config[key] == value for key, value in before.config.items())
    state = after.trainer_state
    assert (state["stage"], state["step"], state["adam_step"]) == ("stage", 0, TRAINER_STATE["adam_step"])
    assert state["data"]["domain_offsets"] == TRAINER_STATE["data"]["next_domain_offsets"]
    assert (receipt["operator"], receipt["passed"]) == ("carry_over", True)
    assert receipt["measured"]["logits"]["max_absolute"] == 0
    assert receipt["tensors"]["derived"] == receipt["tensors"]["new"] == 0
    assert verify(source, target, None, progress=False)["passed"]


def test_unfinished_ramps_go_on_and_unfinished_warmups_start_again(mixture, grown, tmp_path, tokenizer):
    deeper = grown(mixture, "deepen", source_layers=[0, 1, 2, 3, 0, 1], ramp_steps=10)
    config, state = CheckpointReader(deeper).config, CheckpointReader(deeper).trainer_state
    ramp = state["ramps"]["step_size"]
    halfway = [0.5 * (a + b) for a, b in zip(ramp["from"], ramp["to"], strict=True)]
    shape = {key: config[key] for key in ("num_hidden_layers", "layer_types", "blends", "num_experts")}
    reached = small_config(**shape, step_sizes=halfway)
    trained = write_checkpoint(tmp_path / "trained", reached, tokenizer, state={**state, "step": 5})
    target = tmp_path / "stage" / "step-00000000"
    grow_chain(trained, target, [], stage="stage", seed=0, heldout=None, progress=False)
    carried = CheckpointReader(target).trainer_state
    assert carried["ramps"]["step_size"] == {"from": halfway, "to": ramp["to"], "steps": 5}
    assert carried["new_tensors"]["names"] == state["new_tensors"]["names"]


def test_a_chain_killed_before_it_cleaned_up_leaves_what_the_next_run_removes(dense, tmp_path, monkeypatch):
    def killed(folder):
        raise KeyboardInterrupt

    steps = [{"dense_to_moe": {"num_experts": 4}}, {"multiply_experts": {"num_experts": 8}}]
    target = tmp_path / "step-00000000"
    monkeypatch.setattr(growth.chain, "remove_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        grow_chain(dense, target, steps, stage="s", seed=1, heldout=None, progress=False)
    monkeypatch.undo()
    assert CheckpointReader(target, verify="full").trainer_state["stage"] == "s"
    assert [path.name for path in remove_leftovers(tmp_path)] == [".tmp-grow-1-dense_to_moe"]
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_switching_the_stack_keeps_every_tensor_and_says_what_it_costs(tmp_path, tokenizer, heldout, grown):
    source = write_checkpoint(tmp_path / "source", small_config(stack="sequential"), tokenizer)
    target = grown(source, "switch_stack", heldout=heldout, stack="midpoint", mtp_stack="midpoint")
    old, new = read_all(source), read_all(target)
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    config = load_model(target).config
    assert (config.stack, config.mtp_stack) == ("midpoint", "midpoint")
    receipt = json.loads((target / "growth_receipt.json").read_text())
    assert receipt["passed"] and receipt["tolerance"]["relative_logit_difference"] is None
    assert receipt["measured"]["logits"]["relative"] > 1e-3
    with pytest.raises(GrowthError, match="nothing to switch"):
        grown(target, "switch_stack", stack="midpoint")


def test_a_configuration_changed_after_growth_is_named(mixture, grown, tmp_path):
    target = grown(mixture, "carry_over")
    bad = rewrite_config(target, tmp_path / "bad", {"logit_softcap": 30.0})
    findings = verify(mixture, bad, None, progress=False)["findings"]
    assert [finding["tensor"] for finding in findings] == ["config.logit_softcap"]
