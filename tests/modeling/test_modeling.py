"""The whole model: gradients everywhere, decoding, padding, documents, losses, statistics, the stack's controls."""

import re

import pytest
import torch

from lightninglm.modeling import LightningLMForCausalLM
from lightninglm.modeling.modeling_lightninglm import token_positions
from tests.modeling.tiny_models import (
    INT8,
    ROUTERS,
    TOKENS,
    assert_same_but_for_rounding,
    random_ids,
    spread_weights,
    tiny_config,
    tiny_model,
)

DEFAULT = [kind for kind in ROUTERS if not kind.startswith("published")]
EVERY = [*DEFAULT, "null slots", "quantized"]
# What of the published mode depends on the length of the sequence, on padding, or on ties.
CAUSAL = {"sparse_variance": "valid_keys", "sparse_score_dtype": "float32", "conv_mask_inputs": True}


def build(kind, **overrides):
    """A model off its symmetric start. With 20 fraction bits a unit of the states is 1e-6; with 16 it is above 1e-5."""
    overrides = {"frac_bits": 20} | overrides
    if kind == "quantized":
        kind, overrides["expert_quantization"] = "grouped", INT8
    elif kind == "null slots":
        kind, overrides["num_null_experts"] = "flat", 4
    return spread_weights(tiny_model(kind, **overrides))


# What the published mode does not train: the indexer, which only feeds hard choices, and null logits without effect, in
# the second-token layer (it has no auxiliary losses) and in the 120B (it has no null slots).
UNTRAINED = {
    "published dense": r"\.indexer\.",
    "published softmax": r"\.indexer\.|^mtp\..*\.null_logit$",
    "published sigmoid": r"\.indexer\.|\.null_logit$",
}


@pytest.mark.parametrize("kind", [*ROUTERS, "null slots", "quantized"])
def test_every_parameter_gets_a_gradient(kind):
    """With memory and second-token layer, after one training step."""
    model = build(kind).train()
    ids = random_ids(4, 64)
    model(ids, labels=ids, prev_memory=torch.randn(4, 64)).loss.backward()
    names = [name for name, _ in model.named_parameters()]
    assert any(name.startswith("mtp.") for name in names) and any(".memory." in name for name in names)
    untrained = [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-15]
    assert untrained == [name for name in names if kind in UNTRAINED and re.search(UNTRAINED[kind], name)]


@pytest.mark.parametrize("frac_bits", [16, 22])
@pytest.mark.parametrize("kind", [*ROUTERS, "null slots", "quantized"])
def test_prefill_and_decode_equal_the_full_forward(kind, frac_bits):
    model = build(kind, frac_bits=frac_bits, **CAUSAL).eval()
    ids = random_ids(2, 40)
    with torch.no_grad():
        full = model(ids).logits
        out = model(ids[:, :25], use_cache=True)
        steps = [out.logits]
        for t in range(25, 40):
            out = model(ids[:, t : t + 1], cache=out.cache, use_cache=True)
            steps.append(out.logits)
    assert_same_but_for_rounding(torch.cat(steps, 1), full, frac_bits)


@pytest.mark.parametrize("frac_bits", [16, 22])
@pytest.mark.parametrize("kind", [*ROUTERS, "null slots", "quantized"])
def test_padding_and_company_do_not_change_a_sequence(kind, frac_bits):
    model = build(kind, frac_bits=frac_bits, **CAUSAL).eval()
    ids = random_ids(1, 30)
    batch, mask = random_ids(3, 44, seed=5), torch.zeros(3, 44, dtype=torch.long)
    for row, start in ((0, 14), (1, 0), (2, 6)):  # left padding, right padding, both
        batch[row, start : start + 30], mask[row, start : start + 30] = ids[0], 1
    with torch.no_grad():
        alone = model(ids)
        padded = model(batch, attention_mask=mask)
    for row, start in ((0, 14), (1, 0), (2, 6)):
        assert_same_but_for_rounding(padded.logits[row, start : start + 30], alone.logits[0], frac_bits)
        torch.testing.assert_close(padded.memory[row], alone.memory[0], rtol=1e-4, atol=1e-4)


