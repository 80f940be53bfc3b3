"""Optimizer state crosses growth by the written rule, for every kind of tensor (docs/growth.md)."""

import torch
from small_checkpoints import MIXTURE, read_all, small_config, write_checkpoint

from lightninglm.checkpoint import CheckpointReader

PARTS = ("exp_avg", "exp_avg_sq")


def state(tensors, name):
    return [tensors[f"{name}.{part}"] for part in PARTS]


def assert_state(tensors, name, exp_avg, exp_avg_sq):
    torch.testing.assert_close(tensors[f"{name}.exp_avg"], exp_avg, rtol=1e-6, atol=0)
    torch.testing.assert_close(tensors[f"{name}.exp_avg_sq"], exp_avg_sq, rtol=1e-6, atol=0)


def assert_zero(tensors, name):
    assert_state(tensors, name, torch.zeros_like(tensors[name]), torch.zeros_like(tensors[name]))


def test_copied_tensors_keep_their_state(dense, grown):
    old, new = read_all(dense), read_all(grown(dense, "dense_to_moe", num_experts=6))
    for name in ("lm_head.weight", "model.layers.1.mixer.indexer.gate_bias", "mtp.fusion_proj.weight"):
        assert torch.equal(new[name], old[name])
        assert_state(new, name, *state(old, name))
    for matrix in ("gate_proj", "up_proj", "down_proj"):  # the shared expert is the dense FFN
        parent, shared = f"mtp.layer.mlp.{matrix}.weight", f"mtp.layer.mlp.shared_expert.{matrix}.weight"
        assert torch.equal(new[shared], old[parent])
        assert_state(new, shared, *state(old, parent))


def test_slices_take_their_slice_and_new_tensors_start_at_zero(dense, grown):
    old, new = read_all(dense), read_all(grown(dense, "dense_to_moe", num_experts=6))
    block = "model.layers.2.mlp"
    for expert in range(6):
        rows = new[f"{block}.experts.{expert}.gate_proj.weight"]
        units = [int((old[f"{block}.gate_proj.weight"] == row).all(1).nonzero()) for row in rows]
        for matrix in ("gate_proj", "up_proj"):
            name, parent = f"{block}.experts.{expert}.{matrix}.weight", f"{block}.{matrix}.weight"
            assert torch.equal(new[name], old[parent][units])
            assert_state(new, name, *(part[units] for part in state(old, parent)))
        assert_zero(new, f"{block}.experts.{expert}.down_proj.weight")
    assert_zero(new, f"{block}.router.weight")


def test_clones_share_their_parents_gradient(mixture, grown):
    old, new = read_all(mixture), read_all(grown(mixture, "multiply_experts", num_experts=24))
    clones = 4
    for expert in range(24):
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.3.mlp.experts.{expert}.{matrix}.weight"
            parent = f"model.layers.3.mlp.experts.{expert // clones}.{matrix}.weight"
            exp_avg, exp_avg_sq = state(old, parent)
            assert torch.equal(new[name], old[parent])
            assert_state(new, name, exp_avg / clones, exp_avg_sq / clones**2)
    router = "model.layers.3.mlp.router"
    assert_state(new, f"{router}.group.weight", *state(old, f"{router}.weight"))
    assert_zero(new, f"{router}.member.weight")


def test_a_clones_adam_step_is_its_parents(mixture, grown):
    """With the gradient a clone gets, 1 / M of its parent's, AdamW moves it exactly as the parent would have moved."""
    old, new = read_all(mixture), read_all(grown(mixture, "multiply_experts", num_experts=18))
    parent, clone = "model.layers.0.mlp.experts.1.up_proj.weight", "model.layers.0.mlp.experts.4.up_proj.weight"
    gradient = torch.randn(old[parent].shape, generator=torch.Generator().manual_seed(0))
    moved = []
    for tensors, name, share in ((old, parent, 1), (new, clone, 3)):
        weight = torch.nn.Parameter(tensors[name].clone())
        optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
        optimizer.state[weight] = dict(zip(PARTS, state(tensors, name), strict=True), step=torch.tensor(297.0))
        weight.grad = gradient / share
        optimizer.step()
        moved.append(weight.detach())
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-6, atol=1e-8)


