"""
The routed experts: one SwiGLU per expert, as grouped matrix products over rows sorted by expert.

R rows, E local experts, H hidden size, F expert width. Each stacked weight gets a gradient in every backward pass,
zeros for an expert without rows: data-parallel replicas of an expert must reduce the same list of gradients.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .configuration_lightninglm import LightningLMConfig

GROUPED_MM_MULTIPLE = 8  # grouped_mm wants rows of a multiple of 16 bytes, 8 entries of bf16


def naive_experts(x_RH: torch.Tensor, counts: torch.Tensor, gate_EFH, up_EFH, down_EHF) -> torch.Tensor:
    """The readable reference: every expert in turn, W_down (SiLU(W_gate x) * W_up x) on its own rows."""
    outputs = [
        (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        for x, gate, up, down in zip(x_RH.split(counts.tolist()), gate_EFH, up_EFH, down_EHF, strict=True)
    ]
    return torch.cat(outputs)


class LoopMatmul:
    """
    Grouped matrix products as products per expert.

    All products that read the rows of one expert run before the next expert, while they are in the cache: products this
    small wait for memory more than for arithmetic.
    """

    def __init__(self, counts: torch.Tensor):
        self.sizes = counts.tolist()

    def rows_by_weight(self, x_RI: torch.Tensor, weight_EIO: torch.Tensor, out: torch.Tensor) -> None:
        """Writes x W_e for the rows of each expert e to `out`: [R, I], [E, I, O] -> [R, O]."""
        for x, weight, y in zip(x_RI.split(self.sizes), weight_EIO.unbind(), out.split(self.sizes), strict=True):
            torch.mm(x, weight, out=y)

    def linear(self, x_RI: torch.Tensor, *weights_EOI: torch.Tensor) -> list[torch.Tensor]:
        """y = x W_e^T for the rows of each expert e, by each of the stacked weights: [R, I], [E, O, I] -> [R, O]."""
        outputs = [x_RI.new_empty(x_RI.shape[0], weight.shape[1]) for weight in weights_EOI]
        stacks = [(w.mT.unbind(), y.split(self.sizes)) for w, y in zip(weights_EOI, outputs, strict=True)]
        for e, x in enumerate(x_RI.split(self.sizes)):
            for weights, ys in stacks:
                torch.mm(x, weights[e], out=ys[e])
        return outputs

    def linear_backward(self, x_RI, grads_RO, weights_EOI, need_x: bool, need_weights: Sequence[bool]):
        """
        The gradients of `linear`: of x, summed over the weights, and of each of the weights, zeros without rows.

        Args:
            grads_RO: of the outputs, one per stacked weight.
            need_x, need_weights: what is not needed is None.
        """
        grad_x = torch.empty_like(x_RI) if need_x else None
        grad_weights = [
            torch.empty_like(weight) if need else None for weight, need in zip(weights_EOI, need_weights, strict=True)
        ]
        xs, dxs = x_RI.split(self.sizes), grad_x.split(self.sizes) if need_x else None
        stacks = [
            (dy.split(self.sizes), dy.t().split(self.sizes, dim=1), w.unbind(), None if dw is None else dw.unbind())
            for dy, w, dw in zip(grads_RO, weights_EOI, grad_weights, strict=True)
        ]
        for e, x in enumerate(xs):
            for i, (dys, dys_t, weights, dws) in enumerate(stacks):
                if dxs is not None:
                    torch.addmm(dxs[e], dys[e], weights[e], beta=int(i > 0), out=dxs[e])
                if dws is not None:
                    torch.mm(dys_t[e], x, out=dws[e])
        return grad_x, grad_weights


class GroupedMatmul:
    """The same products by `torch.nn.functional.grouped_mm`, one kernel for all experts, no host synchronization."""

    def __init__(self, counts: torch.Tensor, device: torch.device):
        ends = counts.cumsum(0).to(torch.int32)
        if ends.device != device:  # counts on the host: a copy from memory that is not pinned would wait for the stream
            ends = ends.pin_memory().to(device, non_blocking=True)
        self.ends = ends

    def rows_by_weight(self, x_RI: torch.Tensor, weight_EIO: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(F.grouped_mm(x_RI, weight_EIO, offs=self.ends))

    def linear(self, x_RI: torch.Tensor, *weights_EOI: torch.Tensor) -> list[torch.Tensor]:
        return [F.grouped_mm(x_RI, weight.transpose(1, 2), offs=self.ends) for weight in weights_EOI]

    def linear_backward(self, x_RI, grads_RO, weights_EOI, need_x: bool, need_weights: Sequence[bool]):
        grad_x = None
        if need_x:
            grad_x, *others = (
                F.grouped_mm(grad, weight, offs=self.ends) for grad, weight in zip(grads_RO, weights_EOI, strict=True)
            )
            for other in others:
                grad_x += other
        grad_weights = [
            F.grouped_mm(grad.t(), x_RI, offs=self.ends) if need else None
            for grad, need in zip(grads_RO, need_weights, strict=True)
        ]
        return grad_x, grad_weights


def choose_matmul(backend: str, x_RH: torch.Tensor, counts: torch.Tensor) -> LoopMatmul | GroupedMatmul:
    """The products behind `experts_backend`; `"auto"` is grouped_mm for bf16 on CUDA and the loop elsewhere."""
    if backend == "auto":
        backend = "grouped_mm" if x_RH.is_cuda and x_RH.dtype == torch.bfloat16 else "torch"
    return GroupedMatmul(counts, x_RH.device) if backend == "grouped_mm" else LoopMatmul(counts)


class _SwiGLUExperts(torch.autograd.Function):
    """y = W_down (SiLU(W_gate x) * W_up x) per expert; keeps x and the two products, not their combination."""

    @staticmethod
    def forward(ctx, x_RH, gate_EFH, up_EFH, down_EHF, matmul):
        gate_RF, up_RF = matmul.linear(x_RH, gate_EFH, up_EFH)
        ctx.save_for_backward(x_RH, gate_RF, up_RF, gate_EFH, up_EFH, down_EHF)
        ctx.matmul = matmul
        return matmul.linear(F.silu(gate_RF).mul_(up_RF), down_EHF)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RH):
        x_RH, gate_RF, up_RF, gate_EFH, up_EFH, down_EHF = ctx.saved_tensors
        need_x, *need_gate_up, need_down, _ = ctx.needs_input_grad
        activated_RF = F.silu(gate_RF)
        grad_RF, (grad_down,) = ctx.matmul.linear_backward(
            activated_RF * up_RF, [grad_RH.contiguous()], [down_EHF], True, [need_down]
        )
        grad_gate_RF = torch.ops.aten.silu_backward(grad_RF * up_RF, gate_RF)
        grad_up_RF = grad_RF.mul_(activated_RF)
        grad_x, grad_gate_up = ctx.matmul.linear_backward(
            x_RH, [grad_gate_RF, grad_up_RF], [gate_EFH, up_EFH], need_x, need_gate_up
        )
        return grad_x, *grad_gate_up, grad_down, None


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T for the rows of each expert e."""

    @staticmethod
    def forward(ctx, x_RI, weight_EOI, matmul):
        ctx.save_for_backward(x_RI, weight_EOI)
        ctx.matmul = matmul
        return matmul.linear(x_RI, weight_EOI)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO):
        x_RI, weight_EOI = ctx.saved_tensors
        need_x, *need_weight, _ = ctx.needs_input_grad
        grad_x, (grad_weight,) = ctx.matmul.linear_backward(
            x_RI, [grad_RO.contiguous()], [weight_EOI], need_x, need_weight
        )
        return grad_x, grad_weight, None