def test_the_published_budget_of_keys_depends_on_the_length():
    """With `sparse_variance="zero_filled"`, no cache can pick the keys that a full forward pass picks."""
    model = build("published dense").eval()
    ids = random_ids(1, 40)
    with torch.no_grad():
        assert (model(ids).logits[:, :30] - model(ids[:, :30]).logits).abs().max() > 1e-3


@pytest.mark.parametrize("kind", EVERY)
def test_losses_ignore_padding(kind):
    model = build(kind).train()
    ids = random_ids(2, 30)
    padded = torch.cat([random_ids(2, 9, seed=3), ids, random_ids(2, 5, seed=4)], dim=1)
    mask = torch.zeros_like(padded)
    mask[:, 9:39] = 1
    plain, found = model(ids, labels=ids), model(padded, labels=padded, attention_mask=mask)
    for term in ("loss", "next_token_loss", "second_token_loss", "aux_loss"):
        assert torch.isclose(getattr(found, term), getattr(plain, term), atol=1e-5)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("given", ["document_ids", "cu_seqlens", "position_ids", "eos"])
def test_documents_in_a_row_equal_documents_alone(kind, given):
    model = build(kind, document_boundaries=True, eos_token_id=0).eval()
    lengths = [13, 20, 9]
    documents = [random_ids(1, n, seed=n) for n in lengths]
    if given == "eos":
        for document in documents:
            document[:, -1] = 0
    row = torch.cat(documents, dim=1)
    arguments = {
        "document_ids": {"document_ids": torch.repeat_interleave(torch.tensor([7, 2, 9]), torch.tensor(lengths))[None]},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, 13, 33, 42])},
        "position_ids": {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]},
        "eos": {},
    }[given]
    with torch.no_grad():
        together = model(row, labels=row, output_mtp_logits=True, **arguments)
        alone = [model(document, labels=document, output_mtp_logits=True) for document in documents]
    assert torch.allclose(together.logits, torch.cat([out.logits for out in alone], 1), atol=1e-5)
    assert torch.allclose(together.mtp_logits, torch.cat([out.mtp_logits for out in alone], 1), atol=1e-5)
    for term, lost in (("next_token_loss", 1), ("second_token_loss", 2)):
        counts = [n - lost for n in lengths]
        mean = sum(getattr(out, term) * n for out, n in zip(alone, counts, strict=True)) / sum(counts)
        assert torch.isclose(getattr(together, term), mean, atol=1e-5)


def test_documents_decode_with_a_cache():
    model = build("flat", document_boundaries=True).eval()
    ids = random_ids(1, 24)
    documents = (torch.arange(24) >= 10).long()[None]
    with torch.no_grad():
        full = model(ids, document_ids=documents).logits
        out = model(ids[:, :14], document_ids=documents[:, :14], use_cache=True)
        rest = [model(ids[:, t : t + 1], document_ids=documents[:, t : t + 1], cache=out.cache) for t in range(14, 24)]
    assert torch.allclose(torch.cat([step.logits for step in rest], 1), full[:, 14:], atol=1e-5)


def test_positions_count_real_tokens_of_the_document():
    keep = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    assert token_positions(keep, None)[0, 2:7].tolist() == [0, 1, 2, 3, 4]
    assert token_positions(keep, torch.tensor([[8, 8, 3, 3, 3, 4, 4, 4]]))[0, 2:7].tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("kind", ["dense", "grouped", "published softmax"])
def test_stack_backends_give_the_same_values_and_gradients(kind):
    ids, results = random_ids(2, 48), {}
    for backend in ("reversible", "stored", "checkpointed"):
        model = build(kind, stack_backend=backend).train()
        loss = model(ids, labels=ids).loss
        loss.backward()
        results[backend] = (loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    loss, grads = results.pop("stored")
    for found_loss, found in results.values():
        assert torch.equal(found_loss, loss) and found.keys() == grads.keys()
        for name, grad in grads.items():
            assert (found[name] - grad).abs().max() <= 1e-5 * grad.abs().max() + 1e-8, name


def test_stack_trains_when_the_embedding_is_frozen():
    model = tiny_model("flat").train()
    model.model.embed_tokens.requires_grad_(False)
    ids = random_ids(2, 32)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.model.layers[0].mixer.parameters())


