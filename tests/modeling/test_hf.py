"""The conventions of HuggingFace transformers: loading, saving, generating, and the tools around a model."""

import copy
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from lightninglm.modeling import LightningLMConfig, LightningLMForCausalLM, LightningLMModel, token_bytes
from lightninglm.modeling.experts import shard_experts
from tests.modeling.tiny_models import (
    INT8,
    ROUTERS,
    TOKENS,
    random_ids,
    save_tokenizer,
    spread_weights,
    tiny_config,
    tiny_model,
)

KINDS = [*ROUTERS, "int8", "int4", "codebook"]


def build(kind, **overrides):
    if kind in ROUTERS:
        return spread_weights(tiny_model(kind, **overrides))
    return spread_weights(tiny_model("grouped", expert_quantization=INT8 | {"kind": kind}, **overrides))


def stored(folder):
    """name -> tensor of all safetensors files of a folder."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with tokenizer and weights of a mixture-of-experts model."""
    folder = tmp_path_factory.mktemp("exported")
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(0)
    model = LightningLMForCausalLM(tiny_config("flat", pad_token_id=0, eos_token_id=1, bos_token_id=None))
    model.load_token_bytes(folder)
    spread_weights(model).save_pretrained(folder)
    return folder, model.eval(), tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_is_bitwise(kind, tmp_path):
    model = build(kind)
    for name, buffer in model.named_buffers():  # buffers as training leaves them
        if name.endswith(("bias", "ema")):
            buffer += torch.rand(buffer.shape)
    model.set_step_size([0.125, 0.2, 0.1, 0.05])
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is LightningLMForCausalLM and not any(report.values())
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name
    assert loaded.step_sizes == model.step_sizes
    counters = {name: b for name, b in loaded.named_buffers() if name.endswith("pick_counts")}
    assert not any(count.any() for count in counters.values())


@pytest.mark.parametrize("kind", ["flat", "int8"])
def test_a_folder_holds_one_tensor_per_expert(kind, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    names, experts = stored(tmp_path), model.model.layers[2].mlp.experts
    assert not [name for name in names if ".experts.gate_proj" in name]
    for part, tensor in experts.up_proj.state_dict().items():
        for e in range(experts.num_experts):
            assert torch.equal(names[f"model.layers.2.mlp.experts.{e}.up_proj.{part}"], tensor[e])
    rows = sum(tensor.numel() for tensor in model.state_dict().values())
    assert sum(tensor.numel() for tensor in names.values()) == rows
    assert not [name for name in names if "token_bytes" in name or "pick_counts" in name]


def test_loading_again_and_saving_again_changes_no_file(exported, tmp_path):
    folder, _, _ = exported
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    first, second = stored(folder), stored(tmp_path)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_loading_does_not_initialize_what_is_in_the_folder(exported, tmp_path):
    folder, model, _ = exported
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = stored(tmp_path)
    missing = "model.layers.1.mixer.q_proj.weight"
    del tensors[missing]
    save_file(tensors, path, metadata={"format": "pt"})
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {missing}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]) == (name != missing), name
    assert loaded.state_dict()[missing].std().item() == pytest.approx(0.02, rel=0.1)


IN_FP32 = re.compile(r"router\.|_connection\.(b|alpha)_|mixer\.(A_log|dt_bias|D)$")


@pytest.mark.parametrize("kind", ["flat", "published sigmoid", "int4", "codebook"])
def test_bf16_models_keep_buffers_and_sensitive_parameters_as_they_are(kind, tmp_path):
    """Loaded in bf16, or cast to it later: an fp32 running mean in bf16 would no longer be what was trained."""
    model = build(kind)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    for found in (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), model.bfloat16()):
        parameters = dict(found.named_parameters())
        for name, tensor in found.state_dict().items():
            rounded = name in parameters and not IN_FP32.search(name)
            assert torch.equal(tensor, expected[name].bfloat16() if rounded else expected[name]), name
            assert tensor.dtype == (torch.bfloat16 if rounded else expected[name].dtype), name
        found.set_token_bytes(TOKENS)
        assert found(random_ids(1, 12)).logits.isfinite().all()
        assert not [name for name, p in parameters.items() if name.endswith("null_logit") and p.requires_grad]
    scales = {tensor.dtype for name, tensor in expected.items() if name.endswith("scales")}
    assert scales == {"int4": {torch.bfloat16}, "codebook": {torch.float32}}.get(kind, set())