def test_zero_step_copies_start_fresh_and_first_appearances_keep_their_state(mixture, grown):
    old, new = read_all(mixture), read_all(grown(mixture, "deepen", source_layers=[0, 1, 2, 3, 0, 1, 2, 3]))
    for rest in ("mixer.q_proj.weight", "mlp.experts.2.down_proj.weight", "mlp.router.weight", "mlp_connection.b_res"):
        parent = f"model.layers.1.{rest}"
        assert_state(new, f"model.layers.1.{rest}", *state(old, parent))
        assert torch.equal(new[f"model.layers.5.{rest}"], old[parent])
        assert_zero(new, f"model.layers.5.{rest}")


def test_frozen_experts_have_no_state_and_adapters_start_fresh(quantizable, grown):
    new = read_all(grown(quantizable, "quantize_experts", rank=4, group_size=32))
    expert = "model.layers.0.mlp.experts.0.gate_proj"
    assert not [name for name in new if name.startswith(f"{expert}.codes.") or name.startswith(f"{expert}.weight")]
    assert_zero(new, f"{expert}.A")
    assert_zero(new, f"{expert}.B")
    assert torch.count_nonzero(new[f"{expert}.A"]) == 0 and torch.count_nonzero(new[f"{expert}.B"]) > 0


def test_noisy_clones_keep_the_clone_rule(mixture, grown):
    old, new = read_all(mixture), read_all(grown(mixture, "multiply_experts", num_experts=12, noise=0.1))
    parent = "model.layers.0.mlp.experts.0"
    exp_avg, exp_avg_sq = state(old, f"{parent}.gate_proj.weight")
    assert torch.equal(new["model.layers.0.mlp.experts.0.gate_proj.weight"], old[f"{parent}.gate_proj.weight"])
    noise = new["model.layers.0.mlp.experts.1.gate_proj.weight"] - old[f"{parent}.gate_proj.weight"]
    assert 0.08 < noise.std() / old[f"{parent}.gate_proj.weight"].std() < 0.12
    assert_state(new, "model.layers.0.mlp.experts.1.gate_proj.weight", exp_avg / 2, exp_avg_sq / 4)
    assert torch.equal(new["model.layers.0.mlp.experts.1.down_proj.weight"], old[f"{parent}.down_proj.weight"])


def test_scaled_slices_keep_the_moments_unscaled(dense, grown):
    old, new = read_all(dense), read_all(grown(dense, "dense_to_moe", num_experts=4, strategy="scaled_halves"))
    parent, shared = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.shared_expert.down_proj.weight"
    assert torch.equal(new[shared], old[parent] * 0.5)
    assert_state(new, shared, *state(old, parent))


def test_dropped_moments_are_a_fresh_adam(mixture, grown):
    target = grown(mixture, "multiply_experts", moments=False, num_experts=12)
    new = read_all(target)
    optimizer = [tensor for name, tensor in new.items() if name.endswith(PARTS)]
    assert optimizer and not any(tensor.any() for tensor in optimizer)
    assert CheckpointReader(target).trainer_state["adam_step"] == 0


def test_bf16_weights_are_their_masters_rounded(tmp_path, tokenizer, grown):
    config = small_config(**MIXTURE)

    def finer_master(name, tensor):  # what training leaves: a master copy with bits that the weight does not have
        return tensor * (1 + 2**-12) if name.endswith(".master") else tensor

    source = write_checkpoint(tmp_path / "source", config, tokenizer, dtype=torch.bfloat16, edit=finer_master)
    old = read_all(source)
    new = read_all(grown(source, "multiply_experts", num_experts=12, noise=0.1))
    masters = [name for name in new if name.endswith(".master")]
    assert len(masters) > 100
    for name in masters:
        assert torch.equal(new[name].bfloat16(), new[name.removesuffix(".master")])
    clone, parent = "model.layers.0.mlp.experts.5.up_proj.weight", "model.layers.0.mlp.experts.2.up_proj.weight"
    assert new[clone].dtype == torch.bfloat16
    assert torch.equal(new["lm_head.weight.master"], old["lm_head.weight.master"])
    assert (new[f"{clone}.master"] - old[f"{parent}.master"]).std() > 0
    assert new["model.layers.0.mlp.router.member.weight"].dtype == torch.float32