@pytest.mark.parametrize("kind", ["flat", "published softmax"])
def test_losses_add_up_over_micro_batches(kind):
    ids = random_ids(4, 40)
    labels = ids.clone()
    labels[:2, :17] = -100
    counts = {
        "num_items_in_batch": (labels[:, 1:] != -100).sum(),
        "num_second_items_in_batch": (labels[:, 2:] != -100).sum(),
    }
    model = build(kind, router_scoring="softmax", balance="none", indexer_kl_weight=0.0).train()
    whole = model(ids, labels=labels)
    whole.loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parts = [model(ids[i : i + 2], labels=labels[i : i + 2], **counts) for i in (0, 2)]
    for part in parts:
        part.loss.backward()
    for term in ("loss", "next_token_loss", "second_token_loss", "aux_loss"):
        assert torch.isclose(sum(getattr(part, term) for part in parts), getattr(whole, term), atol=1e-5), term
    for name, grad in expected.items():
        assert torch.allclose(dict(model.named_parameters())[name].grad, grad, atol=1e-5), name


def test_means_of_a_micro_batch_are_weighted_by_its_share_of_the_targets():
    model, ids = build("published softmax").train(), random_ids(2, 21)
    alone, part = model(ids, labels=ids), model(ids, labels=ids, num_items_in_batch=160)
    assert alone.aux_loss > 0
    for term in ("loss", "next_token_loss", "second_token_loss", "aux_loss"):
        assert torch.isclose(getattr(part, term), getattr(alone, term) * 40 / 160, atol=1e-6), term


def test_no_targets_give_zero_loss():
    model = tiny_model("flat").train()
    out = model(random_ids(2, 8), labels=torch.full((2, 8), -100))
    out.loss.backward()
    assert out.loss.item() == out.next_token_loss.item() == out.second_token_loss.item() == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    one = model(random_ids(1, 1), labels=random_ids(1, 1))
    assert one.loss.item() == 0


def test_logits_are_capped_and_returned_when_useful():
    model = build("dense")
    ids = random_ids(2, 8)
    model.lm_head.weight.data *= 1000
    assert model.train()(ids, labels=ids).logits is None
    assert model(ids).logits.abs().max() <= 15
    assert model.eval()(ids, labels=ids, return_logits=False).logits is None
    full = model(ids, labels=ids)
    assert full.logits.shape == (2, 8, 512) and full.cache is None
    assert torch.allclose(model(ids, logits_to_keep=3).logits, full.logits[:, -3:], atol=1e-5)
    mean = torch.nn.functional.cross_entropy(full.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.isclose(mean, full.next_token_loss, atol=1e-5)


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 8), torch.ones(2, 1, 8, 8, dtype=torch.bool), torch.ones(2, 7, dtype=torch.long)]
)
def test_masks_of_another_kind_are_refused(mask):
    with pytest.raises(ValueError, match="needs bool or integers of shape"):
        tiny_model("dense")(random_ids(2, 8), attention_mask=mask)


def test_arguments_that_mean_nothing_here_are_refused():
    model = tiny_model("dense")
    model(random_ids(1, 4), output_attentions=False, inputs_embeds=None)
    with pytest.raises(TypeError, match="inputs_embeds"):
        model(random_ids(1, 4), inputs_embeds=torch.zeros(1, 4, 64))
    with pytest.raises(ValueError, match=r"config\.document_boundaries = True"):
        model(random_ids(1, 4), document_ids=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"config\.eos_token_id"):
        tiny_model("dense", document_boundaries=True)(random_ids(1, 4))
    with pytest.raises(NotImplementedError, match="vocab_size"):
        model.resize_token_embeddings(600)


def test_sequences_beyond_the_trained_context_warn_once(caplog):
    model = tiny_model("dense", max_position_embeddings=11)
    for length in (11, 12, 12):
        model(random_ids(1, length))
    warnings = [record.message for record in caplog.records if "max_position_embeddings" in record.message]
    assert len(warnings) == 1 and "12 tokens exceed config.max_position_embeddings = 11" in warnings[0]


