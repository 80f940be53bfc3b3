"""Bad input is refused with one clear message, and nothing is written."""

import shutil

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoints import MIXTURE, plant_nan, rewrite, small_config, write_checkpoint, write_tokenizer

import growth.job
from growth.__main__ import main
from growth.core import grow
from growth.errors import GrowthError, ReceiptError
from lightninglm.checkpoint import CheckpointError, CheckpointReader


def refused(source, tmp_path, operator, message, error=GrowthError, **options):
    """Growing must fail with this message and leave the folder of the target as it was."""
    place = tmp_path / "runs"
    place.mkdir(exist_ok=True)
    heldout = options.pop("heldout", None)
    moments = options.pop("moments", True)
    with pytest.raises(error, match=message):
        grow(
            source,
            place / "target",
            operator,
            options,
            stage="next",
            heldout=heldout,
            moments=moments,
            progress=False,
        )
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "operator,options,message",
    [
        ("dense_to_mixture", {}, r"operator 'dense_to_mixture': must be one of dense_to_moe, deepen"),
        ("dense_to_moe", {"num_expert": 4}, r"num_expert: .*num_experts, experts_per_token"),
        ("dense_to_moe", {"num_experts": 4, "strategy": "exakt"}, r"strategy: .*'exact'.*found 'exakt'"),
        ("dense_to_moe", {"num_experts": "many"}, r"num_experts: .*integer.*found 'many'"),
        ("dense_to_moe", {"num_experts": 4, "expert_size": 49}, r"expert_size = 49.*has 48"),
        ("dense_to_moe", {"num_experts": 4, "experts_per_token": 5}, r"num_experts_per_tok = 5.*at most the 4 experts"),
        ("multiply_experts", {"num_experts": 12}, r"needs a mixture of experts; the source is dense"),
        ("quantize_experts", {}, r"needs a mixture of experts"),
        ("flatten_router", {}, r"router_layout = 'grouped'"),
        ("deepen", {"source_layers": [0, 1, 2, 3]}, r"not more than the source's 4"),
        (
            "deepen",
            {"source_layers": [0, 1, 2, 3, 4, 5]},
            r"source layer 5 does not exist, the source has layers 0\.\.3",
        ),
        ("deepen", {"source_layers": [0, 1, 2, 1, 2, 1]}, r"source layer\(s\) \[3\] are not used"),
        (
            "deepen",
            {"source_layers": [0, 1, 2, 3, 0, 2]},
            r"target layer 5 would be linear_attention \(from source layer 2\)",
        ),
        ("deepen", {"source_layers": [0, 1, 2, 3, 0]}, r"1 zero-step layer\(s\) at 4\.\.4; .* even"),
        ("deepen", {"source_layers": [0, 3, 2, 1, 2, 3]}, r"in the source's order"),
        ("deepen", {"source_layers": [0, 1, 0, 1, 2, 3], "strategy": "stack"}, r"repeats the whole stack"),
    ],
)
def test_options_that_cannot_work(operator, options, message, dense, tmp_path):
    refused(dense, tmp_path, operator, message, **options)


@pytest.mark.parametrize(
    "operator,options,message",
    [
        ("dense_to_moe", {"num_experts": 4}, r"needs a dense source; this one has num_experts = 6"),
        ("multiply_experts", {"num_experts": 13}, r"num_experts = 13: must be a multiple of the source's 6 \(12, 18"),
        (
            "multiply_experts",
            {"num_experts": 12, "members_per_group": 3},
            r"members_per_group = 3: must be between 2 and 2",
        ),
        (
            "multiply_experts",
            {"num_experts": 12, "strategy": "paper", "noise": 0.1},
            r"noise is an option of strategy exact",
        ),
        ("quantize_experts", {"group_size": 7}, r"group_size = 7: must divide"),
        ("quantize_experts", {"group_size": 8, "rank": 1000}, r"rank = 1000: must be between"),
    ],
)
def test_options_that_do_not_fit_a_mixture(operator, options, message, mixture, tmp_path):
    refused(mixture, tmp_path, operator, message, **options)


