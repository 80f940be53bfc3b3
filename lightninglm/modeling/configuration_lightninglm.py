"""The configuration of a LightningLM model: every size and every switch, checked when it is built."""

import math

from transformers import PreTrainedConfig

LINEAR_ATTENTION = "linear_attention"  # a gated DeltaNet layer
INDEXED_ATTENTION = "indexed_attention"  # a gated sparse-attention layer, its keys chosen by an indexer

PUBLISHED_SWITCHES = {
    "codec_bytes": "decoded_text",
    "rope_source": "checkpoint",
    "conv_mask_inputs": False,
    "sparse_variance": "zero_filled",
    "sparse_score_dtype": "bfloat16",
    "indexer_kl_weight": 0.0,
    "router_scoring": "softmax",
    "balance": "aux",
    "num_null_experts": 20,
    "null_renorm": True,
    "stack": "midpoint",
    "default_blend": 0.5,
    "b_res_init": 0.0,
    "mtp_aux": False,
    "mtp_stack": "midpoint",
}
"""What `mode="published"` changes against the defaults below (a value given explicitly wins)."""


class LightningLMConfig(PreTrainedConfig):
    r"""
    Configuration of `LightningLMModel`. The defaults are the 2B dense seed; presets are in `presets.py`.

    Sizes:
        hidden_size (H), num_hidden_layers (L), num_streams (N, residual streams of the hyper-connections),
        sinkhorn_iterations, intermediate_size (dense FFN and shared expert), moe_intermediate_size (a routed expert).
    Layers:
        layer_types: per layer `"linear_attention"` (gated DeltaNet) or `"indexed_attention"` (sparse attention). By
            default every fourth layer is indexed. linear_num_heads * linear_head_dim and
            num_attention_heads * head_dim are the widths of the two mixers; both must equal hidden_size.
    Experts (num_experts = 0 is a dense model):
        num_experts (E), num_experts_per_tok (K), num_null_experts (Z), null_renorm, null_rate.
        router_layout `"flat"` or `"grouped"`; grouped needs num_expert_groups (P, each with E / P members),
        groups_per_token (k_g) and members_per_group (k_m), and K = k_g * k_m.
        router_scoring `"sigmoid"` or `"softmax"`; balance `"sign"`, `"banded"`, `"aux"` or `"none"`, balance_speed
            (gamma), balance_band (lo, hi) as multiples of the uniform load, balance_gain (kappa).
        expert_quantization: None, or a dict with kind (`"int8"`, `"int4"`, `"codebook"`), group_size, rank and seed.
    Second-token prediction (num_nextn_predict_layers = 1):
        mtp_loss_weight, mtp_aux (its auxiliary loss counts, too), mtp_stack `"sequential"` or `"midpoint"`,
        mtp_num_experts and mtp_num_experts_per_tok (its flat router; by default the groups of a grouped model, else as
        the other layers).
    Reversible stack:
        stack `"midpoint"` or `"sequential"`; stack_backend `"reversible"`, `"stored"` or `"checkpointed"` (same
        function, different memory); step_sizes (h_n) and blends (a_n) per layer; frac_bits; stack_output.
    Other switches are named as in docs/model.md. `mode="published"` selects the published behaviour
    wherever a switch is not given.
    Raises ValueError, naming the field, when a value cannot work.
    """

    model_type = "lightninglm"
    keys_to_ignore_at_inference = ["cache", "next_token_loss", "second_token_loss", "aux_loss", "memory"]

    mode: str = "default"
    vocab_size: int = 131072
    hidden_size: int = 4096
    num_hidden_layers: int = 8
    num_streams: int = 4
    sinkhorn_iterations: int = 20
    layer_types: list[str] | None = None

    linear_num_heads: int = 32
    linear_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    decay_init: str = "published"
    conv_mask_inputs: bool | None = None

    num_attention_heads: int = 16
    head_dim: int = 256
    sparse_key_budget: int = 128
    sparse_min_keys: int = 32
    sparse_max_keys: int = 256
    sparse_sink_keys: int = 4
    sparse_variance: str | None = None
    sparse_score_dtype: str | None = None
    indexer_num_heads: int = 4
    indexer_head_dim: int = 128
    indexer_kl_weight: float | None = None
    indexer_kl_stride: int = 1

    intermediate_size: int = 2048
    moe_intermediate_size: int = 1024
    num_experts: int = 0
    num_experts_per_tok: int = 2
    router_layout: str = "flat"
    router_scoring: str | None = None
    num_expert_groups: int = 0
    groups_per_token: int = 2
    members_per_group: int = 0
    num_null_experts: int | None = None
    null_renorm: bool | None = None
    null_rate: float = 0.5
    balance: str | None = None
    balance_speed: float = 1e-3
    balance_band: list[float] | None = None
    balance_gain: float = 50.0
    router_z_loss_weight: float = 0.0
    expert_quantization: dict | None = None

    stack: str | None = None
    stack_backend: str = "reversible"
    stack_output: str = "last"
    step_sizes: list[float] | None = None
    blends: list[float] | None = None
    default_blend: float | None = None
    frac_bits: int = 16
    b_res_init: float | None = None

    max_token_bytes: int = 32
    codec_bytes: str | None = None
    tokenizer_sha256: str | None = None
    rope_enabled: bool = True
    rope_theta: float = 100_000.0
    rope_source: str | None = None
    document_boundaries: bool = False
    memory_stream: bool = True
    num_nextn_predict_layers: int = 0
    mtp_loss_weight: float = 0.3
    mtp_aux: bool | None = None
    mtp_stack: str | None = None
    mtp_num_experts: int | None = None
    mtp_num_experts_per_tok: int | None = None

    rms_norm_eps: float = 1e-6
    logit_softcap: float = 15.0
    initializer_range: float = 0.02
    hidden_dropout: float = 0.0
    max_position_embeddings: int = 4096
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    delta_rule_backend: str = "auto"
    attention_backend: str = "auto"
    experts_backend: str = "auto"
    loss_backend: str = "auto"

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = [
                INDEXED_ATTENTION if (i + 1) % 4 == 0 else LINEAR_ATTENTION for i in range(self.num_hidden_layers)
            ]
        _one_of("mode", self.mode, ("default", "published"))
        defaults = {
            "codec_bytes": "raw_bytes",
            "rope_source": "config",
            "conv_mask_inputs": True,
            "sparse_variance": "valid_keys",
            "sparse_score_dtype": "float32",
            "indexer_kl_weight": 0.01,
            "router_scoring": "sigmoid",
            "balance": "sign",
            "num_null_experts": 0,
            "null_renorm": False,
            "stack": "midpoint",
            "default_blend": 1.0,
            "b_res_init": 4.0,
            "mtp_aux": True,
            "mtp_stack": "sequential",
        }
        if self.mode == "published":
            defaults |= PUBLISHED_SWITCHES
        if self.num_experts == 0:
            defaults["num_null_experts"] = 0
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.num_experts:  # the second-token layer routes over the parents of a grouped model
            grouped = self.router_layout == "grouped"
            if self.mtp_num_experts is None:
                self.mtp_num_experts = self.num_expert_groups if grouped else self.num_experts
            if self.mtp_num_experts_per_tok is None:
                self.mtp_num_experts_per_tok = self.groups_per_token if grouped else self.num_experts_per_tok
        if self.step_sizes is None:  # h_0 = 1/8 (a half step), h = 1/4
            self.step_sizes = [0.125] + [0.25] * (self.num_hidden_layers - 1)
        if self.blends is None:
            self.blends = [self.default_blend] * self.num_hidden_layers
        if self.balance_band is None:
            self.balance_band = [0.23, 1.84]
        super().__post_init__(**kwargs)
        self._check()

    @property
    def experts_per_group(self) -> int:
        """Members of one group of the grouped router (M)."""
        return self.num_experts // self.num_expert_groups

    @property
    def aux_loss_scale(self) -> float:
        """Coefficient of the summed auxiliary terms of the layers: 8 / L above 8 layers, else 1."""
        return 8 / self.num_hidden_layers if self.num_hidden_layers > 8 else 1.0

    def _check(self) -> None:
        """Refuses, with the field's name, whatever could not train or would fail later."""
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_streams", "linear_num_heads", "linear_head_dim",
            "num_attention_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "indexer_num_heads",
            "indexer_head_dim", "sinkhorn_iterations", "max_token_bytes", "sparse_key_budget", "sparse_min_keys",
            "indexer_kl_stride", "linear_conv_kernel_dim", "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"config.{name} = {getattr(self, name)}: must be at least 1")
        for name in (
            "num_experts", "num_null_experts", "sparse_sink_keys", "indexer_kl_weight", "router_z_loss_weight",
            "balance_speed", "mtp_loss_weight", "logit_softcap",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"config.{name} = {getattr(self, name)}: must not be negative")
        _one_of("stack", self.stack, ("midpoint", "sequential"))
        _one_of("stack_backend", self.stack_backend, ("reversible", "stored", "checkpointed"))
        _one_of("stack_output", self.stack_output, ("last", "mean_pair"))
        _one_of("router_layout", self.router_layout, ("flat", "grouped"))
        _one_of("router_scoring", self.router_scoring, ("sigmoid", "softmax"))
        _one_of("balance", self.balance, ("sign", "banded", "aux", "none"))
        _one_of("codec_bytes", self.codec_bytes, ("raw_bytes", "decoded_text"))
        _one_of("rope_source", self.rope_source, ("config", "checkpoint"))
        _one_of("sparse_variance", self.sparse_variance, ("valid_keys", "zero_filled"))
        _one_of("sparse_score_dtype", self.sparse_score_dtype, ("float32", "bfloat16"))
        _one_of("decay_init", self.decay_init, ("published", "slow"))
        _one_of("mtp_stack", self.mtp_stack, ("sequential", "midpoint"))
        _one_of("delta_rule_backend", self.delta_rule_backend, ("auto", "torch", "naive", "fla"))
        _one_of("attention_backend", self.attention_backend, ("auto", "torch", "naive"))
        _one_of("experts_backend", self.experts_backend, ("auto", "torch", "naive", "grouped_mm", "triton"))
        _one_of("loss_backend", self.loss_backend, ("auto", "torch", "naive", "liger"))
        if self.tie_word_embeddings:
            raise ValueError("config.tie_word_embeddings = True: the byte embedding has no table to tie to the head")
        for name, value in vars(self).items():  # also one that another model's config has
            if name.endswith(("dropout", "_pdrop")) and value:
                raise ValueError(
                    f"config.{name} = {value}: must be 0, a dropped unit could not be rebuilt in the backward pass of "
                    "the reversible stack"
                )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"config.layer_types has {len(self.layer_types)} entries, num_hidden_layers is {self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            _one_of("layer_types", kind, (LINEAR_ATTENTION, INDEXED_ATTENTION))
        for heads, dim in (("linear_num_heads", "linear_head_dim"), ("num_attention_heads", "head_dim")):
            if getattr(self, heads) * getattr(self, dim) != self.hidden_size:
                raise ValueError(
                    f"config.{heads} * config.{dim} = {getattr(self, heads)} * {getattr(self, dim)}: must equal "
                    f"hidden_size = {self.hidden_size}"
                )
            if getattr(self, dim) % 2:
                raise ValueError(f"config.{dim} = {getattr(self, dim)}: must be even for rotary embeddings")
        if self.sparse_min_keys > self.sparse_max_keys:
            raise ValueError(
                f"config.sparse_min_keys = {self.sparse_min_keys}: above sparse_max_keys = {self.sparse_max_keys}"
            )
        if self.num_nextn_predict_layers not in (0, 1):
            raise ValueError(f"config.num_nextn_predict_layers = {self.num_nextn_predict_layers}: must be 0 or 1")
        self._check_stack()
        if self.num_experts:
            self._check_experts()
        elif self.expert_quantization is not None:
            raise ValueError("config.expert_quantization is set, but num_experts = 0: a dense model has no experts")

    def _check_stack(self) -> None:
        for name in ("step_sizes", "blends"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                raise ValueError(
                    f"config.{name} has {len(getattr(self, name))} entries: must be num_hidden_layers = "
                    f"{self.num_hidden_layers}"
                )
        for n, (h, a) in enumerate(zip(self.step_sizes, self.blends, strict=True)):
            if not (math.isfinite(h) and h >= 0):
                raise ValueError(f"config.step_sizes[{n}] = {h}: must be finite and not negative")
            if a not in (0.5, 1.0):
                raise ValueError(f"config.blends[{n}] = {a}: must be 1 or 0.5, only these invert exactly")
            if self.stack == "midpoint" and n and h == 0 and a != 1:
                raise ValueError(
                    f"config.step_sizes[{n}] = 0 with blends[{n}] = {a}: a zero-step layer needs blend 1, with which a "
                    "pair of them is the identity"
                )
        if self.stack == "midpoint":
            n = 1
            while n < self.num_hidden_layers:
                run = n
                while run < self.num_hidden_layers and self.step_sizes[run] == 0:
                    run += 1
                if (run - n) % 2:
                    raise ValueError(
                        f"config.step_sizes: {run - n} zero-step layer(s) at {n}..{run - 1}; a run must have an even "
                        "length, an odd one swaps the state pair and changes the function"
                    )
                n = run + 1
        if not 8 <= self.frac_bits <= 24:
            raise ValueError(f"config.frac_bits = {self.frac_bits}: must be between 8 and 24")

    def _check_experts(self) -> None:
        if not 2 <= self.num_experts_per_tok <= self.num_experts + self.num_null_experts:
            raise ValueError(
                f"config.num_experts_per_tok = {self.num_experts_per_tok}: must be at least 2 (a single pick has "
                f"weight 1 and trains no router) and at most the {self.num_experts + self.num_null_experts} experts"
            )
        if self.num_nextn_predict_layers and not (
            2 <= self.mtp_num_experts_per_tok <= self.mtp_num_experts + self.num_null_experts
        ):
            raise ValueError(
                f"config.mtp_num_experts_per_tok = {self.mtp_num_experts_per_tok}: must be at least 2 and at most the "
                f"{self.mtp_num_experts + self.num_null_experts} experts of the second-token layer"
            )
        if not 0 < self.balance_band[0] < 1 < self.balance_band[1]:
            raise ValueError(
                f"config.balance_band = {self.balance_band}: needs 0 < lo < 1 < hi (multiples of the uniform load 1/E)"
            )
        if self.router_layout == "grouped" and self.router_scoring != "sigmoid":
            raise ValueError(
                f"config.router_scoring = {self.router_scoring!r}: router_layout = 'grouped' needs 'sigmoid'"
            )
        if self.balance != "none" and (self.router_scoring == "softmax") != (self.balance == "aux"):
            raise ValueError(
                f"config.balance = {self.balance!r} with router_scoring = {self.router_scoring!r}: "
                "'softmax' goes with 'aux' or 'none' (its bias is trained), 'sigmoid' with 'sign', 'banded' or 'none'"
            )
        if self.router_layout == "grouped":
            if self.num_expert_groups < 1 or self.num_experts % self.num_expert_groups:
                raise ValueError(
                    f"config.num_expert_groups = {self.num_expert_groups}: must divide the {self.num_experts} experts"
                )
            if self.groups_per_token * self.members_per_group != self.num_experts_per_tok:
                raise ValueError(
                    f"config.groups_per_token * members_per_group = {self.groups_per_token} * {self.members_per_group}"
                    f": must equal num_experts_per_tok = {self.num_experts_per_tok}"
                )
            for name, limit in (
                ("groups_per_token", self.num_expert_groups),
                ("members_per_group", self.experts_per_group),
            ):
                if not 2 <= getattr(self, name) <= limit:
                    raise ValueError(f"config.{name} = {getattr(self, name)}: must be between 2 and {limit}")
            if self.num_null_experts:
                raise ValueError("config.num_null_experts: null slots need router_layout = 'flat'")
        if self.experts_backend == "triton" and (self.expert_quantization or {}).get("kind") not in ("int8", "int4"):
            raise ValueError("config.experts_backend = 'triton': needs expert_quantization of kind 'int8' or 'int4'")
        if self.expert_quantization is not None:
            given, needed = set(self.expert_quantization), {"kind", "group_size", "rank", "seed"}
            if given != needed:
                raise ValueError(f"config.expert_quantization has keys {sorted(given)}: needs {sorted(needed)}")
            kind, group, rank = (self.expert_quantization[k] for k in ("kind", "group_size", "rank"))
            _one_of("expert_quantization.kind", kind, ("int8", "int4", "codebook"))
            narrow = min(self.hidden_size, self.moe_intermediate_size)
            if kind != "codebook" and (self.hidden_size % group or self.moe_intermediate_size % group):
                raise ValueError(
                    f"config.expert_quantization.group_size = {group}: must divide hidden_size = {self.hidden_size} "
                    f"and moe_intermediate_size = {self.moe_intermediate_size}"
                )
            if not 1 <= rank <= narrow:
                raise ValueError(f"config.expert_quantization.rank = {rank}: must be between 1 and {narrow}")


def _one_of(field: str, value, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"config.{field} = {value!r}: must be one of {', '.join(map(repr, allowed))}")


__all__ = ["LightningLMConfig"]
