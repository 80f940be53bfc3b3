"""Routers: which experts a token goes to (in fp32), and with which weights (normalized in fp64)."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from .balance import update_bias
from .configuration_lightninglm import LightningLMConfig
from .selection_noise import SelectionNoise

NULL_EXPERT = -1
MIN_WEIGHT_SUM = 1e-6  # smallest denominator when the weights of the picks are normalized
MIN_PICKS_PER_MEMBER = 16  # members of a group are balanced in steps that bring them this many picks each, on average
NULL_BIAS_START = -5.0
NULL_BIAS_SPEED = 0.1
BALANCE_LOSS_WEIGHT = 0.02  # weights of the published softmax router's auxiliary losses
Z_LOSS_WEIGHT = 0.001
NULL_LOSS_WEIGHT = 0.01


class Routing(NamedTuple):
    """
    What a router decides for T tokens.

    Attributes:
        experts: [T, K] int64, global expert numbers, by descending selection score; -1 is a null pick (no expert).
        weights: [T, K] fp64, differentiable; the weight of a null pick is 0. Not rounded to fp32, so that the weights
            of a group's members add up to the weight of the group (see `token_dispatch.weighted_sum`).
        aux: the router's auxiliary loss, a fp32 scalar, or None.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    aux: torch.Tensor | None


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """
    Indices of the k largest entries of the last dimension of fp32 scores, descending; ties go to the lower index.

    torch.topk breaks ties as it likes, so it is given distinct int64 keys: the bits of the score, in an order
    that integers share with floats, above the reversed index.
    """
    bits = (scores.detach() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    index = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    return ((ordered << 32) | index).topk(k, dim=-1).indices


class Router(nn.Module, ABC):
    """Base of the routers: fp32 tensors whatever the model is cast to, and the pick counters behind load balancing."""

    def __init__(self, config: LightningLMConfig, num_slots: int):
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.z_loss_weight = config.router_z_loss_weight
        self.balance = {
            "rule": config.balance,
            "speed": config.balance_speed,
            "band": tuple(config.balance_band),
            "gain": config.balance_gain,
        }
        self.register_buffer("pick_counts", torch.zeros(num_slots, dtype=torch.int64), persistent=False)

    def _apply(self, fn, recurse=True):
        """Moves the tensors as asked, but keeps their dtype: a bf16 router would pick other experts."""

        def keep_dtype(tensor):
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def _linear(self, x_TH: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Logits in fp32, under any autocast state."""
        if weight.dtype != torch.float32:
            raise ValueError(f"router weights are {weight.dtype}: keep them in float32, rounding changes the picks")
        with torch.autocast(x_TH.device.type, enabled=False):
            return F.linear(x_TH.float(), weight)

    def _z_loss(self, logits: torch.Tensor, keep_T: torch.Tensor | None) -> torch.Tensor | None:
        if self.z_loss_weight == 0:
            return None
        return self.z_loss_weight * _mean_over_tokens(logits.logsumexp(-1).square(), keep_T)

    def _record(self, slots_TK: torch.Tensor, keep_T: torch.Tensor | None) -> None:
        """Counts the picks of real tokens."""
        real = torch.ones_like(slots_TK) if keep_T is None else keep_T.long()[:, None].expand_as(slots_TK)
        self.pick_counts.scatter_add_(0, slots_TK.flatten(), real.flatten())

    def statistics(self) -> list[torch.Tensor]:
        """The counters since the last optimizer step; the caller sums them over ranks, in place."""
        return [self.pick_counts]

    @torch.no_grad()
    def after_optimizer_step(self, update: bool) -> None:
        """Applies the balance rule to the counts (not when the optimizer step was skipped) and clears them."""
        if update:
            self._balance(self.pick_counts)
        self.pick_counts.zero_()

    @abstractmethod
    def forward(
        self,
        x_TH: torch.Tensor,
        keep_T: torch.Tensor | None,
        record_statistics: bool,
        noise: SelectionNoise | None = None,
    ) -> Routing:
        """
        Routes tokens.

        Args:
            x_TH: [T, H], any float dtype.
            keep_T: [T] bool, True for real tokens (others are routed but neither counted nor in the losses); None: all.
            record_statistics: count the picks for the balance rule.
            noise: added to the scores that select, not to those that weigh; None in evaluation.
        """

    @abstractmethod
    def _balance(self, counts: torch.Tensor) -> None:
        """Applies the balance rule to the counters of one optimizer step, summed over ranks."""


class FlatRouter(Router):
    """
    Picks the top K of all experts, and of Z null slots that stand for "no expert".

    `router_scoring="sigmoid"`: s = sigmoid(W x), picks by s + logit_bias, weights s / sum of the picked s; the bias
    is a buffer moved by the balance rule (DeepSeek-V3). `"softmax"` (published 5B and 9B): logits W x + logit_bias
    with a trained bias, picks by logit, weights softmax over the picks, auxiliary losses when `balance="aux"`.
    All null slots share one trained logit; `null_renorm` divides by the weight of the real picks only.
    """

    def __init__(self, config: LightningLMConfig):
        super().__init__(config, config.num_experts + (config.num_null_experts > 0))
        self.num_null = config.num_null_experts
        self.softmax = config.router_scoring == "softmax"
        self.aux_losses = config.balance == "aux"
        self.null_renorm = config.null_renorm
        self.null_rate = config.null_rate
        size = config.num_experts
        self.weight = nn.Parameter(torch.empty(size, config.hidden_size, dtype=torch.float32))
        nn.init.normal_(self.weight, std=config.initializer_range)
        bias = torch.zeros(size, dtype=torch.float32)
        if self.softmax:
            self.logit_bias = nn.Parameter(bias)
        else:
            self.register_buffer("logit_bias", bias)
        self.register_buffer("usage_ema", torch.full((size,), 1 / size, dtype=torch.float32))
        self.null_logit = None
        if self.num_null or config.mode == "published":  # the published 120B stores one, frozen, without null slots
            self.null_logit = nn.Parameter(torch.zeros((), dtype=torch.float32))
        self.register_buffer("null_bias", None)
        if self.num_null and not self.softmax:
            self.null_bias = torch.tensor(NULL_BIAS_START, dtype=torch.float32)
        self.freeze_inert_null_logit()

    def freeze_inert_null_logit(self) -> None:
        """A null logit that no weight depends on (no null slots, or renormalized sigmoid weights) is not trained."""
        if self.null_logit is not None:
            self.null_logit.requires_grad_(self.num_null > 0 and (self.softmax or not self.null_renorm))

    def forward(
        self,
        x_TH: torch.Tensor,
        keep_T: torch.Tensor | None,
        record_statistics: bool,
        noise: SelectionNoise | None = None,
    ) -> Routing:
        """See `Router.forward`; picks are in the order of their selection scores."""
        logits_TE = self._linear(x_TH, self.weight)
        if self.softmax:
            logits_TE = logits_TE + self.logit_bias
            scores_TS = selection_TS = self._with_null(logits_TE, self.null_logit)
        else:
            null_score = self.null_logit.sigmoid() if self.num_null else None
            scores_TS = self._with_null(logits_TE.sigmoid(), null_score)
            selection_TS = scores_TS + self._with_null(self.logit_bias[None], self.null_bias)
        if noise is not None:
            selection_TS = selection_TS + noise.draw(torch.arange(selection_TS.shape[1], device=x_TH.device))
        picks_TK = top_k(selection_TS, self.top_k)
        picked_TK = scores_TS.gather(1, picks_TK).double()
        weights_TK = picked_TK.softmax(-1) if self.softmax else _normalized(picked_TK)
        real_TK = picks_TK < self.num_experts
        if self.num_null:
            weights_TK = weights_TK * real_TK
            weights_TK = _normalized(weights_TK) if self.null_renorm else weights_TK
        if record_statistics:
            self._record(picks_TK.clamp(max=self.num_experts), keep_T)
        if self.aux_losses:
            aux = self._published_losses(logits_TE, scores_TS, picks_TK, real_TK, keep_T)
        else:
            aux = self._z_loss(logits_TE, keep_T)
        return Routing(picks_TK.masked_fill(~real_TK, NULL_EXPERT), weights_TK, aux)

    def _with_null(self, scores_TE: torch.Tensor, null: torch.Tensor | None) -> torch.Tensor:
        """Appends the Z null slots, which share one score."""
        if self.num_null == 0:
            return scores_TE
        return torch.cat((scores_TE, null.expand(scores_TE.shape[0], self.num_null)), dim=1)

    def _published_losses(self, logits_TE, logits_TS, picks_TK, real_TK, keep_T) -> torch.Tensor:
        """0.02 * E * sum_e f_e P_e + 0.001 * z-loss + 0.01 * (null rate - target)^2, over real tokens."""
        keep_T = real_TK.new_ones(real_TK.shape[0]) if keep_T is None else keep_T
        real_TK = real_TK & keep_T[:, None]
        counts_E = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=picks_TK.device)
        counts_E.scatter_add_(0, picks_TK.clamp(max=self.num_experts).flatten(), real_TK.long().flatten())
        share_E = counts_E[: self.num_experts] / real_TK.sum().clamp(min=1)
        mean_E = _mean_over_tokens(logits_TE.softmax(-1), keep_T)
        balance = self.num_experts * (share_E * mean_E).sum()
        z = _mean_over_tokens(logits_TS.logsumexp(-1).square(), keep_T)
        null_rate = 1 - real_TK.sum() / (keep_T.sum() * self.top_k).clamp(min=1)
        null = (null_rate - self.null_rate).square()
        return BALANCE_LOSS_WEIGHT * balance + Z_LOSS_WEIGHT * z + NULL_LOSS_WEIGHT * null

    def _balance(self, counts: torch.Tensor) -> None:
        real = counts[: self.num_experts]
        update_bias(self.logit_bias, self.usage_ema, real, center=self.num_null == 0, **self.balance)
        if self.null_bias is not None and self.balance["rule"] != "none":
            picks = counts.sum()
            rate = counts[-1] / picks.clamp(min=1)
            self.null_bias -= torch.where(picks > 0, NULL_BIAS_SPEED * (rate - self.null_rate), 0.0)


class GroupedRouter(Router):
    """
    Picks k_g of P groups as a flat sigmoid router does, then k_m of the M members of each, K = k_g * k_m.

    The weight of expert e = g * M + m is omega_g * pi_{m|g}: omega the normalized sigmoid scores of the chosen groups,
    pi a softmax over the chosen members. The weights inside a group sum to omega_g, so a group of identical members
    computes what one expert with the group's router row computed, whatever the member router is.
    """

    def __init__(self, config: LightningLMConfig):
        super().__init__(config, config.num_experts)
        self.num_groups, self.group_size = config.num_expert_groups, config.experts_per_group
        self.groups_per_token, self.members_per_group = config.groups_per_token, config.members_per_group
        hidden = config.hidden_size
        self.group = nn.Linear(hidden, self.num_groups, bias=False, dtype=torch.float32)
        self.member = nn.Linear(hidden, config.num_experts, bias=False, dtype=torch.float32)
        for layer in (self.group, self.member):
            nn.init.normal_(layer.weight, std=config.initializer_range)
        shapes = {"group": (self.num_groups,), "member": (self.num_groups, self.group_size)}
        for level, shape in shapes.items():
            self.register_buffer(f"{level}_bias", torch.zeros(shape, dtype=torch.float32))
            self.register_buffer(f"{level}_usage_ema", torch.full(shape, 1 / shape[-1], dtype=torch.float32))

    def forward(
        self,
        x_TH: torch.Tensor,
        keep_T: torch.Tensor | None,
        record_statistics: bool,
        noise: SelectionNoise | None = None,
    ) -> Routing:
        """See `Router.forward`; picks are ordered by group, then by member."""
        logits_TP = self._linear(x_TH, self.group.weight)
        scores_TP = logits_TP.sigmoid()
        selection_TP = scores_TP + self.group_bias
        if noise is not None:
            selection_TP = selection_TP + noise.draw(torch.arange(self.num_groups, device=x_TH.device))
        groups_Tg = top_k(selection_TP, self.groups_per_token)
        omega_Tg = _normalized(scores_TP.gather(1, groups_Tg).double())

        logits_TPM = self._linear(x_TH, self.member.weight).unflatten(1, (self.num_groups, self.group_size))
        chosen = groups_Tg[:, :, None].expand(-1, -1, self.group_size)
        logits_TgM = logits_TPM.gather(1, chosen)
        selection_TgM = logits_TgM + self.member_bias[groups_Tg]
        if noise is not None:  # the members' slots come after those of the groups
            member = torch.arange(self.group_size, device=x_TH.device)
            selection_TgM = selection_TgM + noise.draw(
                self.num_groups + groups_Tg[:, :, None] * self.group_size + member
            )
        members_Tgm = top_k(selection_TgM, self.members_per_group)
        pi_Tgm = logits_TgM.gather(2, members_Tgm).double().softmax(-1)

        experts_TK = (groups_Tg[:, :, None] * self.group_size + members_Tgm).flatten(1)
        weights_TK = (omega_Tg[:, :, None] * pi_Tgm).flatten(1)
        if record_statistics:
            self._record(experts_TK, keep_T)
        return Routing(experts_TK, weights_TK, self._z_loss(logits_TP, keep_T))

    def _balance(self, counts: torch.Tensor) -> None:
        members = counts.view(self.num_groups, self.group_size)
        update_bias(self.group_bias, self.group_usage_ema, members.sum(1), **self.balance)
        enough = MIN_PICKS_PER_MEMBER * self.group_size
        update_bias(self.member_bias, self.member_usage_ema, members, min_count=enough, **self.balance)


def build_router(config: LightningLMConfig) -> Router:
    """The router that `config.router_layout` names."""
    return GroupedRouter(config) if config.router_layout == "grouped" else FlatRouter(config)


def _normalized(weights_TK: torch.Tensor) -> torch.Tensor:
    """Weights divided by their sum over the picks."""
    return weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=MIN_WEIGHT_SUM)


def _mean_over_tokens(values: torch.Tensor, keep_T: torch.Tensor | None) -> torch.Tensor:
    """Mean of [T, ...] over the real tokens; 0 when there are none."""
    if keep_T is None:
        return values.mean(0)
    keep = keep_T.float().view(-1, *[1] * (values.dim() - 1))
    return (values * keep).sum(0) / keep_T.sum().clamp(min=1)
