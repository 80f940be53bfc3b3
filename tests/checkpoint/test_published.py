"""Published checkpoints come in and go out bit for bit, load as models, and are refused whole if anything is wrong."""

import argparse
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from growth.tensor_table import table_problems
from lightninglm.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, explain
from lightninglm.checkpoint.model_tensors import add_model
from lightninglm.checkpoint.published import (
    ExportMismatchError,
    PublishedSource,
    Variant,
    alias_keys,
    canonical_key,
    export_published,
    exporting,
    import_published,
    published_table,
    resolve_config,
)
from lightninglm.modeling import LightningLMConfig, preset
from lightninglm.modeling.quantized_experts import merge_expert
from tests.checkpoint.published_files import KINDS, aliases, published_state, rank_files, save
from tests.modeling.tiny_models import random_ids, save_tokenizer, spread_weights, tiny_model

BUFFERS = ("inv_freq", "variance_ema", "_variance_ema_snapshot")


def bring_in(path, target, config=None, **options):
    source = PublishedSource(path)
    return import_published(source, target, resolve_config(source, config), **options)


def written(folder):
    """{key: tensor} of all shards that the index of a folder names."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for name in set(places.values()):
        tensors |= load_file(folder / name)
    assert tensors.keys() == places.keys()
    return tensors


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        assert torch.equal(found[key].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), key


def hashes(folder):
    with CheckpointReader(folder) as reader:
        return {name: entry["sha256"] for name, entry in reader.manifest["tensors"].items()}


def refusal(path, target, config=None, **options):
    """The message of a refused import, which leaves nothing behind."""
    with pytest.raises(CheckpointError) as caught:
        bring_in(path, target, config, **options)
    assert not list(target.parent.glob(f"*{target.name}*"))
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_import_then_export_is_bitwise_and_the_folder_is_a_model(kind, tmp_path):
    state = published_state(kind)
    save_tokenizer(tmp_path / "tokenizer")
    path = save(state, tmp_path / "published.safetensors")
    report = bring_in(path, tmp_path / "ours", tokenizer_folder=tmp_path / "tokenizer")
    assert report.keys == len(state) and report.aliases == 0
    exported = export_published(tmp_path / "ours", tmp_path / "back", shard_bytes=500_000)
    assert exported.as_imported == len(state) and exported.notes == []
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert_same(written(tmp_path / "back"), state)

    assert explain(tmp_path / "ours") == []
    with CheckpointReader(tmp_path / "ours") as reader:  # it is what growth and training expect, too
        assert table_problems(reader.weights, LightningLMConfig.from_dict(reader.config)) == []
        assert len(reader.trainer_state["expert_bases"]) == (9 if kind == "quantized" else 0)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values())
    ids = random_ids(2, 24)
    out = model.eval()(ids, labels=ids, output_mtp_logits=True)
    assert out.logits.isfinite().all() and out.mtp_logits.isfinite().all() and out.loss.isfinite()
    routers = [tensor for name, tensor in model.state_dict().items() if ".router." in name]
    assert all(tensor.dtype == torch.float32 for tensor in routers) and bool(routers) == (kind != "dense")


PLACES = {  # published key -> ours, one of each kind of tensor
    "pf_to_model.weight": "model.embed_tokens.proj.weight",
    "embed_norm.weight": "model.embed_tokens.norm.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "lambda_r_raw": "model.memory.scale",
    "memory_ln.weight": "model.memory.norm.weight",
    "memory_ln.bias": "model.memory.norm.bias",
    "memory_gate_proj.weight": "model.memory.gate.weight",
    "memory_gate_proj.bias": "model.memory.gate.bias",
    "layers.3.attn_block.norm.weight": "model.layers.3.mixer_connection.norm.weight",
    "layers.3.mlp_block.coeffs.rms.weight": "model.layers.3.mlp_connection.stream_norm.weight",
    **{
        f"layers.2.attn_block.coeffs.{name}": f"model.layers.2.mixer_connection.{name}"
        for name in [f"phi_{x}.weight" for x in ("pre", "post", "res")]
        + [f"{letter}_{x}" for x in ("pre", "post", "res") for letter in ("b", "alpha")]
    },
    **{
        f"layers.1.attn_block.sublayer.{name}": f"model.layers.1.mixer.{name}"
        for name in [f"{x}_proj.weight" for x in ("q", "k", "v", "g", "o", "b", "gk")]
        + ["b_proj.bias", "gk_proj.bias", "A_log", "D", "dt_bias"]
    },
    **{
        f"layers.1.attn_block.sublayer.{x}_conv1d.conv.{part}": f"model.layers.1.mixer.{x}_conv1d.{part}"
        for x in "qkv"
        for part in ("weight", "bias")
    },
    "layers.1.attn_block.sublayer.o_norm.norm.weight": "model.layers.1.mixer.o_norm.weight",
    "layers.1.attn_block.sublayer.rotary_emb.inv_freq": "model.rotary.inv_freq_16",
    **{
        f"layers.3.attn_block.sublayer.W_{x}.weight": f"model.layers.3.mixer.{x}_proj.weight"
        for x in ("q", "k", "v", "gv", "go")
    },
    **{f"mtp_block.attn.W_I{x}.weight": f"mtp.layer.mixer.indexer.{x}_proj.weight" for x in "qkw"},
    "mtp_block.attn.W_gv.weight": "mtp.layer.mixer.gv_proj.weight",
    "layers.3.attn_block.sublayer.o_proj.weight": "model.layers.3.mixer.o_proj.weight",
    "layers.3.attn_block.sublayer.gate_bias": "model.layers.3.mixer.indexer.gate_bias",
    "layers.3.attn_block.sublayer.variance_ema": "model.layers.3.mixer.variance_ema",
    "mtp_block.attn.rotary_emb.inv_freq": "model.rotary.inv_freq_32",
    "mtp_block.fusion_proj.weight": "mtp.fusion_proj.weight",
}
DENSE_PLACES = {
    "layers.2.mlp_block.sublayer.mlp.mlp.gate_proj.weight": "model.layers.2.mlp.gate_proj.weight",
    "layers.2.mlp_block.sublayer.mlp.mlp.up_proj.weight": "model.layers.2.mlp.up_proj.weight",
    "mtp_block.mlp.mlp.mlp.down_proj.weight": "mtp.layer.mlp.down_proj.weight",
    "mtp_block.attn_block.norm.weight": "mtp.layer.mixer_connection.norm.weight",
    "mtp_block.mlp_block.coeffs.b_res": "mtp.layer.mlp_connection.b_res",
}
MIXTURE_PLACES = {
    **{
        f"layers.2.mlp_block.sublayer.moe.shared_{x}.weight": f"model.layers.2.mlp.shared_expert.{x}_proj.weight"
        for x in ("gate", "up", "down")
    },
    "layers.2.mlp_block.sublayer.moe.gate.gate.weight": "model.layers.2.mlp.router.weight",
    "layers.2.mlp_block.sublayer.moe.gate.logit_bias": "model.layers.2.mlp.router.logit_bias",
    "layers.2.mlp_block.sublayer.moe.gate.null_logit": "model.layers.2.mlp.router.null_logit",
    "mtp_block.mlp.moe.gate.gate.weight": "mtp.layer.mlp.router.weight",
    "mtp_block.reversible_stack.blocks.0.block.norm.weight": "mtp.layer.mixer_connection.norm.weight",
    "mtp_block.reversible_stack.blocks.1.block.coeffs.b_res": "mtp.layer.mlp_connection.b_res",
}


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_every_kind_of_tensor_lands_where_the_model_looks_for_it(kind, tmp_path):
    state = published_state(kind)
    bring_in(save(state, tmp_path / "published.safetensors"), tmp_path / "ours")
    in_fp32 = re.compile(r"router|_(pre|post|res)$|A_log|dt_bias|\.D$|variance_ema|inv_freq")
    with CheckpointReader(tmp_path / "ours") as reader:
        for key, name in (PLACES | (DENSE_PLACES if kind == "dense" else MIXTURE_PLACES)).items():
            found = reader.read(name)
            assert found.dtype == (torch.float32 if in_fp32.search(name) else torch.bfloat16), name
            assert torch.equal(found.flatten().float(), state[key].flatten().float()), (key, name)
        if kind == "mixture":
            for x in ("gate", "up", "down"):
                for prefix, ours in (("layers.3.mlp_block.sublayer", "model.layers.3"), ("mtp_block.mlp", "mtp.layer")):
                    for e, weight in enumerate(state[f"{prefix}.moe.W_{x}"]):
                        assert torch.equal(reader.read(f"{ours}.mlp.experts.{e}.{x}_proj.weight"), weight.T)


def test_quantized_experts_compute_what_the_published_formula_says(tmp_path):
    """y = (x R^T) W_q^T + (x R^T B^T) A^T with W_q[o, i] = codebook[index & 255] * norm[o]."""
    state = published_state("quantized")
    bring_in(save(state, tmp_path / "published.safetensors"), tmp_path / "ours")
    config = preset("lightninglm-120b-tiny", mode="published")
    x = torch.randn(5, 64, dtype=torch.float64)
    with CheckpointReader(tmp_path / "ours") as reader:
        config.expert_quantization = reader.config["expert_quantization"]
        places = ("layers.5.mlp_block.sublayer", "model.layers.5", 7), ("mtp_block.mlp", "mtp.layer", 3)
        for prefix, ours, expert in places:
            stem, own = f"{ours}.mlp.experts.", f"{expert}."
            layer = {name.removeprefix(stem): reader.read(name) for name in reader.weights if name.startswith(stem)}
            tensors = {name.removeprefix(own): tensor for name, tensor in layer.items() if name.startswith(own)}
            merged = merge_expert(tensors, layer, config)
            for name in ("gate", "up", "down"):
                module = {
                    key.rpartition(".")[2]: tensor.double()
                    for key, tensor in state.items()
                    if key.startswith(f"{prefix}.moe.tq_{name}_weights.")
                }
                levels = module["weight_codebook"][module["weight_indices"][expert].long() & 255]
                w_q = levels * module["row_norms"][expert, :, None]
                row = x[:, : module["rotation_matrix"].shape[0]] @ module["rotation_matrix"].T
                expected = row @ w_q.T + row @ module["tqp_B"][expert].T @ module["tqp_A"][expert].T
                found = x[:, : module["rotation_matrix"].shape[0]] @ merged[f"{name}_proj"].double().T
                assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_all_containers_are_the_same_checkpoint(tmp_path):
    state = published_state("dense")
    save(state, tmp_path / "one.safetensors")
    torch.save(state, tmp_path / "bare.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "wrapped.pth")
    torch.save({"module": state | {"_depth_map_metadata": {"from": 8}}, "optimizer": None}, tmp_path / "engine.bin")
    folder = tmp_path / "shards"
    folder.mkdir()
    keys = sorted(state)
    places = {key: f"model-0000{1 + (i > 90)}-of-00002.safetensors" for i, key in enumerate(keys)}
    for name in set(places.values()):
        save({key: state[key] for key in keys if places[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = {}
    for source in ("one.safetensors", "bare.pt", "wrapped.pth", "engine.bin", "shards"):
        report = bring_in(tmp_path / source, tmp_path / f"ours of {source}")
        assert report.ignored == (["_depth_map_metadata"] if source == "engine.bin" else [])
        found[source] = hashes(tmp_path / f"ours of {source}")
    assert all(other == found["one.safetensors"] for other in found.values())


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_aliases_are_dropped_and_written_again_when_asked_for(kind, tmp_path):
    state = published_state(kind)
    names = aliases(state)
    everything = state | {alias: state[key] for alias, key in names.items()}
    assert {key: canonical_key(key) for key in everything} == names | {key: key for key in state}
    torch.save({"state_dict": everything}, tmp_path / "published.pt")
    report = bring_in(tmp_path / "published.pt", tmp_path / "ours")
    assert report.aliases == len(names) and report.keys == len(state)
    export_published(tmp_path / "ours", tmp_path / "canonical")
    assert_same(written(tmp_path / "canonical"), state)
    assert export_published(tmp_path / "ours", tmp_path / "all", aliases=True).aliases == len(names)
    assert_same(written(tmp_path / "all"), everything)


def test_a_stale_alias_is_refused_or_ignored_by_name(tmp_path):
    state = published_state("mixture")
    names = aliases(state)
    everything = {alias: state[key].clone() for alias, key in names.items()} | state
    stale = [
        "stack.mid_layers.2.block.attn_block.norm.weight",
        "mtp_block.reversible_stack.blocks.0.block.sublayer.W_q.weight",
    ]
    for alias in stale:
        everything[alias] = everything[alias] + 1
    path = save(everything, tmp_path / "published.safetensors")
    message = refusal(path, tmp_path / "ours")
    assert "2 problems" in message
    assert all(f"{alias}: disagrees with {names[alias]}" in message for alias in stale)
    report = bring_in(path, tmp_path / "ours", ignore_stale_aliases=True)
    assert sorted(report.stale_aliases) == sorted(stale)
    save(state, tmp_path / "canonical.safetensors")
    bring_in(tmp_path / "canonical.safetensors", tmp_path / "without")
    assert hashes(tmp_path / "ours") == hashes(tmp_path / "without")


def test_everything_that_is_wrong_is_named_at_once_and_nothing_is_written(tmp_path):
    state = published_state("mixture")
    attention = "layers.1.attn_block.sublayer."
    del state[f"{attention}dt_bias"], state["mtp_block.fusion_proj.weight"]
    state["memory_pool.query"] = torch.zeros(1, 1, 64)
    state[f"{attention}q_proj.weight"] = state[f"{attention}q_proj.weight"][:, :32]
    state[f"{attention}k_proj.weight"] = torch.zeros(64, 64, dtype=torch.int32)
    state["layers.2.mlp_block.sublayer.moe.gate.null_logit"] = torch.zeros(1)
    state["lm_head.weight"][3, 5:7] = float("nan")
    state["layers.0.mlp_block.sublayer.moe.W_up"][2, 0, 0] = float("-inf")
    other = "layers.2.attn_block.sublayer.rotary_emb.inv_freq"
    state[other] = state[other] * 2
    message = refusal(save(state, tmp_path / "published.safetensors"), tmp_path / "ours", "lightninglm-5b-tiny")
    for problem in (
        "9 problems",
        f"{attention}dt_bias: missing",
        "mtp_block.fusion_proj.weight: missing",
        "memory_pool.query: left over",
        f"{attention}q_proj.weight: shape [64, 32] in published.safetensors, expected [64, 64]",
        f"{attention}k_proj.weight: dtype I32",
        "gate.null_logit: shape [1] in published.safetensors, expected []",
        "lm_head.weight: 2 of 32,768 values are NaN or infinite",
        "layers.0.mlp_block.sublayer.moe.W_up: 1 of",
        f"{other}: differs from layers.0.attn_block.sublayer.rotary_emb.inv_freq",
    ):
        assert problem in message


def test_files_of_expert_parallel_ranks_are_one_checkpoint(tmp_path):
    """12 experts and the second-token layer's 4 over 8 ranks: blocks of 2 and 1, of 1 and 0, padded."""
    state = published_state("quantized")
    bring_in(save(state, tmp_path / "published.safetensors"), tmp_path / "whole")
    folder = rank_files(state, tmp_path / "ranks")
    bring_in(folder, tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(tmp_path / "whole")
    export_published(tmp_path / "merged", tmp_path / "back")
    assert_same(written(tmp_path / "back"), state)

    alone = refusal(folder / "mp_rank_00_model_states.pt", tmp_path / "alone")
    assert "tqp_A: shape [2, 32, 4]" in alone and "the folder with the files of all ranks" in alone
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_03_model_states.pt")
    twice = refusal(folder, tmp_path / "twice")
    assert "mp_rank_03_model_states.pt: holds the same experts as" in twice
    (folder / "mp_rank_03_model_states.pt").unlink()
    assert "counted from 0 without a gap" in refusal(folder, tmp_path / "gap")


def test_ranks_that_disagree_and_padding_that_is_not_zero_are_refused(tmp_path):
    folder = rank_files(published_state("quantized"), tmp_path / "ranks")
    path = folder / "mp_rank_06_model_states.pt"
    state = torch.load(path)["module"]
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    key = "layers.4.mlp_block.sublayer.moe.tq_up_weights.tqp_B"
    state[key] = state[key] + 1
    torch.save({"module": state}, path)
    message = refusal(folder, tmp_path / "ours")
    assert "2 problems" in message and "lm_head.weight: differs between" in message
    assert f"{key}: the experts behind the first 1 are not zero in mp_rank_06_model_states.pt" in message


def test_a_rotation_or_codebook_that_the_format_does_not_know_is_refused(tmp_path):
    state = published_state("quantized")
    stem = "layers.1.mlp_block.sublayer.moe.tq_"
    state[f"{stem}gate_weights.rotation_matrix"][3, 4] *= -1
    state[f"{stem}down_weights.rotation_matrix"][3, 4] *= 1 + 2**-12
    state[f"{stem}up_weights.weight_codebook"][9] += 1e-3
    message = refusal(save(state, tmp_path / "published.safetensors"), tmp_path / "ours")
    assert "3 problems" in message
    assert f"{stem}gate_weights.rotation_matrix: the rotation differs from H diag(s) / sqrt(64)" in message
    assert f"{stem}down_weights.rotation_matrix: its entries differ in magnitude" in message
    assert f"{stem}up_weights.weight_codebook: differs from {stem}gate_weights.weight_codebook" in message


def test_spellings_and_rare_forms_round_trip(tmp_path):
    """Quantized modules without `_weights`, bf16 rotations, fused gate and up, fp32 files."""
    state = {key.replace("_weights.", "."): tensor for key, tensor in published_state("quantized").items()}
    state |= {key: tensor.bfloat16() for key, tensor in state.items() if key.endswith("rotation_matrix")}
    fused = published_state("dense", dtype=torch.float32)
    for key in [key for key in fused if key.endswith("mlp.gate_proj.weight")]:
        up = fused.pop(key.replace("gate_proj", "up_proj"))
        fused[key.replace("gate_proj", "gate_up_proj")] = torch.cat([fused.pop(key), up])
    for name, published in (("spelled", state), ("fused", fused)):
        bring_in(save(published, tmp_path / f"{name}.safetensors"), tmp_path / f"{name} ours")
        export_published(tmp_path / f"{name} ours", tmp_path / f"{name} back")
        assert_same(written(tmp_path / f"{name} back"), published)
    with CheckpointReader(tmp_path / "fused ours") as reader:
        key = "layers.1.mlp_block.sublayer.mlp.mlp.gate_up_proj.weight"
        found = [reader.read(f"model.layers.1.mlp.{name}_proj.weight") for name in ("gate", "up")]
        assert torch.equal(torch.cat(found), fused[key])


def test_a_dense_base_with_adapters_becomes_dense_experts_and_comes_back(tmp_path):
    state = published_state("quantized")
    for key in [key for key in state if key.endswith("weight_indices")]:
        for leaf in ("row_norms", "weight_codebook"):
            del state[key.replace("weight_indices", leaf)]
        codes = state.pop(key)
        state[key.replace("weight_indices", "base_weight")] = (codes.float() / 1000).bfloat16()
    bring_in(save(state, tmp_path / "published.safetensors"), tmp_path / "ours")
    stem = "layers.2.mlp_block.sublayer.moe.tq_up_weights."
    module = {key.removeprefix(stem): tensor.double() for key, tensor in state.items() if key.startswith(stem)}
    dense = module["base_weight"][5] + module["tqp_A"][5] @ module["tqp_B"][5]
    with CheckpointReader(tmp_path / "ours") as reader:
        found = reader.read("model.layers.2.mlp.experts.5.up_proj.weight")
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), dense @ module["rotation_matrix"], rtol=2**-8, atol=1e-3)
    export_published(tmp_path / "ours", tmp_path / "back")
    assert_same(written(tmp_path / "back"), state)


