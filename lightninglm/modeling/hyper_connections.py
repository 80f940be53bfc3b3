"""
Manifold-constrained hyper-connections: N residual streams, read and rewritten around a sublayer by learned matrices.

Shapes: B batch, T tokens, N streams, H hidden size, M = B T.
Sources: hyper-connections, arXiv 2409.19606; doubly stochastic mixing of the streams, arXiv 2512.24880.
"""

from collections.abc import Callable

import torch
from torch import nn

from .configuration_lightninglm import LightningLMConfig
from .norms import RMSNorm

SINKHORN_EPS = 1e-6

Sublayer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def sinkhorn_naive(kernel_NNM: torch.Tensor, iterations: int) -> torch.Tensor:
    """
    diag(u) K diag(v) for positive K [N, N, M], rows then columns normalized `iterations` times (reference).

    Columns come last, so column sums are 1 to 1e-6: the mix keeps the mean over the streams.
    """
    v_NM = torch.full_like(kernel_NNM[0], 1 / kernel_NNM.shape[0])
    for _ in range(iterations):
        u_NM = 1 / ((kernel_NNM * v_NM).sum(1) + SINKHORN_EPS)
        v_NM = 1 / ((kernel_NNM * u_NM[:, None]).sum(0) + SINKHORN_EPS)
    return u_NM[:, None] * kernel_NNM * v_NM