def test_a_share_of_the_experts_is_not_saved_as_a_model(tmp_path):
    model = build("flat")
    shard_experts(model.model.layers[0].mlp.experts, 1, 2, 2)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts holds 2 of 4 experts"):
        model.save_pretrained(tmp_path)


def test_auto_classes_and_config_round_trip(exported):
    folder, model, _ = exported
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is LightningLMConfig
    ours, theirs = model.config.to_dict(), config.to_dict()
    assert {key for key, value in ours.items() if theirs.get(key) != value} <= {"_name_or_path"}
    body = AutoModel.from_pretrained(folder)
    assert type(body) is LightningLMModel
    assert all(torch.equal(t, body.state_dict()[n]) for n, t in model.model.state_dict().items())
    ids = random_ids(1, 6)
    assert torch.allclose(body.eval()(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_the_byte_table_comes_with_the_tokenizer(exported, tmp_path):
    folder, model, _ = exported
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model.embed_tokens.token_bytes, model.model.embed_tokens.token_bytes)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(RuntimeError, match="load_token_bytes"):
        AutoModelForCausalLM.from_pretrained(bare)(random_ids(1, 2))
    other = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (bare / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="trained with another tokenizer"):
        AutoModelForCausalLM.from_pretrained(bare)


def test_saving_the_tokenizer_again_does_not_change_its_hash(exported, tmp_path):
    folder, _, _ = exported
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert token_bytes(folder / "tokenizer.json") == token_bytes(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["dense", "flat", "grouped", "int8"])
def test_generation_with_a_cache_equals_generation_without(kind):
    model = build(kind, pad_token_id=0).eval()
    ids = random_ids(2, 20)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    cached, plain = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached, plain) and cached.shape == (2, 28)


@pytest.mark.parametrize("kind", ["dense", "grouped"])
def test_batched_generation_with_left_padding_equals_one_by_one(kind):
    model = build(kind, pad_token_id=0).eval()
    prompts = [random_ids(1, n, seed=n) for n in (17, 9, 23)]
    ids, mask = torch.zeros(3, 23, dtype=torch.long), torch.zeros(3, 23, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 23 - prompt.shape[1] :], mask[row, 23 - prompt.shape[1] :] = prompt[0], 1
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
        assert torch.equal(alone[0, prompt.shape[1] :], together[row, 23:])


def test_generation_inside_a_document():
    model = build("flat", document_boundaries=True, eos_token_id=1, pad_token_id=0).eval()
    ids = random_ids(1, 12)
    mask = torch.ones_like(ids)
    alone = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(
        alone, model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, use_cache=False)
    )


