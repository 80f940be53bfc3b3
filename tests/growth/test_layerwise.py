"""One layer at a time gives what the whole model gives, bit for bit, and holds one layer's weights."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoints import MIXTURE, VOCABULARY, small_config, write_checkpoint
from torch.nn import functional as F

from growth import layerwise
from growth.layerwise import LayerwiseModel
from growth.receipt import load_model, measure


def run_whole(folder, ids, mask, rows):
    """Logits of the whole model for the next and the second token, piece by piece."""
    model = load_model(folder)
    results = []
    for some, kept in zip(ids.split(rows), mask.split(rows), strict=True):
        with torch.no_grad():
            out = model(input_ids=some, attention_mask=kept, use_cache=False, output_mtp_logits=model.mtp is not None)
        results.append((out.logits, out.mtp_logits))
    first, second = zip(*results, strict=True)
    return torch.cat(first), None if model.mtp is None else torch.cat(second)


@pytest.fixture(params=["dense", "mixture", "deeper", "many", "quantized", "bf16", "sequential", "plain"])
def checkpoint(request, tmp_path, tokenizer, grown):
    if request.param in ("dense", "mixture"):
        return request.getfixturevalue(request.param)
    if request.param == "quantized":
        source = request.getfixturevalue("quantizable")
        return grown(source, "quantize_experts", rank=4, group_size=32, kind="int4", residual_init=True)
    if request.param in ("deeper", "many"):
        source = request.getfixturevalue("mixture")
        if request.param == "deeper":
            return grown(source, "deepen", source_layers=[0, 1, 2, 3, 0, 1])
        return grown(source, "multiply_experts", num_experts=18)
    changes = {
        "bf16": MIXTURE,
        "sequential": {"stack": "sequential", "mtp_stack": "midpoint"},
        "plain": {"num_nextn_predict_layers": 0, "document_boundaries": True, "eos_token_id": 3},
    }[request.param]
    dtype = torch.bfloat16 if request.param == "bf16" else torch.float32
    return write_checkpoint(tmp_path / "source", small_config(**changes), tokenizer, dtype=dtype)


def test_layer_by_layer_is_the_whole_model_bit_for_bit(checkpoint, monkeypatch):
    monkeypatch.setattr(layerwise, "TOKENS_PER_CALL", 50)
    monkeypatch.setattr(layerwise, "TOKENS_PER_PASS", 100)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (9, 24), generator=random)  # pieces of 2 rows, passes of 4
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :7] = mask[6, 20:] = False
    model = LayerwiseModel(checkpoint)
    hidden = model.hidden_states(ids, keep=mask)
    whole = run_whole(checkpoint, ids, mask, rows=2)
    with model.head() as head:
        for states, logits in zip(hidden, whole, strict=True):
            assert (states is None) == (logits is None)
            if states is not None:
                rows = torch.cat([head(piece) for piece in states.split(2)])
                assert torch.equal(rows[mask], logits[mask])


def test_measured_losses_are_those_of_the_whole_models(mixture, grown, heldout):
    target = grown(mixture, "multiply_experts", num_experts=12, strategy="paper")
    measured = measure(mixture, target, heldout)["heldout"]
    for domain, ids in load_file(heldout).items():
        ids = ids.long()
        for key, folder in (("before", mixture), ("after", target)):
            logits, _ = run_whole(folder, ids, torch.ones_like(ids, dtype=torch.bool), rows=len(ids))
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
            assert measured[domain][key] == pytest.approx(loss.item(), abs=1e-6)


def test_domains_of_different_lengths_are_measured(mixture, tmp_path):
    ids = {"long": torch.arange(80, dtype=torch.int32).view(2, 40), "short": torch.ones(3, 8, dtype=torch.int32)}
    save_file(ids, tmp_path / "heldout.safetensors")
    measured = measure(mixture, mixture, tmp_path / "heldout.safetensors")
    assert list(measured["heldout"]) == ["long", "short"] and measured["logits"]["max_absolute"] == 0
    for domain, rows in ids.items():
        save_file({domain: rows}, tmp_path / f"{domain}.safetensors")
        alone = measure(mixture, mixture, tmp_path / f"{domain}.safetensors")
        assert alone["heldout"][domain] == measured["heldout"][domain]


def test_one_layer_is_in_memory_at_a_time_and_zero_steps_are_not_read(mixture, grown, monkeypatch):
    target = grown(mixture, "deepen", source_layers=[0, 1, 2, 3, 0, 1, 2, 3])
    load, loaded, real = LayerwiseModel._load, {}, []

    def recorded(model, prefix, module):
        load(model, prefix, module)
        loaded[prefix] = module
        real.append([n for n, m in loaded.items() if any(p.device.type != "meta" for p in m.parameters())])

    monkeypatch.setattr(LayerwiseModel, "_load", recorded)
    model = LayerwiseModel(target)
    model.hidden_states(torch.arange(20)[None])
    with model.head():
        pass
    units = [*(f"model.layers.{i}" for i in range(4)), "mtp", "lm_head"]
    assert real == [["model"], *(["model", unit] for unit in units)]
    small = sum(p.numel() for p in loaded["model"].parameters())
    assert small < 0.7 * sum(p.numel() for p in load_model(target).parameters())