def quantize_command(source, tmp_path, capsys, *options):
    """`python -m growth quantize_experts` must refuse and leave nothing behind; what it printed, on one line."""
    place = tmp_path / "runs"
    place.mkdir()
    command = ["quantize_experts", "--source", source, "--target", place / "t", "--group-size", 32, *options]
    assert main([str(word) for word in command]) == 2
    assert list(place.iterdir()) == []
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", ["int8", "int4", "codebook"])
@pytest.mark.parametrize("size", [1e12, 1e30, 3e38])
def test_a_wild_expert_weight(size, kind, quantizable, tmp_path, capsys):
    """It is finite, and a scale would hold it: what would be lost is the rest of its row."""
    name = "model.layers.1.mlp.experts.2.up_proj"

    def plant(tensors):
        tensors[f"{name}.weight"][3, 4] = size

    source = rewrite(quantizable, tmp_path / "source", plant)
    error = quantize_command(source, tmp_path, capsys, "--kind", kind, "--rank", 4)
    assert f"error: {name}: layer 1, expert 2, up_proj: " in error
    assert ("keep" in error and "dB" in error and "row 3" in error) or "overflow fp32" in error or "rotated" in error


@pytest.mark.parametrize(
    "options,message",
    [
        (("--rank", 0), "rank: Input should be greater than or equal to 1"),
        (("--rank", 33), "expert_quantization.rank = 33: must be between 1 and 32"),
        (("--rank", 4, "--group-size", 24), "expert_quantization.group_size = 24: must divide hidden_size = 32"),
        (("--rank", 4, "--group-size", 64), "expert_quantization.group_size = 64: must divide hidden_size = 32"),
        (("--rank", 4, "--group-size", 0), "group_size: Input should be greater than or equal to 2"),
    ],
)
def test_quantization_options_that_cannot_work(options, message, quantizable, tmp_path, capsys):
    assert message in quantize_command(quantizable, tmp_path, capsys, *options)


def test_quantizing_twice(quantizable, grown, tmp_path, capsys):
    once = grown(quantizable, "quantize_experts", group_size=32, rank=4)
    error = quantize_command(once, tmp_path, capsys, "--rank", 4)
    assert "experts are quantized already: {'group_size': 32, 'kind': 'int8', 'rank': 4" in error
    assert "`python -m growth merge_experts`" in error