def test_sampling_beams_and_scores():
    model = build("flat", pad_token_id=0).eval()
    ids = random_ids(2, 9)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5}
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(model.generate(ids, do_sample=True, temperature=2.0, top_p=0.9, **options))
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])
    cached, plain = (model.generate(ids, num_beams=3, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)
    out = model.generate(ids, return_dict_in_generate=True, output_logits=True, do_sample=False, **options)
    assert out.sequences.shape == (2, 14) and len(out.logits) == 5
    with torch.no_grad():
        full = model(out.sequences).logits
    assert torch.allclose(torch.stack(out.logits, 1), full[:, 8:13], atol=1e-4)


def test_text_generation_pipeline(exported):
    folder, _, _ = exported
    generator = pipeline("text-generation", model=str(folder), device="cpu")
    texts = ["the rest", "seat"]
    outputs = generator(texts, max_new_tokens=4, do_sample=False, batch_size=2)
    for text, output in zip(texts, outputs, strict=True):
        assert output[0]["generated_text"].startswith(text) and len(output[0]["generated_text"]) > len(text)


def test_trainer_takes_a_step(exported, tmp_path):
    _, model, tokenizer = exported
    model = copy.deepcopy(model)
    rows = [tokenizer(text)["input_ids"] for text in ("the rest of the seats", "these are not", "art", "eat it")]
    data = [{"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)} for ids in rows]

    def collate(batch):
        width = max(len(row["input_ids"]) for row in batch)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            key: torch.tensor([row[key] + [value] * (width - len(row[key])) for row in batch])
            for key, value in fill.items()
        }

    arguments = TrainingArguments(
        output_dir=tmp_path,
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        activation_checkpointing=True,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, data_collator=collate)
    whole = collate(data)
    expected = model(**whole).loss.item()
    loss = trainer.train().training_loss
    assert loss == pytest.approx(expected, rel=1e-3)
    moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert "lm_head.weight" in moved and "model.embed_tokens.proj.weight" in moved
    assert trainer.evaluate()["eval_loss"] < expected
    assert trainer.predict(data).predictions.shape == (len(data), whole["input_ids"].shape[1], model.config.vocab_size)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("dense", ["q_proj", "o_proj", "gate_proj", "down_proj"]),
        ("flat", r".*\.(mixer|shared_expert)\.(q|k|v|o|gate|up|down)_proj"),
    ],
)
def test_lora_trains_its_adapters_only(kind, targets):
    model = build(kind, num_nextn_predict_layers=0)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    wrapped.train()
    ids = random_ids(2, 24)
    first = wrapped(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
    first.backward()
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert all(p.grad.any() for name, p in trained.items() if "lora_B" in name)
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    optimizer.step()
    optimizer.zero_grad()
    second = wrapped(input_ids=ids, labels=ids).loss
    second.backward()
    assert second < first
    assert all(p.grad.any() for p in trained.values())  # those of A, too, now that B is not zero


def test_gradient_checkpointing_chooses_a_backend_with_less_memory():
    ids, grads = random_ids(1, 24), []
    for stack in ({"stack_backend": "stored"}, {"stack": "sequential"}):
        for enable in (False, True):
            model = build("dense", **stack).train()
            if enable:
                model.activation_checkpointing_enable()
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t
            ):
                loss = model(ids, labels=ids).loss
            loss.backward()
            grads.append((sum(kept), model.model.layers[0].mixer.q_proj.weight.grad))
    for (stored_bytes, expected), (kept_bytes, found) in (grads[:2], grads[2:]):
        assert kept_bytes < 0.5 * stored_bytes
        assert torch.allclose(found, expected, atol=1e-6)


CLEAN_PROCESS = """
import json, sys
sys.modules["lightninglm"] = None  # as if the package were not installed
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
batch = tokenizer(["the rest", "eat"], return_tensors="pt", padding=True)
out = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=5, do_sample=False)
model.save_pretrained(sys.argv[2])
json.dump(out.tolist(), open(sys.argv[2] + "/generated.json", "w"))
"""


def test_an_exported_folder_works_where_this_package_is_not_installed(exported, tmp_path):
    folder, model, tokenizer = exported
    run = subprocess.run(
        [sys.executable, "-c", CLEAN_PROCESS, str(folder), str(tmp_path / "again")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    batch = tokenizer(["the rest", "eat"], return_tensors="pt", padding=True)
    expected = model.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=5, do_sample=False
    )
    assert json.loads((tmp_path / "again" / "generated.json").read_text()) == expected.tolist()
    first, second = stored(folder), stored(tmp_path / "again")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