class Total:
    """Stands for `ranks` equal ranks in place of all_reduce."""

    def __init__(self, ranks):
        self.ranks, self.calls = ranks, 0

    def __call__(self, flat):
        self.calls += 1
        assert flat.dim() == 1
        flat *= self.ranks


def balance_state(model):
    names = ("logit_bias", "group_bias", "member_bias", "usage_ema", "variance_ema")
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(names)}


@pytest.mark.parametrize("kind", ["flat", "grouped"])
def test_statistics_move_once_per_step_by_all_ranks_and_micro_batches(kind):
    ids = random_ids(4, 64)
    states = []
    for micro_batches in (1, 4):
        model = build(kind, sparse_variance="valid_keys").train()
        before = balance_state(model)
        for part in ids.chunk(micro_batches):
            model(part, labels=part).loss.backward()
        assert all(torch.equal(before[name], now) for name, now in balance_state(model).items())
        total = Total(3)
        picks = model.after_optimizer_step(reduce=total)
        assert total.calls == 1
        assert [int(count.sum()) for count in picks[:-1]] == [3 * ids.numel() * model.config.num_experts_per_tok] * 4
        states.append(balance_state(model))
    assert all(torch.allclose(states[0][name], states[1][name], atol=1e-6) for name in before)
    assert any(not torch.equal(before[name], states[0][name]) for name in before if name.endswith("bias"))
    assert all(states[0][name] != 1 for name in before if name.endswith("variance_ema"))


def test_statistics_do_not_move_in_evaluation_or_after_a_skipped_step():
    model, ids = build("flat"), random_ids(2, 64)
    before = balance_state(model)
    model.eval()(ids, labels=ids)
    with torch.no_grad():
        model.train()(ids, labels=ids)
    assert not any(count.any() for count in model.after_optimizer_step())
    model(ids, labels=ids).loss.backward()
    model.after_optimizer_step(update=False)
    model.after_optimizer_step()
    biases = {name: now for name, now in balance_state(model).items() if name.endswith("bias")}
    assert biases and all(torch.equal(before[name], now) for name, now in biases.items())


def test_step_sizes_follow_their_buffer():
    model = tiny_model("dense")
    steps = [0.125, 0.25, 0.0, 0.0]
    model.set_step_size(steps)
    assert model.step_sizes == model.config.step_sizes == model.model.step_size.tolist() == steps
    other = tiny_model("dense")
    other.load_state_dict(model.state_dict())
    assert other.step_sizes == steps
    with pytest.raises(ValueError, match="3 step sizes for 4 layers"):
        model.set_step_size(steps[:3])


def test_a_zero_step_pair_changes_nothing():
    ids = random_ids(2, 20)
    model = build("dense").eval()
    grown = LightningLMForCausalLM(
        tiny_config(
            "dense",
            num_hidden_layers=6,
            frac_bits=20,
            step_sizes=[0.125, 0.25, 0.25, 0.25, 0.0, 0.0],
            layer_types=[*model.config.layer_types, "linear_attention", "linear_attention"],
        )
    ).eval()
    grown.set_token_bytes(TOKENS)
    state = grown.state_dict() | {
        k: v for k, v in model.state_dict().items() if k not in ("model.step_size", "model.blend")
    }
    grown.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, grown(ids).logits)


def test_model_without_head_gives_the_hidden_states():
    model = build("flat").eval()
    ids = random_ids(2, 12)
    with torch.no_grad():
        out = model.model(ids)
        assert torch.equal(model(ids).logits, model._logits(out.last_hidden_state))
    assert out.cache is not None and out.memory.shape == (2, 64) and not out.memory.requires_grad
    assert isinstance(model(ids, return_dict=False), tuple)


def test_bf16_runs_close_to_fp32():
    model = build("flat").eval()
    ids = random_ids(2, 24)
    with torch.no_grad():
        expected = model(ids).logits
        found = model.bfloat16()(ids).logits
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.1 * expected.norm()