def grouped_linear(x_RI: torch.Tensor, weight_EOI: torch.Tensor, matmul) -> torch.Tensor:
    """y = x W_e^T for the rows of each expert e, differentiable: [R, I], [E, O, I] -> [R, O]."""
    return _GroupedLinear.apply(x_RI, weight_EOI, matmul)


class StackedLinear(nn.Module):
    """One projection of all local experts: weight [E_local, out, in]."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        nn.init.normal_(self.weight, std=std)

    def extra_repr(self) -> str:
        return f"experts, out, in = {tuple(self.weight.shape)}"


class Experts(nn.Module):
    """
    SwiGLU experts without biases, stacked.

    Args:
        config: sizes and `experts_backend`.
        num_local_experts: experts to allocate here; all of them by default.

    Attributes:
        num_experts: routed experts of the layer, on all ranks.
        expert_start, expert_count: the block of them that is here.
        num_local_experts: allocated here, at least `expert_count`; the rest is zero padding and gets no token.
    """

    def __init__(self, config: LightningLMConfig, num_local_experts: int | None = None):
        super().__init__()
        self.backend = expert_backend(config)
        self.num_experts = config.num_experts
        self.num_local_experts = config.num_experts if num_local_experts is None else num_local_experts
        self.expert_start, self.expert_count = 0, min(self.num_experts, self.num_local_experts)
        local, hidden, width = self.num_local_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj = StackedLinear(local, hidden, width, config.initializer_range)
        self.up_proj = StackedLinear(local, hidden, width, config.initializer_range)
        self.down_proj = StackedLinear(local, width, hidden, config.initializer_range)

    def forward(self, x_RH: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """
        Each expert on its own rows.

        Args:
            x_RH: [R, H], rows sorted by local expert.
            tokens_per_expert: [E_local] int64, rows of each; they sum to R.
        """
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        x_RH = x_RH.to(weights[0].dtype)
        if self.backend == "naive":
            return naive_experts(x_RH, tokens_per_expert, *weights)
        matmul = choose_matmul(self.backend, x_RH, tokens_per_expert)
        return _SwiGLUExperts.apply(x_RH, *weights, matmul)


def expert_backend(config: LightningLMConfig) -> str:
    """
    `config.experts_backend`, checked; `"auto"` is the loop where the sizes do not suit grouped_mm.

    `"triton"` names the kernel of a quantized base; the other products are then those of `"auto"`.

    Raises:
        ValueError: grouped_mm is asked for and cannot align the rows.
    """
    backend = "auto" if config.experts_backend == "triton" else config.experts_backend
    sizes = {"hidden_size": config.hidden_size, "moe_intermediate_size": config.moe_intermediate_size}
    if config.expert_quantization is not None:
        sizes["expert_quantization.rank"] = config.expert_quantization["rank"]
    for name, size in sizes.items():
        if size % GROUPED_MM_MULTIPLE:
            if backend == "grouped_mm":
                raise ValueError(
                    f"config.{name} = {size}: experts_backend = 'grouped_mm' needs a multiple of {GROUPED_MM_MULTIPLE}"
                )
            return "torch" if backend == "auto" else backend
    return backend


@torch.no_grad()
def shard_experts(experts: nn.Module, start: int, count: int, padded: int) -> None:
    """
    Keeps, in place, only one block of the experts; works on the meta device too.

    Args:
        experts: `Experts` or `QuantizedExperts` that holds all experts.
        start, count: the block to keep.
        padded: experts to allocate; those beyond `count` are zero.
    Raises:
        ValueError: the block is not inside the experts, or they are sharded already.
    """
    total = experts.num_experts
    if experts.expert_count != total:
        raise ValueError(f"experts are sharded already: {experts.expert_count} of {total} are here")
    if min(start, count) < 0 or start + count > total or padded < count:
        raise ValueError(f"cannot keep experts {start}..{start + count - 1} of {total} in {padded} slots")
    for stack in (experts.gate_proj, experts.up_proj, experts.down_proj):
        for name, tensor in [*stack.named_parameters(), *stack.named_buffers()]:
            block = tensor.new_zeros(padded, *tensor.shape[1:])
            block[:count] = tensor[start : start + count]
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(stack, name, nn.Parameter(block, tensor.requires_grad) if is_parameter else block)
    experts.expert_start, experts.expert_count, experts.num_local_experts = start, count, padded
