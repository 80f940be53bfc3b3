"""Gated sparse attention: the specification query by query, what its budget may depend on, decoding, the indexer."""

import math
from dataclasses import replace

import pytest
import torch

from lightninglm.modeling import sparse_attention
from lightninglm.modeling.sparse_attention import GatedSparseAttention, key_budget, naive_select_keys, select_keys
from tests.modeling.mixers import (
    assert_equals_definition,
    context,
    frequencies,
    hidden,
    in_pieces,
    mixer_config,
    randomized,
    rotated,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def make(seed=0, **changes):
    config = mixer_config(**changes)
    mixer = randomized(GatedSparseAttention(config, 3), seed)
    mixer.variance_ema.fill_(0.15)
    return config, mixer


def forward(mixer, config, x, keep=None, documents=None):
    return mixer(x, context(config, *x.shape[:2], keep, documents))[0]


def aux_loss(mixer, config, x, keep=None, documents=None):
    return mixer(x, context(config, *x.shape[:2], keep, documents))[1]


def by_definition(p, config, x):
    """docs/model.md, "Gated sparse attention", in fp64 for one row of real tokens [T, H]."""
    y, loss, _, _ = in_detail(p, config, x)
    return y, loss


def in_detail(p, config, x):
    """The same with the number of kept keys and the variance of every query."""
    length, heads, dim, sinks = len(x), 2, 16, config.sparse_sink_keys
    q, k, v = (x @ p[f"{name}_proj.weight"].T for name in "qkv")
    v = v * (x @ p["gv_proj.weight"].T).sigmoid()
    q, k, v = (tensor.view(length, heads, dim) for tensor in (q, k, v))
    q, k = (rotated(tensor, frequencies(config, dim)) for tensor in (q, k))
    index_q = (x.detach() @ p["indexer.q_proj.weight"].T).view(length, 3, 8)
    index_k, index_w = (x.detach() @ p[f"indexer.{name}_proj.weight"].T for name in "kw")
    outputs, losses, budgets, variances = [], [], [], []
    for t in range(length):
        gates = (index_q[t] @ index_k[: t + 1].T / math.sqrt(8) + p["indexer.gate_bias"][:, None]).sigmoid()
        c = (index_w[t].sigmoid()[:, None] * gates).sum(0)
        ranked = c.detach().bfloat16().double() if config.sparse_score_dtype == "bfloat16" else c.detach()
        slots = torch.cat([ranked, ranked.new_zeros(length - t - 1)])
        variance = (slots if config.sparse_variance == "zero_filled" else ranked).var(unbiased=False)
        budget = math.floor(config.sparse_key_budget * variance / max(p["variance_ema"], 1e-6))
        budget = min(t + 1, max(1, min(max(budget, config.sparse_min_keys), config.sparse_max_keys)))
        order = sorted(range(t + 1), key=lambda s: (s >= sinks, -ranked[s].item() if s >= sinks else 0, s))
        kept = sorted(order[:budget])
        attention = (k[kept] * q[t]).sum(-1).div(math.sqrt(dim)).softmax(0)  # [kept, heads]
        outputs.append((attention.unsqueeze(-1) * v[kept]).sum(0))
        taught = [n for n, s in enumerate(kept) if s >= sinks]
        if len(taught) >= 2:
            target = attention[taught].detach().mean(1)
            target = target / target.sum()
            guess = (4 * c[[kept[n] for n in taught]]).softmax(0)
            losses.append((target * (target / guess).log()).sum())
        budgets.append(budget)
        variances.append(variance)
    y = (torch.stack(outputs).flatten(-2) * (x @ p["go_proj.weight"].T).sigmoid()) @ p["o_proj.weight"].T
    loss = config.indexer_kl_weight * torch.stack(losses).mean() if config.indexer_kl_weight else None
    return y, loss, budgets, torch.stack(variances)


def exact(mixer):
    return {name: tensor.double() for name, tensor in mixer.state_dict().items()}


@pytest.mark.parametrize("mode", ["default", "published"])
@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_values_and_gradients_equal_the_specification(backend, mode, monkeypatch):
    monkeypatch.setattr(sparse_attention, "BLOCK_LENGTH", 16)
    config, mixer = make(attention_backend=backend, mode=mode)
    x = hidden(1, 50)
    budgets = in_detail(exact(mixer), config, x[0].double())[2]
    assert len(set(budgets)) > 5  # the test means something only if the budget varies
    assert_equals_definition(mixer, config, x, by_definition)


@pytest.mark.parametrize("block_length", [7, 128])
@pytest.mark.parametrize("stored_keys", [0, 1024])
@pytest.mark.parametrize("stride", [1, 3])
def test_blocks_equal_the_dense_reference(monkeypatch, block_length, stored_keys, stride):
    """Values, auxiliary loss and all gradients, for any block length, with blocks recomputed or not."""
    x, keep, results = hidden(2, 60), torch.ones(2, 60, dtype=torch.bool), []
    keep[1, 50:] = False
    monkeypatch.setattr(sparse_attention, "BLOCK_LENGTH", block_length)
    monkeypatch.setattr(sparse_attention, "MAX_STORED_KEYS", stored_keys)
    for backend in ("naive", "torch"):
        config, mixer = make(attention_backend=backend, indexer_kl_stride=stride)
        x = x.detach().requires_grad_()
        y, aux = mixer(x, context(config, 2, 60, keep))
        gradients = torch.autograd.grad((y * hidden(2, 60, seed=3)).sum() + 100 * aux, [x, *mixer.parameters()])
        results.append([y, aux, *gradients])
    for reference, actual in zip(*results, strict=True):
        assert (actual - reference).abs().max() <= 1e-5 * max(1, reference.abs().max())


def test_no_tensor_of_all_queries_keys_and_heads_is_built(monkeypatch):
    monkeypatch.setattr(sparse_attention, "MAX_STORED_KEYS", 256)
    config, mixer = make()
    length, largest = 512, 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return result

    saved = 0

    def count(tensor):
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    with Largest(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        y, aux = mixer(hidden(1, length).requires_grad_(), context(config, 1, length))
    (y.sum() + aux).backward()
    assert largest < length * length * config.num_attention_heads * 4
    assert saved < length * length * config.num_attention_heads * 4


@pytest.mark.parametrize("mode", ["default", "published"])
def test_every_parameter_gets_a_gradient_the_indexer_from_its_loss_only(mode):
    config, mixer = make(mode=mode)
    x = hidden(2, 40).requires_grad_()
    y, aux = mixer(x, context(config, 2, 40))
    y.square().sum().backward(retain_graph=aux is not None)
    without = {name for name, p in mixer.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == {name for name, _ in mixer.named_parameters() if name.startswith("indexer.")}
    if mode == "published":
        assert aux is None  # as published, nothing trains the indexer
        return
    x.grad = None
    mixer.zero_grad()
    aux.backward()
    assert {name for name, p in mixer.named_parameters() if p.grad is not None and p.grad.any()} == without
    assert x.grad is None


def test_the_indexer_loss_falls_when_it_is_followed():
    config, mixer = make()
    x = hidden(2, 60)
    losses = []
    optimizer = torch.optim.Adam(mixer.indexer.parameters(), lr=0.02)
    for _ in range(40):
        aux = aux_loss(mixer, config, x)
        losses.append(aux.item())
        optimizer.zero_grad()
        aux.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_the_loss_exists_in_training_also_without_gradients_and_not_in_evaluation():
    config, mixer = make()
    x = hidden(1, 40)
    with torch.no_grad():
        loss = aux_loss(mixer, config, x)
    assert torch.equal(loss, aux_loss(mixer, config, x))
    assert aux_loss(mixer.eval(), config, x) is None


def test_few_tokens_give_a_zero_loss():
    config, mixer = make()
    aux = aux_loss(mixer, config, hidden(2, 3))  # two sinks and one more key: nothing to rank
    assert aux == 0
    aux.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in mixer.parameters())


def test_queries_do_not_see_the_length_or_later_keys():
    config, mixer = make()
    x = hidden(2, 150)
    torch.testing.assert_close(forward(mixer, config, x)[:, :40], forward(mixer, config, x[:, :40]), **CLOSE)


def test_padding_changes_nothing():
    config, mixer = make()
    x, lengths = hidden(3, 50), [50, 33, 1]
    for side in ("left", "right"):
        keep = torch.zeros(3, 50, dtype=torch.bool)
        for row, length in enumerate(lengths):
            keep[row, slice(50 - length, None) if side == "left" else slice(length)] = True
        y, aux = mixer(x, replace(context(config, 3, 50, keep), record_statistics=True))
        total, count = mixer.statistics()[0].tolist()
        assert not y[~keep].any() and count == sum(lengths)
        variance_sum, losses = 0.0, []
        for row in range(3):
            mixer.after_optimizer_step(update=False)
            ctx = replace(context(config, 1, lengths[row]), record_statistics=True)
            alone, loss = mixer(x[row : row + 1, keep[row]], ctx)
            torch.testing.assert_close(y[row, keep[row]], alone[0], **CLOSE)
            variance_sum += mixer.statistics()[0][0].item()
            losses.append(loss * (lengths[row] - 3 if lengths[row] > 3 else 0))
        mixer.after_optimizer_step(update=False)
        assert math.isclose(total, variance_sum, rel_tol=1e-5)
        torch.testing.assert_close(aux, sum(losses) / sum(max(0, n - 3) for n in lengths), **CLOSE)


def test_documents_equal_separate_runs_each_with_its_own_sinks():
    config, mixer = make(document_boundaries=True)
    x = hidden(2, 60)
    documents = torch.tensor([[0] * 20 + [1] * 2 + [2] * 38, [7] * 35 + [8] * 25])
    keep = torch.ones(2, 60, dtype=torch.bool)
    keep[1, :5] = keep[1, 30:35] = keep[1, 58:] = False
    documents[1, 31:35] = 5  # an id at padding means nothing
    y = forward(mixer, config, x, keep, documents)
    for row in range(2):
        for document in documents[row, keep[row]].unique():
            tokens = keep[row] & (documents[row] == document)
            alone = forward(mixer, config, x[row : row + 1, tokens])
            torch.testing.assert_close(y[row, tokens], alone[0], **CLOSE)


@pytest.mark.parametrize("pieces", [[40] + [1] * 10, [1] * 50, [2, 1, 30, 1, 16]])
def test_decoding_equals_the_full_forward_with_the_same_budgets(pieces, monkeypatch):
    config, mixer = make()
    mixer.eval()
    budgets = []

    def recorded(*arguments):
        result = key_budget(*arguments)
        budgets.append(result[0])
        return result

    monkeypatch.setattr(sparse_attention, "key_budget", recorded)
    x = hidden(2, 50)
    expected = forward(mixer, config, x)
    full = torch.cat(budgets, dim=1)
    budgets.clear()
    torch.testing.assert_close(in_pieces(mixer, config, x, pieces), expected, **CLOSE)
    assert torch.equal(torch.cat(budgets, dim=1), full)
    assert full.unique().numel() > 5


@pytest.mark.parametrize("side", ["left", "right"])
def test_decoding_after_a_padded_prompt(side):
    config, mixer = make()
    x, lengths, prompt, new = hidden(4, 30), [20, 13, 2, 1], 20, 10
    keep = torch.ones(4, 30, dtype=torch.bool)
    for row, length in enumerate(lengths):
        keep[row, slice(prompt - length) if side == "left" else slice(length, prompt)] = False
    y = in_pieces(mixer.eval(), config, x, [prompt] + [1] * new, keep)
    for row in range(4):
        alone = forward(mixer, config, x[row : row + 1, keep[row]])
        torch.testing.assert_close(y[row, keep[row]], alone[0], **CLOSE)


def test_decoding_across_documents():
    config, mixer = make(document_boundaries=True)
    x = hidden(2, 40)
    documents = torch.tensor([[0] * 11 + [1] * 17 + [2] * 12, [0] * 26 + [4] * 14])
    y = in_pieces(mixer.eval(), config, x, [10, 2, 1, 12] + [1] * 15, documents=documents)
    torch.testing.assert_close(y, forward(mixer, config, x, documents=documents), **CLOSE)


def test_selection_puts_sinks_first_and_breaks_ties_by_position():
    scores = torch.tensor([[[0.5, 0.1, 0.9, 0.9, 0.2, 0.9, 0.9]]])
    valid = torch.tensor([[[False, True, True, True, True, True, True]]])
    sinks = torch.tensor([[True, True, False, False, False, False, False]])
    for budget, expected in ((1, [1]), (2, [1, 2]), (4, [1, 2, 3, 5]), (6, [1, 2, 3, 4, 5, 6])):
        for select in (select_keys, naive_select_keys):
            kept = select(scores, valid, sinks, torch.tensor([[budget]]), 6)
            assert kept[0, 0].nonzero().flatten().tolist() == expected


def test_selection_equals_the_sort_with_many_ties():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (3, 20, 40), generator=generator).float()
    valid = torch.rand(3, 20, 40, generator=generator) < 0.7
    valid[..., 0] = True
    sinks = valid[:, 0].cumsum(-1) <= 2
    budget = torch.minimum(torch.randint(1, 13, (3, 20), generator=generator), valid.sum(-1))
    kept = select_keys(scores, valid, sinks, budget, 12)
    assert torch.equal(kept, naive_select_keys(scores, valid, sinks, budget, 12))
    assert torch.equal(kept.sum(-1), budget)


def test_published_variance_has_its_closed_form_and_depends_on_the_length():
    """var = p s^2 + p (1 - p) mu^2 with p = (t + 1) / T, mean mu and variance s^2 of the t + 1 valid scores."""
    length = 24
    scores = torch.rand(1, length, length) * 4
    valid = torch.ones(1, length, length, dtype=torch.bool).tril()
    _, variance = key_budget(scores, valid, torch.tensor(1.0), length, 128, 32, 256)
    _, plain = key_budget(scores, valid, torch.tensor(1.0), None, 128, 32, 256)
    for t in range(length):
        seen, p = scores[0, t, : t + 1].double(), (t + 1) / length
        spread = seen.var(unbiased=False)
        torch.testing.assert_close(variance[0, t], p * spread + p * (1 - p) * seen.mean() ** 2)
        torch.testing.assert_close(plain[0, t], spread)
    config, mixer = make(sparse_variance="zero_filled")
    x = hidden(1, 60)
    assert (forward(mixer, config, x)[:, :30] - forward(mixer, config, x[:, :30])).abs().max() > 1e-3


def test_budget_is_clipped_floored_and_at_most_the_valid_keys():
    scores = torch.tensor([[[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]]])  # variance 1 / 4
    valid = torch.ones(1, 1, 8, dtype=torch.bool)
    for ema, low, high, expected in (
        (0.25, 1, 8, 4), (0.2501, 1, 8, 3), (0.2499, 1, 8, 4), (1.0, 2, 8, 2), (0.01, 1, 6, 6), (0.0, 1, 99, 8),
        (9.0, 0, 8, 1),
    ):  # fmt: skip
        assert key_budget(scores, valid, torch.tensor(ema), None, 4, low, high)[0].item() == expected


def test_published_scores_are_ranked_in_bf16():
    x = hidden(1, 60)
    outputs = []
    for dtype in ("float32", "bfloat16"):
        config, mixer = make(sparse_score_dtype=dtype)
        outputs.append(forward(mixer, config, x))
    difference = (outputs[0] - outputs[1]).abs().amax(-1)[0]
    assert 0 < (difference > 1e-4).sum() < 30  # a few picks differ, by rounding to 8 bits


def test_pass_without_gradients_equals_the_recompute_bitwise(monkeypatch):
    for stored_keys in (0, 1024):
        monkeypatch.setattr(sparse_attention, "MAX_STORED_KEYS", stored_keys)
        config, mixer = make()
        x, keep = hidden(2, 150), torch.ones(2, 150, dtype=torch.bool)
        keep[1, 130:] = False
        ctx = context(config, 2, 150, keep)
        with torch.no_grad():
            expected = mixer(x, ctx)
        assert all(torch.equal(a, b) for a, b in zip(mixer(x.requires_grad_(), ctx), expected, strict=True))


def test_variance_ema_moves_once_per_step_from_global_sums():
    config, mixer = make()
    mixer.variance_ema.fill_(1.0)  # as initialized: no update yet
    x = hidden(2, 40)
    ctx = replace(context(config, 2, 40), record_statistics=True)
    for rows in (slice(0, 1), slice(1, 2)):  # two micro-batches
        mixer(
            x[rows],
            replace(ctx, position_ids=ctx.position_ids[rows], rotary={16: tuple(t[rows] for t in ctx.rotary[16])}),
        )
    mixer(x, context(config, 2, 40))  # a recompute or an evaluation counts nothing
    mixer.after_optimizer_step(update=False)
    assert mixer.variance_ema == 1 and not mixer.statistics()[0].any()

    variances = torch.cat([in_detail(exact(mixer), config, row)[3] for row in x.double()])
    for rows in (slice(0, 1), slice(1, 2)):
        mixer(
            x[rows],
            replace(ctx, position_ids=ctx.position_ids[rows], rotary={16: tuple(t[rows] for t in ctx.rotary[16])}),
        )
    assert mixer.statistics()[0][1] == 80
    mixer.after_optimizer_step(update=True)
    torch.testing.assert_close(mixer.variance_ema.double(), variances.mean(), rtol=1e-5, atol=0)
    first = mixer.variance_ema.clone()
    mixer.statistics()[0].copy_(torch.tensor([80 * 0.5, 80.0]))
    mixer.after_optimizer_step(update=True)
    torch.testing.assert_close(mixer.variance_ema, 0.99 * first + 0.01 * 0.5)
    mixer.after_optimizer_step(update=True)  # a step without tokens changes nothing
    torch.testing.assert_close(mixer.variance_ema, 0.99 * first + 0.01 * 0.5)
    assert "variance_ema" in mixer.state_dict() and mixer.variance_ema.dtype == torch.float32


def test_short_sequences_are_dense_causal_attention():
    config, mixer = make(sparse_min_keys=40, sparse_max_keys=50)
    x = hidden(2, 40)
    ctx = context(config, 2, 40)
    heads = {name: getattr(mixer, f"{name}_proj")(x).unflatten(-1, (2, 16)) for name in "qkv"}
    heads["v"] = heads["v"] * mixer.gv_proj(x).sigmoid().unflatten(-1, (2, 16))
    for name in "qk":
        heads[name] = sparse_attention.apply_rotary(heads[name], ctx.rotary[16])
    o = torch.nn.functional.scaled_dot_product_attention(
        *(heads[name].transpose(1, 2) for name in "qkv"), is_causal=True
    )
    expected = mixer.o_proj(o.transpose(1, 2).flatten(-2) * mixer.go_proj(x).sigmoid())
    torch.testing.assert_close(mixer(x, ctx)[0], expected, **CLOSE)


@pytest.mark.parametrize("stored_keys", [0, 1024])
def test_autocast_rounds_the_projections_and_neither_scores_nor_softmax(monkeypatch, stored_keys):
    """Weights that bf16 holds give under autocast the bits of a bf16 model, in values and gradients."""
    monkeypatch.setattr(sparse_attention, "MAX_STORED_KEYS", stored_keys)
    results = []
    for autocast in (True, False):
        config, mixer = make()
        mixer = mixer.bfloat16().float() if autocast else mixer.bfloat16()
        x = hidden(2, 60).bfloat16().requires_grad_()
        ctx = context(config, 2, 60)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y, aux = mixer(x, ctx)
        gradients = torch.autograd.grad((y.float() * hidden(2, 60, seed=3)).sum() + aux, [x, *mixer.parameters()])
        results.append([y, aux, *(gradient.bfloat16() for gradient in gradients)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bf16_follows_fp32():
    config, mixer = make(sparse_min_keys=12)
    x = hidden(2, 12)
    reference = forward(mixer, config, x)
    y = forward(mixer.bfloat16(), config, x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y.float() - reference).norm() < 0.03 * reference.norm()
