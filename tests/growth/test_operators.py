"""Each strategy makes the tensors that its description says."""

import pytest
import torch
from small_checkpoints import read_all, small_config, write_checkpoint

from growth.operator import balanced_draw
from growth.receipt import load_model
from lightninglm.checkpoint import CheckpointReader
from lightninglm.modeling.quantized_experts import merge_expert, shared_tensors
from lightninglm.modeling.quantizers import snr_db

MATRICES = ("gate_proj", "up_proj", "down_proj")


def expert(tensors, block, index):
    return {matrix: tensors[f"{block}.experts.{index}.{matrix}.weight"] for matrix in MATRICES}


def dense_units(tensors, block, rows):
    """Which units of a dense gate the rows are."""
    return [int((tensors[f"{block}.gate_proj.weight"] == row).all(1).nonzero()) for row in rows]


@pytest.mark.parametrize("experts,size,units", [(20, 24, 48), (7, 5, 16), (3, 16, 16), (11, 13, 17)])
def test_balanced_draw_uses_every_unit_equally_often(experts, size, units):
    draw = balanced_draw(experts, size, units, torch.Generator().manual_seed(0))
    assert draw.shape == (experts, size)
    assert all(len(set(row)) == size for row in draw.tolist())
    counts = draw.flatten().bincount(minlength=units)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("block", ["model.layers.1.mlp", "mtp.layer.mlp"])
def test_paper_experts_are_the_same_units_of_gate_up_and_down(block, dense, grown):
    old, new = read_all(dense), read_all(grown(dense, "dense_to_moe", num_experts=6, strategy="paper"))
    drawn = []
    for index in range(6):
        tensors = expert(new, block, index)
        units = dense_units(old, block, tensors["gate_proj"])
        assert torch.equal(tensors["up_proj"], old[f"{block}.up_proj.weight"][units])
        assert torch.equal(tensors["down_proj"], old[f"{block}.down_proj.weight"][:, units])
        drawn.append(tuple(units))
    assert len(set(drawn)) == 6


def test_scaled_halves_sum_to_the_dense_ffn_on_average(dense, grown):
    """With all experts weighted equally and a balanced draw, shared + routed is the dense FFN exactly."""
    old, new = read_all(dense), read_all(grown(dense, "dense_to_moe", num_experts=6, strategy="scaled_halves"))
    block = "model.layers.0.mlp"
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))

    def ffn(gate, up, down):
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    dense_out = ffn(*(old[f"{block}.{matrix}.weight"] for matrix in MATRICES))
    shared = ffn(*(new[f"{block}.shared_expert.{matrix}.weight"] for matrix in MATRICES))
    routed = sum(ffn(*expert(new, block, index).values()) for index in range(6)) / 6
    torch.testing.assert_close(shared + routed, dense_out, rtol=1e-5, atol=1e-6)


def test_clones_are_equal_and_drop_upcycling_redraws_the_stated_share(dense, grown):
    block = "model.layers.0.mlp"
    clones = read_all(grown(dense, "dense_to_moe", num_experts=4, strategy="clones", expert_size=48))
    dropped = read_all(
        grown(dense, "dense_to_moe", num_experts=4, strategy="drop_upcycling", expert_size=48, drop_ratio=0.25)
    )
    for index in range(4):
        for matrix in MATRICES:
            assert torch.equal(expert(clones, block, index)[matrix], expert(clones, block, 0)[matrix])
        changed = [
            (expert(dropped, block, index)[matrix] != expert(clones, block, index)[matrix]).any(
                int(matrix != "down_proj")
            )
            for matrix in MATRICES
        ]
        assert changed[0].sum() == 12
        assert torch.equal(changed[0], changed[1]) and torch.equal(changed[0], changed[2])


def test_a_wider_second_token_layer_gets_its_own_draw(tmp_path, tokenizer, grown):
    source = write_checkpoint(
        tmp_path / "source", small_config(mtp_num_experts=8, mtp_num_experts_per_tok=2), tokenizer
    )
    new = read_all(grown(source, "dense_to_moe", num_experts=4))
    assert "mtp.layer.mlp.experts.7.gate_proj.weight" in new
    assert "model.layers.0.mlp.experts.4.gate_proj.weight" not in new