class Sinkhorn(torch.autograd.Function):
    """`sinkhorn_naive` with its backward pass written out: the derivative through the iterations, in fewer steps."""

    @staticmethod
    def forward(node, kernel, iterations):
        u, v = [], [torch.full_like(kernel[0], 1 / kernel.shape[0])]
        for _ in range(iterations):
            u.append((kernel * v[-1]).sum(1).add_(SINKHORN_EPS).reciprocal_())
            v.append((kernel * u[-1][:, None]).sum(0).add_(SINKHORN_EPS).reciprocal_())
        node.save_for_backward(kernel, torch.stack(u), torch.stack(v))
        return u[-1][:, None] * kernel * v[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(node, grad):
        kernel, u, v = node.saved_tensors
        du_dsum, dv_dsum = -u.square(), -v.square()  # derivatives of the reciprocals
        grad_kernel = grad * u[-1][:, None] * v[-1]
        weighted = grad * kernel
        grad_u, grad_v = (weighted * v[-1]).sum(1), (weighted * u[-1][:, None]).sum(0)
        for t in reversed(range(len(u))):
            grad_sum = dv_dsum[t + 1] * grad_v
            grad_kernel += u[t][:, None] * grad_sum
            grad_sum = du_dsum[t] * (kernel * grad_sum).sum(1).add_(grad_u)
            grad_kernel += grad_sum[:, None] * v[t]
            grad_u, grad_v = 0, (kernel * grad_sum[:, None]).sum(0)
        return grad_kernel, None


class ProjectStreams(torch.autograd.Function):
    """(Phi x^T [C, M], mean of x^2 [M]) for x [M, Y], Phi [C, Y]; both gradients of x are gathered in one product."""

    @staticmethod
    def forward(node, x, phi):
        node.save_for_backward(x, phi)
        return phi @ x.T, torch.linalg.vector_norm(x, dim=1).square_().div_(x.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(node, grad_product, grad_mean_square):
        x, phi = node.saved_tensors
        grad_x = x * (2 / x.shape[1] * grad_mean_square)[:, None]
        return grad_x.addmm_(grad_product.T, phi), grad_product @ x


class HyperConnection(nn.Module):
    """
    Connects one sublayer to the streams X (docs/model.md, "Hyper-connections"), all in fp32:

        z    = RMSNorm(flatten X)              pre = sigmoid(alpha_pre Phi_pre z + b_pre), post = 2 sigmoid(...)
        x_in = RMSNorm(sum_i pre_i X_i)        R   = Sinkhorn(exp(alpha_res Phi_res z + b_res - row max))
        X'_i = sum_j R_ij X_j + post_i sublayer(x_in)

    The sublayer gets x_in in the dtype of `norm.weight`.

    Args:
        config: uses hidden_size, num_streams, sinkhorn_iterations, b_res_init, rms_norm_eps.
    """

    def __init__(self, config: LightningLMConfig):
        super().__init__()
        N, H = config.num_streams, config.hidden_size
        self.num_streams, self.sinkhorn_iterations = N, config.sinkhorn_iterations
        self.norm = RMSNorm(H, config.rms_norm_eps)
        self.stream_norm = RMSNorm(N * H, config.rms_norm_eps)
        self.phi_pre = nn.Linear(N * H, N, bias=False)
        self.phi_post = nn.Linear(N * H, N, bias=False)
        self.phi_res = nn.Linear(N * H, N * N, bias=False)
        self.b_pre = nn.Parameter(torch.zeros(N))
        self.b_post = nn.Parameter(torch.zeros(N))
        self.b_res = nn.Parameter(config.b_res_init * torch.eye(N))
        self.alpha_pre = nn.Parameter(torch.tensor(0.1))
        self.alpha_post = nn.Parameter(torch.tensor(0.1))
        self.alpha_res = nn.Parameter(torch.tensor(0.1))

    def coefficients(self, streams_MNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """pre [M, N] in (0, 1), post [M, N] in (0, 2) and the mixing matrix R [M, N, N] of each token."""
        N = self.num_streams
        flat_MY = streams_MNH.flatten(1)
        # Phi z = (Phi diag(w)) x / rms(x): one product for all three maps, and the normed streams are never written.
        phi_CY = torch.cat((self.phi_pre.weight, self.phi_post.weight, self.phi_res.weight)).float()
        phi_CY = phi_CY * self.stream_norm.weight.float()
        raw_CM, mean_square_M = ProjectStreams.apply(flat_MY, phi_CY)
        raw_CM = raw_CM * torch.rsqrt(mean_square_M + self.stream_norm.eps)
        alpha_C = torch.cat((self.alpha_pre.expand(N), self.alpha_post.expand(N), self.alpha_res.expand(N * N))).float()
        bias_C = torch.cat((self.b_pre, self.b_post, self.b_res.flatten())).float()
        pre_NM, post_NM, res_CM = torch.addcmul(bias_C[:, None], raw_CM, alpha_C[:, None]).split((N, N, N * N))
        res_NNM = res_CM.unflatten(0, (N, N))
        kernel_NNM = torch.exp(res_NNM - res_NNM.amax(1, keepdim=True))
        mix_NNM = Sinkhorn.apply(kernel_NNM, self.sinkhorn_iterations)
        return pre_NM.sigmoid().T, 2 * post_NM.sigmoid().T, mix_NNM.permute(2, 0, 1)

    def forward(self, streams: torch.Tensor, sublayer: Sublayer) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps streams [B, T, N, H] fp32 to the same shape; the second value is the sublayer's auxiliary loss."""
        device = streams.device.type
        streams_MNH = streams.flatten(0, 1)
        with torch.autocast(device, enabled=False):
            pre_MN, post_MN, mix_MNN = self.coefficients(streams_MNH)
            read_MNN = torch.cat((pre_MN[:, None], mix_MNN), dim=1)
            collapsed, mixed_MNH = torch.bmm(read_MNN, streams_MNH).split((1, self.num_streams), dim=1)
            # A copy, for autograd keeps the norm's input: a view would keep mixed_MNH with it.
            x = self.norm(collapsed.contiguous().view(*streams.shape[:2], -1)).to(self.norm.weight.dtype)
        y, aux = sublayer(x)
        with torch.autocast(device, enabled=False):
            y_M1H = y.float().flatten(0, 1)[:, None]
            return torch.addcmul(mixed_MNH, post_MN[:, :, None], y_M1H).view_as(streams), aux
