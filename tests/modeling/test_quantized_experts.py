"""Quantized experts: gradients through the quantized base, exact merges, promised bytes, and imports without loss."""

import itertools

import pytest
import torch

from lightninglm.modeling import quantized_experts
from lightninglm.modeling.experts import Experts
from lightninglm.modeling.quantized_experts import (
    PROJECTIONS,
    QuantizedExperts,
    import_published,
    merge_expert,
    quantize_expert,
    quantize_experts,
    shared_tensors,
)
from lightninglm.modeling.quantizers import (
    CodebookQuantizer,
    published_codebook,
    random_signs,
    rotation_matrix,
    snr_db,
)
from tests.modeling.mixers import H
from tests.modeling.moe_configs import F, moe_config, quantized_config

KINDS = ["int8", "int4", "codebook"]
COUNTS = torch.tensor([3, 0, 7, 1, 0, 12, 5, 4])


def dense_experts(config):
    torch.manual_seed(0)
    experts = Experts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts


def make_experts(kind, train=True, **changes):
    """Quantized experts, with adapters that are not zero."""
    config = quantized_config(kind, **changes)
    experts = quantize_experts(dense_experts(config), config, layer_idx=2)
    if train:
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return experts


def run(forward, parameters, counts=COUNTS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(int(counts.sum()), H, generator=generator).requires_grad_()
    y = forward(x, counts)
    grads = torch.autograd.grad(y, [x, *parameters], torch.randn(y.shape, generator=generator))
    return y.detach(), grads


@pytest.mark.parametrize("backend", ["torch", "grouped_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_autograd_through_the_dense_weights(kind, backend):
    """dx, and dA and dB of all three projections, against W = dequantize(codes) R + A B."""
    experts = make_experts(kind, experts_backend=backend)
    naive = make_experts(kind, experts_backend="naive")
    naive.load_state_dict(experts.state_dict())
    y, grads = run(experts, experts.parameters())
    expected_y, expected = run(naive, naive.parameters())
    assert (y - expected_y).norm() < 1e-5 * expected_y.norm()
    names = ["x", *(name for name, _ in experts.named_parameters())]
    assert len(names) == 7
    for name, grad, reference in zip(names, grads, expected, strict=True):
        assert reference.norm() > 0
        assert (grad - reference).norm() < 1e-5 * reference.norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_the_input_goes_through_the_base(kind):
    """With A = 0 the adapters pass nothing on; the published code had no gradient here."""
    experts = make_experts(kind, train=False)
    _, (grad_x, *_) = run(experts, experts.parameters())
    assert (grad_x.norm(dim=1) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_any_size_compute_the_same(kind, monkeypatch):
    experts = make_experts(kind)
    y, grads = run(experts, experts.parameters())
    for size in (1, 3 * H * F):
        monkeypatch.setattr(quantized_experts, "BLOCK_WEIGHTS", size)
        other_y, other_grads = run(experts, experts.parameters())
        assert torch.equal(y, other_y)
        assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_dequantized_is_kept(kind):
    """No saved tensor is as large as one dense matrix unless it is a row of activations or what is stored anyway."""
    experts = make_experts(kind)
    saved = []
    counts = torch.tensor([1, 0, 1, 0, 0, 0, 1, 1])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        experts(torch.randn(4, H, requires_grad=True), counts)
    stored = {t.data_ptr() for t in experts.state_dict().values()}
    assert max(t.numel() for t in saved if t.data_ptr() not in stored) <= 4 * H < F * H


@pytest.mark.parametrize("kind", KINDS)
def test_experts_without_tokens_get_zero_gradients(kind):
    experts = make_experts(kind)
    for counts in (COUNTS, torch.tensor([0, 0, 0, 20, 0, 0, 0, 0]), torch.zeros(8, dtype=torch.int64)):
        _, (_, *grads) = run(experts, experts.parameters(), counts)
        for grad in grads:
            assert ((grad.abs().sum((1, 2)) > 0) == (counts > 0)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_input_still_trains_the_adapters(kind):
    experts = make_experts(kind)
    experts(torch.randn(32, H), COUNTS).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in experts.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_recompute_is_bitwise_the_forward_pass(kind):
    experts = make_experts(kind)
    x = torch.randn(32, H)
    with torch.no_grad():
        expected = experts(x, COUNTS)
    assert torch.equal(experts(x.clone().requires_grad_(), COUNTS), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_adapters_change_nothing_but_the_quantization_error(kind):
    experts = make_experts(kind, train=False)
    base = {name: experts.merged()[name] for name in PROJECTIONS}
    reference = dense_experts(moe_config())
    for name in PROJECTIONS:
        getattr(reference, name).weight.data.copy_(base[name])
    x = torch.randn(32, H)
    torch.testing.assert_close(experts(x, COUNTS), reference(x, COUNTS))
    for name in PROJECTIONS:
        stack = getattr(experts, name)
        assert stack.A.count_nonzero() == 0
        assert stack.B.std().item() == pytest.approx(stack.B.shape[2] ** -0.5, rel=0.1)
        assert len({tuple(b.flatten().tolist()) for b in stack.B}) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_merged_experts_compute_what_the_adapters_computed(kind):
    experts = make_experts(kind)
    merged = Experts(moe_config())
    names = ("codes", "scales", "A", "B")
    for e in range(8):
        tensors = {f"{p}.{n}": getattr(getattr(experts, p), n)[e] for p, n in itertools.product(PROJECTIONS, names)}
        dense = merge_expert(tensors, experts.shared(), experts.config)
        for name, weight in dense.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, experts.merged()[name][e])
            getattr(merged, name).weight.data[e] = weight
    x = torch.randn(32, H)
    torch.testing.assert_close(experts(x, COUNTS), merged(x, COUNTS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "snr", "bytes_per_weight"), [("int8", 43.0, 1.04), ("int4", 20.0, 0.54)])
def test_promises_hold_in_the_module(kind, snr, bytes_per_weight):
    config = quantized_config(
        kind, hidden_size=256, linear_num_heads=32, num_attention_heads=16, moe_intermediate_size=128, num_experts=2
    )
    config.expert_quantization["group_size"] = 128
    dense = dense_experts(config)
    experts = quantize_experts(dense, config, layer_idx=0)
    loaded = QuantizedExperts(config, layer_idx=0)
    loaded.load_state_dict(experts.state_dict())
    for name in PROJECTIONS:
        weight, stack = getattr(dense, name).weight, getattr(loaded, name)
        assert stack.scales.dtype == torch.bfloat16
        assert (stack.codes.nbytes + stack.scales.nbytes) / weight.numel() <= bytes_per_weight
        assert snr_db(weight.detach(), loaded.merged()[name].detach()) >= snr


def test_only_adapters_are_trained_and_everything_else_is_saved():
    experts = make_experts("int8")
    assert {name.split(".")[-1] for name, _ in experts.named_parameters()} == {"A", "B"}
    assert set(experts.state_dict()) == {
        "hidden_signs", "intermediate_signs", *(f"{p}.{n}" for p in PROJECTIONS for n in ("codes", "scales", "A", "B")),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_quantizing_is_deterministic_and_seeded(kind):
    config = quantized_config(kind)
    weights = {name: getattr(dense_experts(config), name).weight[0].detach() for name in PROJECTIONS}

    def quantize(layer_idx=1, expert=5):
        return quantize_expert(weights, shared_tensors(config, 1), config, layer_idx=layer_idx, expert=expert)[0]

    first = quantize()
    torch.manual_seed(99)
    for name, tensor in quantize().items():
        assert torch.equal(tensor, first[name]), name
    for other in (quantize(expert=6), quantize(layer_idx=2)):
        assert not torch.equal(other["up_proj.B"], first["up_proj.B"])
        assert torch.equal(other["up_proj.codes"], first["up_proj.codes"])
    for name in ("hidden_signs", "intermediate_signs"):
        assert not torch.equal(shared_tensors(config, 1)[name], shared_tensors(config, 2)[name])
    one = {"down_proj": weights["down_proj"]}
    alone, snr = quantize_expert(one, shared_tensors(config, 1), config, layer_idx=1, expert=5)
    assert set(snr) == {"down_proj"} and len(alone) == 4
    assert all(torch.equal(tensor, first[name]) for name, tensor in alone.items())


def test_residual_start_shrinks_the_error():
    config = quantized_config("int4")
    dense = dense_experts(config)

    def error(**options):
        merged = quantize_experts(dense, config, 0, **options).merged()
        return {name: (merged[name] - getattr(dense, name).weight).norm().item() for name in PROJECTIONS}

    plain, residual = error(), error(residual_init=True)
    assert all(residual[name] < 0.9 * plain[name] for name in PROJECTIONS)


def test_errors_name_the_tensor():
    config = quantized_config("int8")
    weights = {"gate_proj": torch.randn(F, H), "up_proj": torch.randn(F, H)}
    weights["up_proj"][3, 4] = torch.nan
    with pytest.raises(ValueError, match="layer 2, expert 7, up_proj: the weight has non-finite"):
        quantize_expert(weights, shared_tensors(config, 2), config, layer_idx=2, expert=7)


@pytest.mark.parametrize("residual_init", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e7, 1e30, 3e38])
def test_a_huge_weight_is_refused_with_its_place(kind, size, residual_init):
    """Without the refusal the rest of its row would be lost silently."""
    config = quantized_config(kind)
    weights = {"gate_proj": torch.randn(F, H), "up_proj": torch.randn(F, H)}
    weights["up_proj"][3, 4] = size
    options = {"layer_idx": 2, "expert": 7, "residual_init": residual_init}
    reason = r"(the largest of columns 0 to 31 in row 3, \S+, takes|.* (overflow|are too large to be rotated in) fp32)"
    with pytest.raises(ValueError, match=f"layer 2, expert 7, up_proj: {reason}"):
        quantize_expert(weights, shared_tensors(config, 2), config, **options)


def test_the_published_format_is_imported_without_loss():
    """y = x_rot W_q^T + (x_rot B^T) A^T with published tensors equals ours after import, wrapped indices included."""
    config = quantized_config("codebook")
    experts = QuantizedExperts(config, layer_idx=0)
    generator = torch.Generator().manual_seed(0)
    sizes = {"gate_proj": (F, H), "up_proj": (F, H), "down_proj": (H, F)}
    signs_of = {"gate_proj": "hidden_signs", "up_proj": "up_signs", "down_proj": "intermediate_signs"}
    published = {}
    for i, (name, (rows, columns)) in enumerate(sizes.items()):
        signs = random_signs(42, i, "published", columns)
        indices = torch.randint(0, 256, (8, rows, columns), dtype=torch.uint8, generator=generator).view(torch.int8)
        norms = torch.rand(8, rows, generator=generator).bfloat16()
        a = torch.randn(8, rows, 8, generator=generator).bfloat16()
        b = torch.randn(8, 8, columns, generator=generator).bfloat16()
        published[name] = (indices, norms, a.float(), b.float(), rotation_matrix(signs, columns))
        tensors = import_published(indices, norms, a, b, signs)
        getattr(experts, name).load_state_dict(tensors)
        getattr(experts, signs_of[name]).copy_(signs)

    def project(name, x, e):
        indices, norms, a, b, rotation = published[name]
        levels = published_codebook(x.shape[1])
        base = levels[indices[e].int() & 255] * norms[e].float()[:, None]
        x_rot = x @ rotation.T
        return x_rot @ base.T + (x_rot @ b[e].T) @ a[e].T

    x = torch.randn(32, H, generator=generator)
    expected = []
    for e, rows in enumerate(x.split(COUNTS.tolist())):
        hidden = torch.nn.functional.silu(project("gate_proj", rows, e)) * project("up_proj", rows, e)
        expected.append(project("down_proj", hidden, e))
    expected = torch.cat(expected)  # small ones are sums of large terms, so their error is that of the large ones
    torch.testing.assert_close(experts(x, COUNTS), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    for name in PROJECTIONS:
        stack = getattr(experts, name)
        assert torch.equal(stack.codes.view(torch.int8), published[name][0])
        assert torch.equal(stack.scales.bfloat16(), published[name][1])


def test_a_width_that_the_published_rotation_cannot_take_is_refused():
    config = quantized_config("codebook", moe_intermediate_size=24)
    with pytest.raises(ValueError, match="cannot rotate a dimension of 24"):
        QuantizedExperts(config, layer_idx=0)


def test_codebook_rows_survive_their_own_format():
    quantizer = CodebookQuantizer(published_codebook(H))
    codes, scales = quantizer.quantize(torch.randn(F, H))
    again = quantizer.dequantize(codes, scales)
    unit = again / scales[:, None]
    assert torch.equal(torch.bucketize(unit, (quantizer.levels[1:] + quantizer.levels[:-1]) / 2).byte(), codes)