def test_exact_groups_hold_the_clones_of_their_parent_in_order(mixture, grown):
    target = grown(mixture, "multiply_experts", num_experts=18, members_per_group=3)
    old, new, config = read_all(mixture), read_all(target), CheckpointReader(target).config
    assert (config["num_expert_groups"], config["groups_per_token"], config["members_per_group"]) == (6, 2, 3)
    assert config["num_experts_per_tok"] == 6
    block = "model.layers.3.mlp"
    for index in range(18):
        for matrix in MATRICES:
            assert torch.equal(expert(new, block, index)[matrix], expert(old, block, index // 3)[matrix])
    assert torch.equal(new[f"{block}.router.group.weight"], old[f"{block}.router.weight"])
    member = new[f"{block}.router.member.weight"]
    assert member.std() == pytest.approx(0.02, rel=0.1) and member.unique(dim=0).shape[0] == 18
    assert torch.equal(new["mtp.layer.mlp.router.weight"], old["mtp.layer.mlp.router.weight"])


def test_paper_clones_are_clone_major_with_half_of_the_units_redrawn(mixture, grown):
    old, new = read_all(mixture), read_all(grown(mixture, "multiply_experts", num_experts=18, strategy="paper"))
    block = "model.layers.0.mlp"
    for index in range(18):
        parent, clone = expert(old, block, index % 6), expert(new, block, index)
        changed = [(clone[matrix] != parent[matrix]).any(int(matrix != "down_proj")) for matrix in MATRICES]
        assert changed[0].sum() == 12  # of 24 units
        assert torch.equal(changed[0], changed[1]) and torch.equal(changed[0], changed[2])
    parents, router = old[f"{block}.router.weight"], new[f"{block}.router.weight"]
    noise = router - parents.repeat(3, 1)
    assert 0.04 < noise.std() / parents.std() < 0.06
    assert not new[f"{block}.router.logit_bias"].any()


@pytest.mark.parametrize("strategy", ["paper", "duplicate"])
def test_a_published_second_token_layer_keeps_its_experts(tmp_path, tokenizer, grown, strategy):
    """Its softmax router becomes a sigmoid one, whose biases start anew; experts and router rows stay."""
    published = small_config(mode="published", num_experts=6, num_experts_per_tok=2, num_null_experts=6)
    source = write_checkpoint(tmp_path / "source", published, tokenizer)
    target = grown(source, "multiply_experts", num_experts=18, strategy=strategy)
    old, new, config = read_all(source), read_all(target), CheckpointReader(target).config
    assert (config["mtp_num_experts"], config["router_scoring"]) == (6, "sigmoid")
    block = "mtp.layer.mlp"
    assert torch.equal(new[f"{block}.router.weight"], old[f"{block}.router.weight"])
    for index in range(6):
        for matrix in MATRICES:
            assert torch.equal(expert(new, block, index)[matrix], expert(old, block, index)[matrix])
    assert f"{block}.experts.6.gate_proj.weight" not in new


def test_balance_options_reach_the_config(mixture, grown):
    target = grown(mixture, "multiply_experts", num_experts=12, balance="banded", balance_speed=5e-5)
    config = CheckpointReader(target).config
    assert (config["balance"], config["balance_speed"]) == ("banded", 5e-5)


def test_flatten_router_adds_the_rows_of_group_and_member(mixture, grown, heldout):
    many = grown(mixture, "multiply_experts", num_experts=18)
    flat = grown(many, "flatten_router", heldout=heldout)
    old, new = read_all(many), read_all(flat)
    router = "model.layers.1.mlp.router"
    for index in range(18):
        row = old[f"{router}.group.weight"][index // 3] + old[f"{router}.member.weight"][index]
        assert torch.equal(new[f"{router}.weight"][index], row)
    bias = old[f"{router}.group_bias"].repeat_interleave(3) + old[f"{router}.member_bias"].flatten() / 4
    assert torch.equal(new[f"{router}.logit_bias"], bias)
    assert load_model(flat).config.num_experts_per_tok == 4


@pytest.mark.parametrize("kind,target", [("int8", 43), ("int4", 20)])
def test_quantized_experts_are_their_parents_up_to_the_stated_noise(kind, target, quantizable, grown):
    folder = grown(quantizable, "quantize_experts", kind=kind, rank=4, group_size=32)
    old, new = read_all(quantizable), read_all(folder)
    config = load_model(folder).config
    for block, layer in (("model.layers.2.mlp", 2), ("mtp.layer.mlp", 4)):
        shared = shared_tensors(config, layer)
        for name, tensor in shared.items():
            assert torch.equal(new[f"{block}.experts.{name}"], tensor)
        prefix = f"{block}.experts.3."
        parts = {name.removeprefix(prefix): tensor for name, tensor in new.items() if name.startswith(prefix)}
        merged = merge_expert(parts, shared, config)
        for matrix in MATRICES:
            assert snr_db(old[f"{prefix}{matrix}.weight"], merged[matrix]) > target
