"""The reversible stack: states rebuilt bit for bit, gradients of autograd, memory flat in depth, faults caught."""

import gc

import pytest
import torch
from torch import nn

from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.reversible import (
    ReversibilityError,
    ReversibilityReport,
    checksum,
    midpoint,
    pack_bits,
    reversible_stack,
    sequential_stack,
    undo_midpoint,
    unpack_bits,
)

B, T, N, H = 2, 4, 4, 16
CTX = LayerContext(position_ids=torch.arange(T).expand(B, T))
TRAINING = LayerContext(position_ids=CTX.position_ids, record_statistics=True)


class ToyLayer(nn.Module):
    """p -> p + tanh-like force, computed in `dtype`, with an auxiliary loss that depends on weights and input."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(H, H, generator=generator) / H**0.5)
        self.gain = nn.Parameter(torch.ones(H))
        self.dtype, self.inputs, self.recorded = dtype, [], 0

    def forward(self, p, ctx):
        self.inputs.append(p.detach().clone())
        self.recorded += ctx.record_statistics
        force = torch.tanh(p.to(self.dtype) @ self.weight.to(self.dtype)) * self.gain.to(self.dtype)
        y = p * 0.9 + force.to(p.dtype)
        return y, (self.weight.float() ** 2).mean() + (y**2).mean()


def make_layers(count, dtype=torch.float32):
    return [ToyLayer(seed, dtype) for seed in range(count)]


def make_streams(seed=100):
    return torch.randn(B, T, N, H, generator=torch.Generator().manual_seed(seed))


def default_steps(count):
    return [0.125] + [0.25] * (count - 1)


def blends_of(kind, count):
    return {"one": [1.0] * count, "half": [0.5] * count, "mixed": [1.0, 0.5, 0.5, 1.0] * (count // 4)}[kind]


def run(layers, streams, step_size, blend, aux_weight=0.3, ctx=CTX, **options):
    """Output, auxiliary loss, and the gradients of the streams and of every parameter that got one."""
    for layer in layers:
        layer.zero_grad()
    streams = streams.clone().requires_grad_()
    out, aux = reversible_stack(layers, streams, ctx, step_size, blend, **options)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    ((out * weights).sum() + aux_weight * aux).backward()
    parameters = {f"{i}.{k}": p.grad for i, layer in enumerate(layers) for k, p in layer.named_parameters()}
    return out.detach(), aux.detach(), {"streams": streams.grad} | parameters


def relative_difference(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["one", "half", "mixed"])
def test_every_layer_sees_the_same_bits_in_forward_and_recompute_at_64_layers(dtype, kind):
    layers = make_layers(64, dtype)
    steps = default_steps(64)
    blend = blends_of(kind, 64)
    steps[20:22], blend[20:22] = [0.0, 0.0], [1.0, 1.0]
    report = ReversibilityReport(check_every_layer=True)
    run(layers, make_streams(), steps, blend, report=report)
    assert report.passes_verified == 1
    for n, layer in enumerate(layers):
        if steps[n] == 0:
            assert layer.inputs == []
        else:
            forward, recompute = layer.inputs
            assert torch.equal(forward, recompute), f"layer {n}"


@pytest.mark.parametrize("output", ["last", "mean_pair"])
@pytest.mark.parametrize("kind", ["one", "half", "mixed"])
def test_gradients_equal_autograd_of_the_same_arithmetic(kind, output):
    layers = make_layers(12)
    steps = [0.1, 0.25, 0.3, 0.0, 0.0, 0.2] * 2
    blend = blends_of(kind, 12)
    expected = run(layers, make_streams(), steps, blend, output=output, backend="stored")
    for backend in ("reversible", "checkpointed"):
        out, aux, grads = run(layers, make_streams(), steps, blend, output=output, backend=backend)
        assert torch.equal(out, expected[0])
        assert torch.equal(aux, expected[1])
        for name, grad in expected[2].items():
            if grad is None:
                assert grads[name] is None, name
            else:
                assert torch.equal(grads[name], grad), (backend, name)
    with torch.no_grad():
        out, aux = reversible_stack(layers, make_streams(), CTX, steps, blend, output=output)
    assert torch.equal(out, expected[0])
    assert torch.equal(aux, expected[1])


@pytest.mark.parametrize("kind", ["one", "half", "mixed"])
def test_gradients_equal_fp64_autograd_of_the_unrounded_recurrence(kind):
    layers, steps, blend = make_layers(8), default_steps(8), blends_of(kind, 8)
    _, _, grads = run(layers, make_streams(), steps, blend, frac_bits=24)

    for layer in layers:
        layer.double().zero_grad()
        layer.dtype = torch.float64
    streams = make_streams().double().requires_grad_()
    p_prev = p_cur = streams
    aux_sum = 0
    for n, layer in enumerate(layers):
        y, aux = layer(p_cur, CTX)
        aux_sum = aux_sum + aux
        if n == 0:
            p_next = p_cur + steps[0] * (y - p_cur)
        else:
            p_next = blend[n] * p_prev + (1 - blend[n]) * p_cur + 2 * steps[n] * (y - p_cur)
        p_prev, p_cur = p_cur, p_next
    ((p_cur * torch.linspace(-1, 1, p_cur.numel()).view_as(p_cur)).sum() + 0.3 * aux_sum).backward()
    assert relative_difference(grads["streams"], streams.grad) < 2e-6
    for i, layer in enumerate(layers):
        assert relative_difference(grads[f"{i}.weight"], layer.weight.grad) < 2e-6


def kept_bytes(count, blend, backend="reversible"):
    """Bytes that stay alive for the backward pass: what autograd packs and every new tensor that Python still holds."""
    layers = [nn.Linear(H, H) for _ in range(count)]
    calls = [lambda p, ctx, layer=layer: (torch.tanh(layer(p)), p.new_zeros(())) for layer in layers]
    streams, packed = make_streams().requires_grad_(), []
    gc.collect()
    gc.freeze()  # hides what exists already from get_objects
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out, aux = reversible_stack(calls, streams, CTX, default_steps(count), [blend] * count, backend=backend)
    held = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    gc.unfreeze()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*packed, *held)}
    for t in (streams, out, aux, *(p for layer in layers for p in layer.parameters())):
        storages.pop(t.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def test_kept_bytes_are_flat_in_depth_and_blend_half_adds_its_residual_bits():
    state = 4 * B * T * N * H
    scalar = 4  # the guard keeps the largest increment of each layer
    shallow, deep = kept_bytes(4, 1.0), kept_bytes(36, 1.0)
    assert deep - shallow == 32 * scalar
    assert 2 * state <= shallow <= 2 * state + 1024
    half = kept_bytes(36, 0.5)
    assert half - deep == 35 * state // 32
    assert kept_bytes(36, 1.0, "stored") - kept_bytes(4, 1.0, "stored") >= 32 * state  # the count sees what grows


def test_a_pair_of_zero_steps_is_the_identity_bit_for_bit():
    layers, streams = make_layers(6), make_streams()
    out, aux, grads = run(layers, streams, default_steps(6), [1.0] * 6)
    for position in range(1, 7):
        longer = [*layers[:position], *make_layers(2), *layers[position:]]
        steps = default_steps(6)
        steps[position:position] = [0.0, 0.0]
        out_longer, aux_longer, grads_longer = run(longer, streams, steps, [1.0] * 8)
        assert torch.equal(out_longer, out)
        assert torch.equal(aux_longer, aux)
        assert torch.equal(grads_longer["streams"], grads["streams"])
        assert torch.equal(longer[0].weight.grad, grads["0.weight"])
        assert longer[position].weight.grad is None


def test_midpoint_is_undone_on_the_whole_int32_range():
    extremes = [-(2**31), -(2**31) + 1, -(2**30), -3, -2, -1, 0, 1, 2, 2**30, 2**31 - 2, 2**31 - 1]
    q_prev, q_cur = (t.flatten().to(torch.int32) for t in torch.meshgrid(*[torch.tensor(extremes)] * 2, indexing="ij"))
    increment = torch.arange(q_prev.numel(), dtype=torch.int32) * 7919
    q_next, _ = midpoint(q_prev.clone(), q_cur, torch.zeros_like(increment), 0.5)
    assert torch.equal(q_next.long(), (q_prev.long() + q_cur.long()) >> 1)
    for blend in (1.0, 0.5):
        q_next, bit = midpoint(q_prev.clone(), q_cur, increment, blend)
        assert torch.equal(undo_midpoint(q_next, q_cur, increment, blend, bit), q_prev)


@pytest.mark.parametrize("shape", [(8,), (3, 5), (2, 4, 16), (1,)])
def test_packed_bits_come_back(shape):
    bits = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0))
    packed = pack_bits(bits)
    assert packed.numel() == -(-bits.numel() // 8)
    assert torch.equal(unpack_bits(packed, bits.shape).long(), bits)


@pytest.mark.parametrize("size", [5, 8191, 8191 * 300 + 7])
def test_checksum_is_the_plain_and_the_weighted_sum(size):
    q = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    weights = 1 + torch.arange(size) % 8191
    assert checksum(q).tolist() == [int(q.long().sum()), int((q.long() * weights).sum())]


@pytest.mark.parametrize("which", ["q_prev", "q_cur"])
@pytest.mark.parametrize("bit", [0, 30])
def test_one_flipped_bit_in_a_kept_state_is_an_error(which, bit):
    out, _ = reversible_stack(make_layers(4), make_streams().requires_grad_(), CTX, default_steps(4), [1.0] * 4)
    getattr(out.grad_fn.left, which).view(-1)[37] ^= 1 << bit
    with pytest.raises(ReversibilityError, match="did not rebuild"):
        out.sum().backward()


@pytest.mark.parametrize("faulty", [0, 1, 3])
def test_a_layer_that_does_not_repeat_is_caught_and_named(faulty):
    layers = make_layers(4)

    def with_dropout(p, ctx):
        y, aux = layers[faulty](p, ctx)
        return nn.functional.dropout(y, 0.1), aux

    stack = [with_dropout if n == faulty else layer for n, layer in enumerate(layers)]
    for check_every_layer, message in ((False, "did not rebuild"), (True, f"layer {faulty} did not repeat")):
        report = ReversibilityReport(check_every_layer=check_every_layer)
        out, _ = reversible_stack(stack, make_streams(), CTX, default_steps(4), [1.0] * 4, report=report)
        with pytest.raises(ReversibilityError, match=message):
            out.sum().backward()


def test_weights_changed_between_forward_and_backward_are_caught():
    layers = make_layers(4)
    out, _ = reversible_stack(layers, make_streams(), CTX, default_steps(4), [1.0] * 4)
    with torch.no_grad():
        layers[2].weight.add_(1e-3)
    with pytest.raises(ReversibilityError, match="weights"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["reversible", "stored", "checkpointed"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("fault", "message"),
    [("input", "input of the stack"), ("nan", "after layer 2 is not finite"), ("growth", "after layer 2 may reach")],
)
def test_states_out_of_range_are_errors_in_training_and_inference(backend, training, fault, message):
    streams = make_streams()
    layers = make_layers(4)
    if fault == "input":
        streams[0, 1, 2, 3] = 2.0**15
    else:
        layers[2].gain.data[5] = float("nan") if fault == "nan" else 1e6

    with pytest.raises(ReversibilityError, match=message), torch.set_grad_enabled(training):
        out, _ = reversible_stack(layers, streams, CTX, default_steps(4), [1.0] * 4, backend=backend)
        if training:
            out.sum().backward()


def test_parameter_hooks_fire_once_and_frozen_parts_are_skipped():
    layers = make_layers(4)
    layers[1].weight.requires_grad_(False)
    layers[2].requires_grad_(False)
    fired = []
    for n, layer in enumerate(layers):
        for name, p in layer.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p, key=(n, name): fired.append(key))
    expected_order = [(3, "gain"), (3, "weight"), (1, "gain"), (0, "gain"), (0, "weight")]
    streams = make_streams()  # needs no gradient: as from a frozen embedding
    for accumulation in (1, 2):
        fired.clear()
        out, aux = reversible_stack(layers, streams, CTX, default_steps(4), [1.0] * 4)
        (out.sum() + aux).backward()
        assert sorted(fired, key=expected_order.index) == sorted(expected_order, key=expected_order.index)
        assert [n for n, _ in fired] == sorted((n for n, _ in fired), reverse=True)
        if accumulation == 1:
            once = layers[0].weight.grad.clone()
    assert torch.equal(layers[0].weight.grad, once + once)
    assert layers[1].weight.grad is None
    assert layers[2].gain.grad is None
    assert streams.grad is None


def test_the_auxiliary_loss_alone_has_the_gradient_of_autograd():
    layers, streams = make_layers(5), make_streams().requires_grad_()
    grads = {}
    for backend in ("reversible", "stored"):
        _, aux = reversible_stack(layers, streams, CTX, default_steps(5), [1.0] * 5, backend=backend)
        inputs = [layer.weight for layer in layers]
        for p in (streams, *inputs):
            p.grad = None
        (2.5 * aux).backward()
        grads[backend] = [streams.grad, *(p.grad for p in inputs)]
    for ours, expected in zip(*grads.values(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("backend", ["reversible", "stored", "checkpointed"])
def test_statistics_are_recorded_once_per_training_forward(backend):
    layers = make_layers(4)
    run(layers, make_streams(), default_steps(4), [1.0] * 4, ctx=TRAINING, backend=backend)
    assert [layer.recorded for layer in layers] == [1] * 4


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_of_the_forward_pass_holds_in_the_recompute(backward_inside):
    layers = [nn.Linear(H, H) for _ in range(6)]
    calls = [lambda p, ctx, layer=layer: (p + torch.tanh(layer(p)), p.new_zeros(())) for layer in layers]
    grads = {}
    for backend in ("reversible", "stored"):
        for layer in layers:
            layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, _ = reversible_stack(calls, make_streams(), CTX, default_steps(6), [1.0] * 6, backend=backend)
            loss = out.square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        grads[backend] = [p.grad for layer in layers for p in layer.parameters()]
    for ours, expected in zip(*grads.values(), strict=True):
        assert torch.equal(ours, expected)


def test_a_second_backward_through_the_same_pass_is_refused():
    out, _ = reversible_stack(make_layers(3), make_streams(), CTX, default_steps(3), [1.0] * 3)
    out.sum().backward(retain_graph=True)
    with pytest.raises(ReversibilityError, match="second backward"):
        out.sum().backward()


def test_the_report_describes_the_last_training_pass():
    report = ReversibilityReport()
    layers, streams = make_layers(4), make_streams()
    out, _, _ = run(layers, streams, default_steps(4), [1.0] * 4, ctx=TRAINING, report=report)
    mean = out.mean(2, keepdim=True)
    assert report.passes_verified == 1
    assert report.largest_state >= out.abs().max()
    assert torch.allclose(report.mean_rms, mean.square().mean().sqrt())
    assert torch.allclose(report.difference_rms, (out - mean).square().mean().sqrt())
    with torch.no_grad():
        reversible_stack(layers, 3 * streams, CTX, default_steps(4), [1.0] * 4, report=report)
    assert report.passes_verified == 1
    assert torch.allclose(report.mean_rms, mean.square().mean().sqrt())


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="backend = 'sotred'"):
        reversible_stack(make_layers(2), make_streams(), CTX, [0.1] * 2, [1.0] * 2, backend="sotred")
    with pytest.raises(ValueError, match="output = 'first'"):
        reversible_stack(make_layers(2), make_streams(), CTX, [0.1] * 2, [1.0] * 2, output="first")
    with pytest.raises(ValueError, match="2 layers with 3 step sizes"):
        reversible_stack(make_layers(2), make_streams(), CTX, [0.1] * 3, [1.0] * 2)


def test_sequential_stack_applies_the_layers_in_turn():
    layers, streams = make_layers(3), make_streams()
    out, aux = sequential_stack(layers, streams, CTX)
    expected, total = streams, 0
    for layer in layers:
        expected, term = layer(expected, CTX)
        total = total + term
    assert torch.equal(out, expected)
    assert torch.allclose(aux, total)