def test_a_target_that_exists(dense, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        grow(dense, target, "dense_to_moe", {"num_experts": 4}, stage="next", progress=False)
    assert list(target.iterdir()) == []


def test_a_source_that_is_no_checkpoint(tmp_path):
    refused(tmp_path / "nothing", tmp_path, "dense_to_moe", "no such folder", CheckpointError, num_experts=4)


def test_a_source_without_optimizer_state(tmp_path, tokenizer):
    source = write_checkpoint(tmp_path / "source", small_config(), tokenizer, moments=False)
    refused(source, tmp_path, "dense_to_moe", "no optimizer state to carry; .*--drop-moments", num_experts=4)


SOURCE_FAULTS = {
    "a missing layer": (
        lambda name, tensor: None if name.startswith("model.layers.2.mixer.") else tensor,
        r"tensor\(s\) do not fit its config.json: model\.layers\.2\.mixer\.A_log \(found missing",
    ),
    "a bf16 router": (
        lambda name, tensor: tensor.bfloat16() if name.endswith("layers.1.mlp.router.weight") else tensor,
        r"layers\.1\.mlp\.router\.weight \(found torch\.bfloat16, expected torch\.float32\)",
    ),
    "a lost selection bias": (
        lambda name, tensor: None if name.endswith("layers.1.mlp.router.logit_bias") else tensor,
        r"layers\.1\.mlp\.router\.logit_bias \(found missing",
    ),
    "a matrix transposed": (
        lambda name, tensor: tensor.T.contiguous() if name.endswith("experts.1.up_proj.weight") else tensor,
        r"experts\.1\.up_proj\.weight \(found shape \(32, 24\), expected shape \(24, 32\)\)",
    ),
    "moments of another parameter": (
        lambda name, tensor: (
            tensor.T.contiguous() if name.endswith("3.mlp.experts.0.up_proj.weight.exp_avg") else tensor
        ),
        r"3\.mlp\.experts\.0\.up_proj\.weight\.exp_avg is .*the state of another parameter",
    ),
    "a lost moment": (
        lambda name, tensor: None if name == "lm_head.weight.exp_avg_sq" else tensor,
        r"optimizer state is not that of its parameters; 1 missing: lm_head\.weight\.exp_avg_sq",
    ),
}


@pytest.mark.parametrize("fault", SOURCE_FAULTS)
def test_a_source_with_a_silent_fault(fault, tmp_path, tokenizer):
    edit, message = SOURCE_FAULTS[fault]
    source = write_checkpoint(tmp_path / "source", small_config(**MIXTURE), tokenizer, edit=edit)
    refused(source, tmp_path, "multiply_experts", message, num_experts=12)


def test_a_source_with_a_stale_alias(mixture, tmp_path):
    def add_alias(tensors):
        tensors["stack.blocks.0.mixer.q_proj.weight"] = tensors["model.layers.0.mixer.q_proj.weight"]

    source = rewrite(mixture, tmp_path / "source", add_alias)
    refused(source, tmp_path, "multiply_experts", r"stack\.blocks\.0\.mixer\.q_proj\.weight", num_experts=12)


def test_a_source_with_nan(mixture, tmp_path):
    """The writer refuses NaN, so one is planted behind its back, with hashes that match."""
    source = tmp_path / "source"
    shutil.copytree(mixture, source)
    plant_nan(source, "model.layers.0.mlp.experts.2.up_proj.weight")
    refused(source, tmp_path, "multiply_experts", r"experts\.2\.up_proj\.weight holds NaN", num_experts=12)


def test_a_source_with_a_flipped_bit(mixture, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(mixture, source)
    file = max(source.glob("model-*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises((GrowthError, CheckpointError), match="SHA-256"):
        grow(source, tmp_path / "target", "multiply_experts", {"num_experts": 12}, stage="next", progress=False)
    assert not (tmp_path / "target").exists()


def test_a_source_with_another_tokenizer(mixture, tmp_path):
    other = write_tokenizer(tmp_path / "other", special="<|other|>")
    trained_with = CheckpointReader(mixture).config["tokenizer_sha256"]
    source = write_checkpoint(tmp_path / "source", small_config(**MIXTURE, tokenizer_sha256=trained_with), other)
    refused(source, tmp_path, "multiply_experts", "another tokenizer than the model was trained with", num_experts=12)


def test_heldout_tokens_of_another_tokenizer(mixture, tmp_path):
    file = tmp_path / "heldout.safetensors"
    save_file({"code": torch.full((2, 8), 5000, dtype=torch.int32)}, file)
    refused(
        mixture, tmp_path, "multiply_experts", "token id 5000, the vocabulary has 257", num_experts=12, heldout=file
    )


def test_a_heldout_file_that_is_missing(mixture, tmp_path):
    missing = tmp_path / "no.safetensors"
    refused(mixture, tmp_path, "multiply_experts", "no such file", num_experts=12, heldout=missing)


def test_a_disk_that_is_too_small(mixture, tmp_path, monkeypatch):
    monkeypatch.setattr("lightninglm.checkpoint.writer.free_bytes", lambda path: 10_000)
    refused(mixture, tmp_path, "multiply_experts", "no room", CheckpointError, num_experts=12)


def test_a_tolerance_that_is_missed(mixture, tmp_path, heldout):
    refused(
        mixture,
        tmp_path,
        "multiply_experts",
        r"multiply_experts \(paper\) missed its tolerance and was not committed: relative logit difference",
        ReceiptError,
        num_experts=12,
        strategy="paper",
        tolerance=1e-6,
        heldout=heldout,
    )


def test_an_operator_that_forgets_a_source_tensor(mixture, tmp_path, monkeypatch):
    options, plan = growth.job.OPERATORS["multiply_experts"]

    def forgetful(source, parsed, seed):
        result = plan(source, parsed, seed)
        result.origins["lm_head.weight"] = growth.operator.Origin("zero", value=lambda: torch.zeros(257, 32))
        return result

    monkeypatch.setitem(growth.job.OPERATORS, "multiply_experts", (options, forgetful))
    refused(
        mixture,
        tmp_path,
        "multiply_experts",
        r"would lose 1 tensor\(s\) of the source: lm_head\.weight",
        num_experts=12,
    )
