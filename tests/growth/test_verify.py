"""`verify` finds every silent failure in a grown checkpoint by name, though all of its hashes are consistent."""

import json
import shutil

import pytest
import torch
from small_checkpoints import plant_nan, read_all, rewrite, write_tokenizer

from growth.errors import GrowthError
from growth.verify import diff, verify
from lightninglm.checkpoint import CheckpointReader, CheckpointWriter


@pytest.fixture(scope="module")
def pair(mixture, tmp_path_factory):
    """A source and what multiply_experts made of it."""
    from growth.core import grow

    target = tmp_path_factory.mktemp("pair") / "target"
    grow(mixture, target, "multiply_experts", {"num_experts": 12}, stage="next", seed=3, progress=False)
    return mixture, target


def swap(tensors, a, b):
    for part in ("", ".exp_avg", ".exp_avg_sq"):
        tensors[a + part], tensors[b + part] = tensors[b + part], tensors[a + part]


BLOCK = "model.layers.1.mlp"


def stale_alias(tensors):
    tensors["stack.blocks.0.norm.weight"] = tensors["model.norm.weight"]


def missing_layer(tensors):
    for name in [name for name in tensors if name.startswith("model.layers.3.mixer.")]:
        del tensors[name]


def swapped_gate_and_up(tensors):
    swap(tensors, f"{BLOCK}.experts.5.gate_proj.weight", f"{BLOCK}.experts.5.up_proj.weight")


def clone_major_router(tensors):
    rows = tensors[f"{BLOCK}.router.member.weight"]
    tensors[f"{BLOCK}.router.member.weight"] = rows.view(6, 2, -1).transpose(0, 1).reshape(rows.shape)


def clone_major_experts(tensors):
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        swap(tensors, f"{BLOCK}.experts.1.{matrix}.weight", f"{BLOCK}.experts.6.{matrix}.weight")


def dropped_selection_bias(tensors):
    tensors[f"{BLOCK}.router.group_bias"].zero_()


def moments_of_another_parameter(tensors):
    a, b = "model.layers.0.mixer.q_proj.weight.exp_avg", "model.layers.0.mixer.k_proj.weight.exp_avg"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def undivided_moments(tensors):
    tensors[f"{BLOCK}.experts.3.down_proj.weight.exp_avg_sq"] *= 4


def bf16_router(tensors):
    tensors[f"{BLOCK}.router.group.weight"] = tensors[f"{BLOCK}.router.group.weight"].bfloat16()


def one_rounded_weight(tensors):
    tensors["lm_head.weight"][3, 4] *= 1 + 2**-20


