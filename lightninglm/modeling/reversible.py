"""
The exactly reversible stack: each layer is one step of a midpoint recurrence on integers, which is undone bit for bit.

A state q is int32 with `frac_bits` fraction bits; its view is p = q 2^-frac_bits in fp32. Layer n adds a rounded force:

    q_{n+1} = a_n q_{n-1} + (1 - a_n) q_n + round(c_n (layer_n(p_n) - p_n) 2^frac_bits)       q_{-1} = q_0

with c_0 = h_0, a_0 = 1 (the bootstrap) and c_n = 2 h_n, a_n in {1, 1/2} after it. Integer addition loses nothing, so
the backward pass gets q_{n-1} back from (q_n, q_{n+1}) by evaluating the layer once more on the identical p_n, and the
same evaluation gives the gradients. Between forward and backward live the last two states, whatever the depth;
a_n = 1/2 keeps one bit more per element and layer, the one that halving drops.

Midpoint reversibility: arXiv 2512.02056. In floating point its inverse multiplies errors by 1/a per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .layer_context import LayerContext

Layer = Callable[[torch.Tensor, LayerContext], tuple[torch.Tensor, torch.Tensor]]
"""(streams [B, T, N, H] fp32, ctx) -> (streams of the same shape, scalar auxiliary loss)."""

CHECKSUM_WEIGHTS = 8191
BACKENDS = ("reversible", "stored", "checkpointed")
OUTPUTS = ("last", "mean_pair")


class ReversibilityError(RuntimeError):
    """A state left the range of the fixed-point format, or the backward pass did not rebuild the forward's states."""


@dataclass
class ReversibilityReport:
    """
    What the trainer logs about the stack, filled in by `reversible_stack`.

    Attributes:
        check_every_layer: set it to True to checksum every state, not only the first: a failed check names the layer.
        defer_range_errors: note a state out of range in `range_errors` instead of raising, which on one rank would
            leave the others waiting. The gradients are wrong then, and the caller must drop them; without grad, the
            output is NaN.
        passes_verified: backward passes whose rebuilt first state equalled the forward's, since the report was made.
        largest_state: upper bound on |p| over all states of the last pass that was checked.
        mean_rms, difference_rms: rms of the mean over the streams, and of the streams minus that mean, at the output of
            the last training forward. Scalars on the device; differences that grow are the sign of an unstable stack.
    """

    check_every_layer: bool = False
    defer_range_errors: bool = False
    range_errors: list[str] = field(default_factory=list)
    passes_verified: int = 0
    largest_state: float = 0.0
    mean_rms: torch.Tensor | None = None
    difference_rms: torch.Tensor | None = None

    @torch.no_grad()
    def observe(self, streams: torch.Tensor) -> None:
        """Takes the two rms values of streams [B, T, N, H], without waiting for the device."""
        mean_square = streams.mean(2).square().mean()
        self.mean_rms = mean_square.sqrt()
        self.difference_rms = (streams.square().mean() - mean_square).clamp(min=0).sqrt()


# Fixed-point arithmetic


