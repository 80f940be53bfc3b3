"""What a stage needs to go on after a growth: counters, data position, ramps, warm-ups, lineage, balance."""

import json

import pytest
import torch
from small_checkpoints import MIXTURE, TRAINER_STATE, read_all, small_config, write_checkpoint

from growth.chain import grow_chain
from lightninglm.checkpoint import CheckpointReader


def trainer_state(folder):
    return CheckpointReader(folder).trainer_state


def test_the_new_stage_starts_where_the_old_one_stopped(mixture, grown, heldout):
    target = grown(mixture, "multiply_experts", heldout=heldout, num_experts=12)
    state, old = trainer_state(target), TRAINER_STATE
    assert (state["stage"], state["step"], state["tokens"], state["finished"]) == ("next", 0, 0, False)
    assert state["data"]["position"] == 0
    assert state["data"]["domain_offsets"] == old["data"]["next_domain_offsets"]
    assert state["adam_step"] == old["adam_step"]
    assert state["lineage_tokens"] == old["lineage_tokens"]
    assert state["lineage"][:-2] == old["lineage"]
    assert state["lineage"][-2]["stage"] == "parent" and state["lineage"][-2]["steps"] == 300
    summary, receipt = state["lineage"][-1]["growth"], json.loads((target / "growth_receipt.json").read_text())
    assert summary["relative_logit_difference"] == receipt["measured"]["logits"]["relative"]
    assert summary["heldout_after"].keys() == {"code", "english"}


def test_new_tensors_are_listed_by_their_names_in_memory(mixture, grown):
    names = trainer_state(grown(mixture, "multiply_experts", num_experts=12))["new_tensors"]["names"]
    assert names == [f"model.layers.{i}.mlp.router.member.weight" for i in range(4)]


def test_tensors_that_have_not_warmed_up_stay_new_through_the_next_growth(dense, grown):
    moe = grown(dense, "dense_to_moe", num_experts=4)
    first = set(trainer_state(moe)["new_tensors"]["names"])
    assert "model.layers.0.mlp.experts.down_proj.weight" in first
    assert "model.layers.0.mlp.experts.up_proj.weight" not in first
    deeper = set(trainer_state(grown(moe, "deepen", source_layers=[0, 1, 2, 3, 0, 1]))["new_tensors"]["names"])
    assert first < deeper
    assert "model.layers.4.mixer.q_proj.weight" in deeper
    assert not any(name.startswith("model.layers.2.mixer.") for name in deeper)


def test_deepen_records_the_ramp_to_the_parents_step_sizes(mixture, grown):
    target = grown(mixture, "deepen", source_layers=[0, 1, 2, 3, 0, 1, 2, 3], ramp_steps=7)
    ramp = trainer_state(target)["ramps"]["step_size"]
    assert ramp["from"] == [0.125, 0.25, 0.25, 0.25, 0, 0, 0, 0]
    assert ramp["to"] == [0.125] + [0.25] * 7  # a copy of the half-step first layer takes a whole step
    assert ramp["steps"] == 7
    assert CheckpointReader(target).config["step_sizes"] == ramp["from"]
    assert read_all(target)["model.step_size"].tolist() == ramp["from"]


@pytest.mark.parametrize("strategy", ["paper", "stack"])
def test_full_steps_at_once_need_no_ramp(strategy, mixture, grown):
    target = grown(mixture, "deepen", source_layers=[0, 1, 2, 3, 0, 1, 2, 3], strategy=strategy)
    assert trainer_state(target)["ramps"] == {}
    assert CheckpointReader(target).config["step_sizes"] == [0.125] + [0.25] * 7


def test_an_unfinished_ramp_goes_on_after_another_growth(mixture, grown):
    deeper = grown(mixture, "deepen", source_layers=[0, 1, 2, 3, 2, 3])
    ramp = trainer_state(deeper)["ramps"]["step_size"]
    assert trainer_state(grown(deeper, "multiply_experts", num_experts=12))["ramps"]["step_size"] == ramp


