"""Merging gives the experts that were trained, whichever way they are stored, and says so when it cannot."""

import json

import pytest
import torch
from small_checkpoints import MIXTURE, QUANTIZABLE, read_all, rewrite, small_config, write_checkpoint

from growth.__main__ import main
from growth.errors import GrowthError
from growth.receipt import RECEIPT_FILE, load_model
from growth.verify import verify
from launch import export
from lightninglm.checkpoint import CheckpointReader, ExpertBaseError
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.quantized_experts import PROJECTIONS, QuantizedExperts, merge_expert, shared_tensors

KINDS = {
    "int8": {"kind": "int8", "group_size": 32, "rank": 4},
    "int4": {"kind": "int4", "group_size": 16, "rank": 4},
    "codebook": {"kind": "codebook", "rank": 4},
}
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def train_adapters(tensors):
    """What training does to a checkpoint: adapters and their moments move, the base does not."""
    generator = torch.Generator().manual_seed(1)
    for name in tensors:
        if name.split(".")[-1] in ("A", "B") or name.split(".")[-2] in ("A", "B"):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator).square() * 0.1


@pytest.fixture(params=KINDS)
def trained(request, quantizable, grown, tmp_path):
    return rewrite(grown(quantizable, "quantize_experts", **KINDS[request.param]), tmp_path / "trained", train_adapters)


def test_the_merged_model_computes_what_the_adapters_did(trained, heldout, grown, tmp_path):
    folder = grown(trained, "merge_experts", heldout=heldout)
    receipt = json.loads((folder / RECEIPT_FILE).read_text())
    assert receipt["passed"] and receipt["tolerance"]["relative_logit_difference"] == 1e-5
    assert receipt["measured"]["logits"]["relative"] < 1e-5
    assert CheckpointReader(folder).config["expert_quantization"] is None
    assert verify(trained, folder, None, progress=False)["passed"]
    rounded = grown(trained, "merge_experts", dtype="bf16", heldout=heldout)
    old, new = read_all(folder), read_all(rounded)
    assert torch.equal(new[f"{EXPERT}.weight"], old[f"{EXPERT}.weight"].bfloat16())
    assert torch.equal(new[f"{EXPERT}.weight.master"], old[f"{EXPERT}.weight"])


def test_merged_on_disk_or_after_loading_is_the_same_to_the_bit(trained, grown, tmp_path):
    on_disk = read_all(grown(trained, "merge_experts"))
    layers = [m for m in load_model(trained).modules() if isinstance(m, QuantizedExperts)]
    names = [f"model.layers.{i}.mlp.experts" for i in range(4)] + ["mtp.layer.mlp.experts"]
    for name, experts in zip(names, layers, strict=True):
        merged = experts.merged()
        for projection in PROJECTIONS:
            for e in range(experts.num_experts):
                assert torch.equal(merged[projection][e], on_disk[f"{name}.{e}.{projection}.weight"])


def test_the_moments_of_adapters_are_dropped_and_all_others_carried(trained, grown):
    old, new = read_all(trained), read_all(folder := grown(trained, "merge_experts"))
    for part in ("exp_avg", "exp_avg_sq"):
        assert f"{EXPERT}.A.{part}" in old and f"{EXPERT}.A.{part}" not in new
        assert torch.count_nonzero(new[f"{EXPERT}.weight.{part}"]) == 0
        name = f"model.layers.1.mlp.router.weight.{part}"
        assert torch.equal(new[name], old[name]) and torch.count_nonzero(old[name])
    state = CheckpointReader(folder).trainer_state
    assert "model.layers.1.mlp.experts.up_proj.weight" in state["new_tensors"]["names"]
    assert state["expert_bases"] == {}
    receipt = json.loads((folder / RECEIPT_FILE).read_text())
    assert receipt["moments"]["rule"]["merged"] == {"master": "W + A B", "exp_avg": "0", "exp_avg_sq": "0"}


def test_quantizing_again_is_a_step_of_its_own_with_its_own_measurement(quantizable, heldout, grown, tmp_path):
    trained = rewrite(grown(quantizable, "quantize_experts", **KINDS["int8"]), tmp_path / "trained", train_adapters)
    merged = grown(trained, "merge_experts")
    again = grown(merged, "quantize_experts", heldout=heldout, **KINDS["int8"])
    receipt = json.loads((again / RECEIPT_FILE).read_text())
    assert 1e-5 < receipt["measured"]["logits"]["relative"] < 5e-2
    assert min(receipt["signal_to_noise_db"].values()) > 40
    assert len(CheckpointReader(again).trainer_state["expert_bases"]) == 5
    with pytest.raises(GrowthError, match="quantized already"):
        grown(again, "quantize_experts", **KINDS["int8"])


def test_adapters_beside_another_base_are_refused(quantizable, grown, tmp_path):
    folder = grown(quantizable, "quantize_experts", **KINDS["int8"])

    def another_base(tensors):
        tensors[f"{EXPERT}.codes"][0, 0] += 1

    swapped = rewrite(folder, tmp_path / "swapped", another_base)
    with pytest.raises(ExpertBaseError, match=r"model\.layers\.1\.mlp\.experts were trained on another quantized base"):
        grown(swapped, "merge_experts")


def test_dense_experts_cannot_be_merged(mixture, tmp_path, capsys):
    assert main(["merge_experts", "--source", str(mixture), "--target", str(tmp_path / "t")]) == 2
    assert "are not quantized" in " ".join(capsys.readouterr().err.split())


def test_the_export_command_merges(quantizable, grown, heldout, tmp_path, capsys):
    folder = grown(quantizable, "quantize_experts", **KINDS["int8"])
    target = tmp_path / "merged"
    assert export.main(["merge", str(folder), str(target), "--dtype", "bf16", "--verify", str(heldout), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]["by_kind"]["merged"] == 5 * 6 * 3
    assert CheckpointReader(target).weights[f"{EXPERT}.weight"].dtype == torch.bfloat16
    assert export.main(["merge", str(target), str(tmp_path / "again")]) == 2
    assert "not quantized" in capsys.readouterr().err


def test_adapters_of_a_bf16_run_are_merged_from_their_master_copies(tokenizer, heldout, grown, tmp_path):
    config = small_config(**MIXTURE, **QUANTIZABLE)
    dense = write_checkpoint(tmp_path / "dense", config, tokenizer, dtype=torch.bfloat16)
    quantized = grown(dense, "quantize_experts", **KINDS["int8"])

    def train_masters(tensors):
        train_adapters(tensors)
        for name in tensors:
            if name.endswith((".A", ".B")):
                tensors[name] = tensors[f"{name}.master"].bfloat16()

    trained = rewrite(quantized, tmp_path / "trained", train_masters)
    merged = grown(trained, "merge_experts", heldout=heldout)
    old, new = read_all(trained), read_all(merged)
    assert old[f"{EXPERT}.A"].dtype == torch.bfloat16 and new[f"{EXPERT}.weight"].dtype == torch.float32
    stored = {f"up_proj.{part}": old[f"{EXPERT}.{part}"] for part in ("codes", "scales")}
    masters = {f"up_proj.{part}": old[f"{EXPERT}.{part}.master"] for part in ("A", "B")}
    config = LightningLMConfig.from_dict(CheckpointReader(trained).config)
    expected = merge_expert(stored | masters, shared_tensors(config, layer_idx=1), config)
    assert torch.equal(new[f"{EXPERT}.weight"], expected["up_proj"])
    assert json.loads((merged / RECEIPT_FILE).read_text())["tolerance"]["relative_logit_difference"] == 3e-2