def to_fixed(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x * scale rounded half to even, still as fp32, so that its range can be looked at before the cast to int32."""
    return (x * scale).round_()


def to_float(q: torch.Tensor, frac_bits: int) -> torch.Tensor:
    """The view p = q * 2^-frac_bits in fp32."""
    return q.to(torch.float32).mul_(2.0**-frac_bits)


def midpoint(
    q_prev: torch.Tensor, q_cur: torch.Tensor, increment: torch.Tensor | int, blend: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    q_next = floor(blend * q_prev + (1 - blend) * q_cur) + increment, all int32. Overwrites q_prev.

    Returns q_next and, for blend 1/2, the bit 0 or 1 that the floor dropped. Holds on all of int32.
    """
    if blend == 1:
        return q_prev.add_(increment), None
    differ = q_prev ^ q_cur
    half = q_prev.bitwise_and_(q_cur).add_(differ >> 1)  # the sum itself could overflow
    return half.add_(increment), differ.bitwise_and_(1)


def undo_midpoint(
    q_next: torch.Tensor, q_cur: torch.Tensor, increment: torch.Tensor | int, blend: float, bit: torch.Tensor | None
) -> torch.Tensor:
    """q_prev of the step that `midpoint` made. Overwrites q_next."""
    half = q_next.sub_(increment)
    if blend == 1:
        return half
    return half.add_(half - q_cur).add_(bit)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Values 0 and 1 of any shape to uint8 [ceil(numel / 8)], the first value in the lowest bit."""
    flat = torch.nn.functional.pad(bits.to(torch.uint8).flatten(), (0, -bits.numel() % 8))
    return (flat.view(-1, 8) << _bit_positions(bits.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The values 0 and 1, uint8 of the given shape, that `pack_bits` packed."""
    bits = (packed[:, None] >> _bit_positions(packed.device)) & 1
    return bits.flatten()[: shape.numel()].view(shape)


def _bit_positions(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def checksum(q: torch.Tensor) -> torch.Tensor:
    """Two int64 sums that wrap around: sum_i q_i and sum_i q_i (1 + i mod 8191). [2], on q's device."""
    flat = q.flatten()
    whole = flat.numel() // CHECKSUM_WEIGHTS * CHECKSUM_WEIGHTS
    columns = torch.zeros(CHECKSUM_WEIGHTS, dtype=torch.int64, device=q.device)
    for rows in flat[:whole].view(-1, CHECKSUM_WEIGHTS).split(256):  # sums of int32 are cast whole: bound the copy
        columns += rows.sum(0, dtype=torch.int64)
    columns[: flat.numel() - whole] += flat[whole:]
    weights = torch.arange(1, CHECKSUM_WEIGHTS + 1, device=q.device)
    return torch.stack((columns.sum(), (columns * weights).sum()))


def _largest(x: torch.Tensor) -> torch.Tensor:
    """max |x| as a scalar on the device; NaN if x has one."""
    low, high = x.aminmax()
    return torch.maximum(-low, high)


# The stack


@dataclass(frozen=True)
class _Stack:
    """One call of `reversible_stack`: the recurrence's layers and coefficients, and how to look at it."""

    layers: Sequence[Layer]
    ctx: LayerContext
    forces: list[float]  # c_n; 0 skips the layer
    blends: list[float]  # a_n
    frac_bits: int
    output: str
    report: ReversibilityReport

    def increment(self, n: int, y: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """The rounded force of layer n in units of 2^-frac_bits, as fp32."""
        return to_fixed(y - p, self.forces[n] * 2.0**self.frac_bits)

    def view(self, q: torch.Tensor) -> torch.Tensor:
        return to_float(q, self.frac_bits)

    def read_out(self, left: _Pass) -> torch.Tensor:
        p_cur = self.view(left.q_cur)
        return p_cur if self.output == "last" else 0.5 * (self.view(left.q_prev) + p_cur)


@dataclass
class _Pass:
    """What a forward pass leaves behind for the backward pass and the checks."""

    q_prev: torch.Tensor
    q_cur: torch.Tensor
    bits: list[torch.Tensor | None]  # packed residual bits per layer
    checksums: dict[int, torch.Tensor]  # per state number
    extremes: list[torch.Tensor]  # max |q_0|, then max |increment| per layer


def _forward(stack: _Stack, streams: torch.Tensor, keep: bool) -> tuple[_Pass, torch.Tensor]:
    """The recurrence without a graph; `keep` what a backward pass needs. The second value is the auxiliary loss."""
    fixed = to_fixed(streams, 2.0**stack.frac_bits)
    q_cur = fixed.to(torch.int32)
    left = _Pass(q_cur.clone(), q_cur, [], {}, [_largest(fixed)])
    if keep:
        left.checksums[-1] = left.checksums[0] = checksum(q_cur)
    aux_sum = streams.new_zeros(())
    for n, layer in enumerate(stack.layers):
        if stack.forces[n] == 0:
            increment, largest = 0, aux_sum.new_zeros(())
        else:
            p = stack.view(left.q_cur)
            y, aux = layer(p, stack.ctx)
            fixed = stack.increment(n, y, p)
            increment, largest = fixed.to(torch.int32), _largest(fixed)
            aux_sum = aux_sum + aux
        q_next, bit = midpoint(left.q_prev, left.q_cur, increment, stack.blends[n])
        left.q_prev, left.q_cur = left.q_cur, q_next
        left.extremes.append(largest)
        if keep:
            left.bits.append(None if bit is None else pack_bits(bit))
            if stack.report.check_every_layer:
                left.checksums[n + 1] = checksum(q_next)
    return left, aux_sum


class _ReversibleFunction(torch.autograd.Function):
    """
    The recurrence with its reconstructing backward pass; rounding is differentiated as the identity.

    The layers' parameters are no inputs: their gradients arrive through `torch.autograd.backward` inside backward, by
    the ordinary accumulation path, so hooks on them fire as everywhere else. `anchor` is a float that requires grad:
    without it, autograd would drop the whole node when the streams come from frozen parameters.
    """

    @staticmethod
    def forward(node, anchor, streams, stack):
        node.stack = stack
        node.left, aux_sum = _forward(stack, streams, keep=True)
        device = streams.device.type  # the backward pass runs outside the caller's autocast region
        node.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return stack.read_out(node.left), aux_sum

    @staticmethod
    @once_differentiable
    def backward(node, grad_output, grad_aux):
        stack, left, node.left = node.stack, node.left, None  # the states are overwritten below
        if left is None:
            raise ReversibilityError(
                "second backward pass through one reversible stack: the first one consumed its states. Run the forward "
                "again, or use stack_backend='stored' where retain_graph=True is needed"
            )
        ctx = replace(stack.ctx, record_statistics=False)
        q_prev, q_cur = left.q_prev, left.q_cur
        if stack.output == "last":
            grad_prev, grad_cur = torch.zeros_like(grad_output), grad_output
        else:
            grad_prev = grad_cur = 0.5 * grad_output
        mismatches = {}
        for n in reversed(range(len(stack.layers))):
            q_next, q_cur = q_cur, q_prev  # states n + 1 and n
            increment, blend = 0, stack.blends[n]
            through, beside, grad_y = _step_gradients(grad_cur, stack.forces[n], blend)
            grad_prev, grad_cur = through, grad_prev + beside  # of states n - 1 and n
            if stack.forces[n] != 0:
                increment, pulled = _pull_back(stack, n, q_cur, ctx, node.autocast, grad_y, grad_aux)
                grad_cur.add_(pulled)
            bit = None if blend == 1 else unpack_bits(left.bits[n], q_cur.shape)
            q_prev = undo_midpoint(q_next, q_cur, increment, blend, bit)
            if n - 1 in left.checksums:
                mismatches[n] = (checksum(q_prev) != left.checksums[n - 1]).any()
        if _in_range(stack, left.extremes):
            _check_reconstruction(stack, mismatches)
            stack.report.passes_verified += 1
        return None, grad_cur + grad_prev if node.needs_input_grad[1] else None, None


def _step_gradients(grad, force, blend) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of p_prev, p_cur and y in blend * p_prev + (1 - blend) * p_cur + force * (y - p_cur)."""
    grad_y = force * grad
    return grad if blend == 1 else blend * grad, (1 - blend) * grad - grad_y, grad_y


def _pull_back(stack, n, q, ctx, autocast, grad_y, grad_aux) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluates layer n again on the view of q; returns its increment and the gradient of that view."""
    p = stack.view(q).requires_grad_()
    with torch.enable_grad(), torch.autocast(*autocast):
        y, aux = stack.layers[n](p, ctx)
    outputs = [(t, g.to(t.dtype)) for t, g in ((y, grad_y), (aux, grad_aux)) if t.requires_grad]
    torch.autograd.backward(*zip(*outputs, strict=True))
    return stack.increment(n, y.detach(), p.detach()).to(torch.int32), p.grad


def _check_range(stack: _Stack, extremes: list[torch.Tensor]) -> None:
    """
    Raises unless every state fits int32 for sure: max |q| + max |increment| is bounded before any cast counts.

    The host waits for the device here and in `_check_reconstruction`, at the end of a pass, and nowhere else.
    """
    unit = 2.0**-stack.frac_bits
    limit = 2.0 ** (31 - stack.frac_bits)
    start, *increments = [largest * unit for largest in torch.stack(extremes).tolist()]
    if not start < limit:
        raise ReversibilityError(
            f"the input of the stack reaches |x| = {start:g}; frac_bits = {stack.frac_bits} holds |x| < {limit:g}"
        )
    largest = prev = cur = start
    for n, (step, blend) in enumerate(zip(increments, stack.blends, strict=True)):
        prev, cur = cur, blend * prev + (1 - blend) * cur + step
        if not cur < limit:
            found = f"may reach |p| = {cur:g}" if math.isfinite(cur) else "is not finite"
            raise ReversibilityError(
                f"the state after layer {n} {found} (largest increment {step:g}); frac_bits = {stack.frac_bits} holds "
                f"|p| < {limit:g}. Look for a diverging loss, or an unstable blend or step size"
            )
        largest = max(largest, cur)
    stack.report.largest_state = largest


def _in_range(stack: _Stack, extremes: list[torch.Tensor]) -> bool:
    """`_check_range`; False when the error was left to the caller."""
    try:
        _check_range(stack, extremes)
    except ReversibilityError as error:
        if not stack.report.defer_range_errors:
            raise
        stack.report.range_errors.append(str(error))
        return False
    return True


def _check_reconstruction(stack: _Stack, mismatches: dict[int, torch.Tensor]) -> None:
    """Raises if a rebuilt state differs; `mismatches` goes by the layer undone, in the order of the backward pass."""
    flags = torch.stack(list(mismatches.values())).tolist()
    bad = [n for n, wrong in zip(mismatches, flags, strict=True) if wrong]
    if not bad:
        return
    which = f"layer {bad[0]}"
    if not stack.report.check_every_layer and bad != [0]:
        which = "some layer (set check_every_layer in the ReversibilityReport to learn which)"
    raise ReversibilityError(
        f"the backward pass did not rebuild the states of the forward pass: {which} did not repeat its evaluation, so "
        "the gradients are wrong. Usual causes: dropout or other random numbers, kernels with atomics, weights, "
        "buffers, autocast or kept states changed between forward and backward"
    )


class _StraightThroughStep(torch.autograd.Function):
    """The value `exact` with the gradients of blend * p_prev + (1 - blend) * p_cur + force * (y - p_cur)."""

    @staticmethod
    def forward(node, p_prev, p_cur, y, exact, force, blend):
        node.force, node.blend = force, blend
        return exact.view_as(exact)

    @staticmethod
    def backward(node, grad):
        gradients = _step_gradients(grad, node.force, node.blend)
        needed = zip(gradients, node.needs_input_grad[:3], strict=True)
        return *(g if need else None for g, need in needed), None, None, None


def _stored_forward(stack: _Stack, streams: torch.Tensor, checkpointed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The same arithmetic under ordinary autograd, which keeps what every layer saves: the reference for gradients.

    The two `view_as` make autograd add up a state's gradients in the order of `_ReversibleFunction`: equal to the bit.
    """
    fixed = to_fixed(streams.detach(), 2.0**stack.frac_bits)
    q_cur = fixed.to(torch.int32)
    q_prev, extremes = q_cur.clone(), [_largest(fixed)]
    p_cur = _StraightThroughStep.apply(streams, None, None, stack.view(q_cur), 0.0, 1.0)
    p_prev = p_cur.view_as(p_cur)
    aux_sum = streams.new_zeros(())
    for n, (layer, force, blend) in enumerate(zip(stack.layers, stack.forces, stack.blends, strict=True)):
        y, increment, largest = None, 0, aux_sum.new_zeros(())
        if force != 0:
            p = p_cur.view_as(p_cur)
            y, aux = checkpointed_layer(layer, p, stack.ctx) if checkpointed else layer(p, stack.ctx)
            fixed = stack.increment(n, y.detach(), p.detach())
            increment, largest = fixed.to(torch.int32), _largest(fixed)
            aux_sum = aux_sum + aux
        q_prev, q_cur = q_cur, midpoint(q_prev, q_cur, increment, blend)[0]
        p_prev, p_cur = p_cur, _StraightThroughStep.apply(p_prev, p_cur, y, stack.view(q_cur), force, blend)
        extremes.append(largest)
    _in_range(stack, extremes)
    return p_cur if stack.output == "last" else 0.5 * (p_prev + p_cur), aux_sum


def checkpointed_layer(layer: Layer, streams: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
    """layer(streams, ctx) under activation checkpointing; statistics are recorded in the first evaluation only."""
    contexts = chain((ctx,), repeat(replace(ctx, record_statistics=False)))
    return checkpoint(lambda p: layer(p, next(contexts)), streams, use_reentrant=False, preserve_rng_state=False)


def reversible_stack(
    layers: Sequence[Layer],
    streams: torch.Tensor,
    ctx: LayerContext,
    step_size: Sequence[float],
    blend: Sequence[float],
    *,
    frac_bits: int = 16,
    backend: str = "reversible",
    output: str = "last",
    report: ReversibilityReport | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Runs the streams through the midpoint recurrence of this file.

    Args:
        layers: called as layer(streams, ctx). They must repeat bit for bit: no dropout, no atomics.
        streams: [B, T, N, H] fp32, below 2^(31 - frac_bits) in magnitude.
        step_size: h_n per layer. A layer with h_n = 0 is not evaluated; with blend 1 it swaps the state pair.
        blend: a_n per layer, 1 or 1/2. That of layer 0, the bootstrap, is not used.
        backend: "reversible"; "stored" for ordinary autograd, where memory grows with depth; "checkpointed" for one
            stored state per layer. All three compute the same values; without grad they are one.
        output: "last" for p_L, "mean_pair" for (p_{L-1} + p_L) / 2.
        report: filled in for the trainer's log.

    Returns:
        The output state [B, T, N, H] fp32 and the sum of the layers' auxiliary losses, a scalar.

    Raises:
        ReversibilityError: a state left the fixed-point range (seen at the end of the forward pass without grad, of
            the backward pass with it), or the backward pass did not rebuild the first state (seen at its end).
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: must be one of {', '.join(map(repr, BACKENDS))}")
    if output not in OUTPUTS:
        raise ValueError(f"output = {output!r}: must be one of {', '.join(map(repr, OUTPUTS))}")
    if not len(layers) == len(step_size) == len(blend):
        raise ValueError(f"{len(layers)} layers with {len(step_size)} step sizes and {len(blend)} blends")
    stack = _Stack(
        layers=layers,
        ctx=ctx,
        forces=[step_size[0], *(2 * h for h in step_size[1:])],
        blends=[1.0, *blend[1:]],
        frac_bits=frac_bits,
        output=output,
        report=report if report is not None else ReversibilityReport(),
    )
    streams = streams.float()
    if not torch.is_grad_enabled():
        left, aux = _forward(stack, streams, keep=False)
        out = stack.read_out(left)
        if not _in_range(stack, left.extremes):
            out.fill_(math.nan)
    elif backend == "reversible":
        out, aux = _ReversibleFunction.apply(streams.new_zeros((), requires_grad=True), streams, stack)
    else:
        out, aux = _stored_forward(stack, streams, checkpointed=backend == "checkpointed")
    if ctx.record_statistics:
        stack.report.observe(out.detach())
    return out, aux


def sequential_stack(
    layers: Sequence[Layer], streams: torch.Tensor, ctx: LayerContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain stack of the published dense model, streams = layer(streams), under ordinary autograd."""
    aux_sum = streams.new_zeros((), dtype=torch.float32)
    for layer in layers:
        streams, aux = layer(streams, ctx)
        aux_sum = aux_sum + aux
    return streams, aux_sum