def test_frequencies_of_the_file_are_replaced_only_when_asked_for(tmp_path):
    state = published_state("mixture")
    path = save(state, tmp_path / "published.safetensors")
    config = preset("lightninglm-5b-tiny", mode="published", rope_source="config").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "rope_theta = 100000, which differ by up to" in refusal(path, tmp_path / "ours", tmp_path / "config.json")
    report = bring_in(path, tmp_path / "ours", tmp_path / "config.json", recompute_rope=True)
    assert "replaces the frequencies" in report.notes[0]
    with CheckpointReader(tmp_path / "ours") as reader:
        assert not [name for name in reader.weights if "inv_freq" in name]
    assert export_published(tmp_path / "ours", tmp_path / "back").notes == [
        "config.rope_source = 'config', the published code has 'checkpoint'"
    ]
    assert_same(written(tmp_path / "back"), state)


@pytest.mark.parametrize("kind", ["published softmax", "published sigmoid", "published dense", "flat"])
def test_a_checkpoint_that_was_trained_here_goes_out_and_in_unchanged(kind, tmp_path):
    model = spread_weights(tiny_model(kind))
    with CheckpointWriter(tmp_path / "ours") as writer:
        add_model(writer, model)
        writer.commit(model.config.to_dict(), {})
    report = export_published(tmp_path / "ours", tmp_path / "published")
    assert report.as_imported is None and bool(report.notes) == (kind == "flat")
    config = tmp_path / "ours" / "config.json"
    bring_in(tmp_path / "published", tmp_path / "again", config, recompute_rope=kind == "flat")
    before, after = hashes(tmp_path / "ours"), hashes(tmp_path / "again")
    assert before == {name: sha256 for name, sha256 in after.items() if not name.startswith("published.")}