@pytest.mark.parametrize(
    "fault,names",
    [
        (stale_alias, ["stack.blocks.0.norm.weight"]),
        (missing_layer, ["model.layers.3.mixer.q_proj.weight"]),
        (swapped_gate_and_up, [f"{BLOCK}.experts.5.gate_proj.weight", f"{BLOCK}.experts.5.up_proj.weight"]),
        (clone_major_router, [f"{BLOCK}.router.member.weight"]),
        (clone_major_experts, [f"{BLOCK}.experts.1.gate_proj.weight", f"{BLOCK}.experts.6.down_proj.weight"]),
        (dropped_selection_bias, [f"{BLOCK}.router.group_bias"]),
        (moments_of_another_parameter, ["model.layers.0.mixer.q_proj.weight.exp_avg"]),
        (undivided_moments, [f"{BLOCK}.experts.3.down_proj.weight.exp_avg_sq"]),
        (bf16_router, [f"{BLOCK}.router.group.weight"]),
        (one_rounded_weight, ["lm_head.weight"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_planted_failures_are_named(fault, names, pair, tmp_path):
    source, target = pair
    bad = rewrite(target, tmp_path / "bad", fault)
    result = verify(source, bad, None, progress=False)
    assert not result["passed"]
    found = {finding["tensor"] for finding in result["findings"]}
    assert found >= set(names)
    unrelated = {"model.embed_tokens.proj.weight", f"{BLOCK}.experts.0.gate_proj.weight"}
    assert not found & unrelated


def test_a_planted_nan_is_named(pair, tmp_path):
    source, target = pair
    bad = shutil.copytree(target, tmp_path / "bad")
    plant_nan(bad, f"{BLOCK}.experts.7.up_proj.weight")
    findings = verify(source, bad, None, progress=False)["findings"]
    assert [finding["tensor"] for finding in findings] == [f"{BLOCK}.experts.7.up_proj.weight"]


def test_an_odd_zero_step_insertion_is_named(mixture, grown, tmp_path):
    target = grown(mixture, "deepen", source_layers=[0, 1, 2, 3, 0, 1])
    tensors, reader = read_all(target), CheckpointReader(target)
    sizes = [*reader.config["step_sizes"][:5], 0.25]  # the second layer of the pair is on: an odd run of zero steps
    tensors["model.step_size"] = torch.tensor(sizes)
    receipt = {"growth_receipt.json": (target / "growth_receipt.json").read_bytes()}
    with CheckpointWriter(tmp_path / "bad") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        config = reader.config | {"step_sizes": sizes}
        writer.commit(config, reader.trainer_state, tokenizer_folder=target, extra_files=receipt)
    findings = verify(mixture, tmp_path / "bad", None, progress=False)["findings"]
    assert [finding["tensor"] for finding in findings] == ["config.json", "model.step_size", "config.step_sizes"]
    assert "1 zero-step layer(s) at 4..4; a run must have an even length" in findings[0]["found"]


def test_another_tokenizer_is_named(pair, tmp_path):
    source, target = pair
    tensors, reader = read_all(target), CheckpointReader(target)
    receipt = {"growth_receipt.json": (target / "growth_receipt.json").read_bytes()}
    with CheckpointWriter(tmp_path / "bad") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        other = write_tokenizer(tmp_path / "other", reverse=True)
        writer.commit(reader.config, reader.trainer_state, tokenizer_folder=other, extra_files=receipt)
    findings = verify(source, tmp_path / "bad", None, progress=False)["findings"]
    assert [finding["tensor"] for finding in findings] == ["tokenizer.json"]


def test_an_untouched_pair_passes_and_measures_what_the_receipt_says(mixture, grown, heldout):
    target = grown(mixture, "multiply_experts", heldout=heldout, num_experts=12)
    result = verify(mixture, target, heldout, progress=False)
    assert result["passed"] and result["replayed"] and not result["findings"]
    assert result["measured"] == json.loads((target / "growth_receipt.json").read_text())["measured"]


def test_a_changed_trainer_state_is_named(pair, tmp_path):
    source, target = pair
    bad = tmp_path / "bad"
    tensors, reader = read_all(target), CheckpointReader(target)
    state = reader.trainer_state | {"adam_step": 0.0}
    with CheckpointWriter(bad) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        receipt = {"growth_receipt.json": (target / "growth_receipt.json").read_bytes()}
        writer.commit(reader.config, state, tokenizer_folder=target, extra_files=receipt)
    findings = verify(source, bad, None, progress=False)["findings"]
    assert [finding["tensor"] for finding in findings] == ["trainer_state.adam_step"]


def test_another_source_is_named(pair, quantizable):
    findings = verify(quantizable, pair[1], None, progress=False)["findings"]
    assert [finding["tensor"] for finding in findings] == ["(source)"]


def test_a_pair_without_receipt_is_measured_only(mixture, tmp_path, heldout):
    same = rewrite(mixture, tmp_path / "same", lambda tensors: None)
    result = verify(mixture, same, heldout, progress=False)
    assert result["passed"] and not result["replayed"]

    def nudge(tensors):
        tensors["lm_head.weight"] += 1e-3

    other = rewrite(mixture, tmp_path / "other", nudge)
    assert not verify(mixture, other, heldout, progress=False)["passed"]


def test_diff_says_what_happened_to_each_tensor(dense, grown):
    target = grown(dense, "dense_to_moe", num_experts=4)
    rows = {row["tensor"]: row for row in diff(dense, target)["tensors"]}
    assert rows["lm_head.weight"]["status"] == "identical"
    shared = rows["model.layers.0.mlp.shared_expert.up_proj.weight"]
    assert (shared["status"], shared["same_as"]) == ("new", "model.layers.0.mlp.up_proj.weight")
    assert rows["model.layers.0.mlp.up_proj.weight"]["status"] == "removed"
    assert rows["model.layers.0.mlp.router.weight"]["status"] == "new"


def test_diff_measures_changes(mixture, tmp_path):
    def nudge(tensors):
        tensors["model.norm.weight"][2] += 0.5
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:100]

    other = rewrite(mixture, tmp_path / "other", nudge)
    rows = {row["tensor"]: row for row in diff(mixture, other)["tensors"]}
    assert rows["model.norm.weight"]["status"] == "changed"
    assert rows["model.norm.weight"]["max_change"] == pytest.approx(0.5, abs=1e-6)
    assert rows["lm_head.weight"]["status"] == "reshaped"


def test_verify_of_folders_that_are_no_checkpoints(pair, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        verify(pair[0], tmp_path / "nothing", None, progress=False)
    with pytest.raises(GrowthError, match="no such file"):
        verify(*pair, tmp_path / "no.safetensors", progress=False)


def test_verify_does_not_need_torch_state(pair):
    """Verification leaves torch's global random generator alone, so that it cannot change a run around it."""
    before = torch.random.get_rng_state()
    verify(*pair, None, progress=False)
    assert torch.equal(before, torch.random.get_rng_state())