def test_balance_biases_and_averages_cross(mixture, grown):
    old = read_all(mixture)
    new = read_all(grown(mixture, "multiply_experts", num_experts=18))
    router = "model.layers.2.mlp.router"
    assert torch.equal(new[f"{router}.group_bias"], old[f"{router}.logit_bias"])
    assert torch.equal(new[f"{router}.group_usage_ema"], old[f"{router}.usage_ema"])
    assert not new[f"{router}.member_bias"].any()
    assert torch.equal(new[f"{router}.member_usage_ema"], torch.full((6, 3), 1 / 3))
    for name in ("model.layers.1.mixer.variance_ema", "mtp.layer.mlp.router.logit_bias"):
        assert torch.equal(new[name], old[name])


def test_a_chain_applies_its_steps_and_leaves_only_the_last(dense, tmp_path, heldout):
    steps = [
        {"dense_to_moe": {"num_experts": 4}},
        {"deepen": {"source_layers": [0, 1, 2, 3, 0, 1]}},
        {"multiply_experts": {"num_experts": 8}},
    ]
    target = tmp_path / "stage" / "step-00000000"
    receipts = grow_chain(dense, target, steps, stage="stage", seed=1, heldout=heldout, progress=False)
    assert [receipt["operator"] for receipt in receipts] == ["dense_to_moe", "deepen", "multiply_experts"]
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    state = trainer_state(target)
    assert [*map(len, state["lineage"][:2])] == [4, 4]
    assert [entry["growth"]["operator"] for entry in state["lineage"][2:]] == [next(iter(step)) for step in steps]
    assert state["data"]["domain_offsets"] == TRAINER_STATE["data"]["next_domain_offsets"]
    assert receipts[0]["measured"]["heldout"]["code"]["before"] == pytest.approx(
        receipts[2]["measured"]["heldout"]["code"]["after"], abs=1e-6
    )


def test_an_interrupted_chain_goes_on_from_its_last_step(dense, tmp_path, monkeypatch):
    import growth.chain

    steps = [{"dense_to_moe": {"num_experts": 4}}, {"multiply_experts": {"num_experts": 8}}]
    target = tmp_path / "step-00000000"
    run, ran = growth.chain.grow, []

    def interrupted(source, target, operator, options, **settings):
        ran.append(operator)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run(source, target, operator, options, **settings)

    monkeypatch.setattr(growth.chain, "grow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grow_chain(dense, target, steps, stage="s", seed=1, heldout=None, progress=False)
    assert not target.exists()
    grow_chain(dense, target, steps, stage="s", seed=1, heldout=None, progress=False)
    assert ran == ["dense_to_moe", "multiply_experts", "multiply_experts"]
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_an_intermediate_of_another_chain_is_not_reused(dense, tmp_path):
    target = tmp_path / "step-00000000"
    leftover = [{"dense_to_moe": {"num_experts": 6}}]
    grow_chain(dense, tmp_path / ".tmp-grow-1-dense_to_moe", leftover, stage="s", seed=1, heldout=None, progress=False)
    steps = [{"dense_to_moe": {"num_experts": 4}}, {"multiply_experts": {"num_experts": 8}}]
    grow_chain(dense, target, steps, stage="s", seed=1, heldout=None, progress=False)
    assert CheckpointReader(target).config["num_expert_groups"] == 4


def test_mixture_fixture_is_not_at_its_initial_balance(mixture):
    assert read_all(mixture)["model.layers.0.mlp.router.logit_bias"].abs().min() > 0


def test_step_sizes_of_config_and_buffer_must_agree(tmp_path, tokenizer, grown):
    def other(name, tensor):
        return tensor * 2 if name == "model.step_size" else tensor

    source = write_checkpoint(tmp_path / "source", small_config(**MIXTURE), tokenizer, edit=other)
    with pytest.raises(ValueError, match=r"model\.step_size"):
        grown(source, "multiply_experts", num_experts=12)