def test_what_the_published_layout_cannot_hold_is_not_exported(tmp_path):
    for name, overrides in (("grouped", {}), ("flat", {"expert_quantization": {"kind": "int8", "group_size": 32}})):
        config = {"rank": 4, "seed": 0}
        if overrides:
            overrides["expert_quantization"] |= config
        model = tiny_model(name, **overrides)
        with CheckpointWriter(tmp_path / name) as writer:
            add_model(writer, model)
            writer.commit(model.config.to_dict(), {})
        with pytest.raises(CheckpointError, match="the published layout has"):
            export_published(tmp_path / name, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_an_export_that_is_not_what_was_imported_is_not_left_behind(tmp_path, monkeypatch):
    bring_in(save(published_state("dense"), tmp_path / "published.safetensors"), tmp_path / "ours")
    right = exporting.to_published
    monkeypatch.setattr(exporting, "to_published", lambda entry, part, *rest: right(entry, part * 2, *rest))
    with pytest.raises(ExportMismatchError, match=r"not as imported, nothing was written: .*lm_head\.weight"):
        export_published(tmp_path / "ours", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("lightninglm-2b", 1_653_102_772),
        ("lightninglm-5b", 3_918_764_401),
        ("lightninglm-9b", 8_319_358_753),
        ("lightninglm-120b", 119_085_028_733),
    ],
)
def test_the_table_of_every_published_stage_has_all_its_parameters(name, expected):
    config = preset(name, mode="published")
    table, _ = published_table(config, Variant())
    buffers = (*BUFFERS, *(["logit_bias"] if config.router_scoring == "sigmoid" else []))
    sizes = {key: torch.Size(entry.shape).numel() for key, entry in table.items() if not key.endswith(buffers)}
    assert sum(sizes.values()) == expected
    names = [alias for key in table for alias in alias_keys(key, config)]
    assert len(names) == len(set(names)) and not set(names) & table.keys()
    assert all(canonical_key(alias) == key for key in table for alias in alias_keys(key, config))


def test_files_that_cannot_be_read_are_explained(tmp_path):
    state = published_state("dense")
    torch.save({"module": state, "args": argparse.Namespace(lr=1.0)}, tmp_path / "engine.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"\0" * 20)
    (tmp_path / "state.npz").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("engine.pt", "holds more than tensors (argparse.Namespace) and is not unpickled"),
        ("old.pt", "not in the zip format of torch.save"),
        ("list.pt", "holds list, not a state dict"),
        ("torn.safetensors", "safetensors"),
        ("state.npz", "must end with one of .safetensors, .pt"),
        ("empty", "holds no file that ends with"),
        ("nowhere", "no such file or folder"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            PublishedSource(tmp_path / name)


def test_bad_configurations_are_explained(tmp_path):
    state = {key: tensor for key, tensor in published_state("dense").items() if not key.startswith("layers.3.")}
    source = PublishedSource(save(state, tmp_path / "published.safetensors"))
    for content, message in (
        (None, "3 layers, lm_head.weight [512, 64], 0 experts: no preset has these sizes"),
        ('{"hidden_sise": 64}', "LightningLMConfig has no field hidden_sise"),
        ('{"hidden_size": 65}', "must equal hidden_size = 65"),
        ('{"hidden_size": "wide"}', "a field of LightningLMConfig has a value of the wrong type"),
        ("[]", "must be an object"),
        ("{", "not readable as JSON"),
    ):
        path = None if content is None else tmp_path / "config.json"
        if path:
            path.write_text(content)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            resolve_config(source, path and str(path))
    with pytest.raises(CheckpointError, match="neither a file nor one of lightninglm-2b"):
        resolve_config(source, "lightninglm-3b")


@pytest.fixture(scope="module")
def command():
    path = Path(__file__).resolve().parents[2] / "launch" / "export.py"
    spec = importlib.util.spec_from_file_location("launch_export", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *arguments: module.main([str(argument) for argument in arguments])


def test_the_commands_report_and_exit_as_documented(command, tmp_path, capsys, monkeypatch):
    state = published_state("dense")
    path = save(state, tmp_path / "published.safetensors")
    tokenizer = tmp_path / "tokenizer"
    save_tokenizer(tokenizer)
    assert command("import-published", path, tmp_path / "ours", "--tokenizer", tokenizer, "--json") == 0
    assert json.loads(capsys.readouterr().out)["keys"] == len(state)
    assert command("export-published", tmp_path / "ours", tmp_path / "back", "--json") == 0
    assert json.loads(capsys.readouterr().out)["as_imported"] == len(state)
    assert_same(written(tmp_path / "back"), state)

    assert command("import-published", path, tmp_path / "ours") == 2
    assert "exists already" in capsys.readouterr().err
    save_file({"norm.weight": torch.ones(64)}, tmp_path / "part.safetensors")
    part = tmp_path / "part.safetensors"
    assert command("import-published", part, tmp_path / "x", "--config", "lightninglm-2b-tiny") == 2
    assert "lm_head.weight: missing" in capsys.readouterr().err
    other = ("--config", "lightninglm-2b", "--tokenizer", tokenizer)
    assert command("import-published", path, tmp_path / "x", *other) == 2
    assert "512 ids, but config.vocab_size = 131072" in capsys.readouterr().err
    monkeypatch.setattr(exporting, "to_published", lambda entry, part, *rest: part * 2)
    assert command("export-published", tmp_path / "ours", tmp_path / "x") == 1
    assert "not as imported" in capsys.readouterr().err
