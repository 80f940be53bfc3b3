"""
The published layout: every key of a configuration, the tensors of ours that it holds, and how it holds them.

The table follows from the model, built on the meta device, so it cannot forget a tensor that the model has. Its keys
are the canonical ones; a published state dict holds most tensors again under other names (`canonical_key`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import torch

from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.model_tensors import ModelTensor, model_tensors
from lightninglm.modeling.configuration_lightninglm import INDEXED_ATTENTION, LightningLMConfig
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM


class Form(Enum):
    """How a published tensor holds ours (see `conversion`)."""

    PLAIN = auto()
    TRANSPOSED = auto()
    """Experts as [E, in, out] where ours are [out, in] each."""
    CODES = auto()
    """Codes 0..255 in int8, those above 127 wrapped to negative numbers."""
    ROTATION = auto()
    """R = H diag(s) / sqrt(in), dense, where ours is s."""
    ADAPTER = auto()
    """The adapter B for rotated inputs where ours is B R."""
    BASE = auto()
    """A dense base in rotated space, with adapters beside it; ours is the dense weight of base and adapters."""
    KEPT = auto()
    """Ours holds nothing of it."""


# What a name of ours ends with -> what the published key ends with. Every leaf is spelled out: a tensor that is new in
# the model has no key until somebody writes one here.
_GLOBAL = (
    (r"model\.embed_tokens\.proj\.weight", r"pf_to_model.weight", Form.PLAIN),
    (r"model\.embed_tokens\.norm\.weight", r"embed_norm.weight", Form.PLAIN),
    (r"model\.memory\.scale", r"lambda_r_raw", Form.PLAIN),
    (r"model\.memory\.norm\.(weight|bias)", r"memory_ln.\1", Form.PLAIN),
    (r"model\.memory\.gate\.(weight|bias)", r"memory_gate_proj.\1", Form.PLAIN),
    (r"model\.(norm\.weight)", r"\1", Form.PLAIN),
    (r"(lm_head\.weight)", r"\1", Form.PLAIN),
    (r"mtp\.(fusion_proj\.weight)", r"mtp_block.\1", Form.PLAIN),
)
_CONNECTION = (
    (r"(norm\.weight)", r"\1", Form.PLAIN),
    (r"stream_norm\.weight", r"coeffs.rms.weight", Form.PLAIN),
    (r"(phi_(?:pre|post|res)\.weight|(?:b|alpha)_(?:pre|post|res))", r"coeffs.\1", Form.PLAIN),
)
_DELTANET = (
    (r"([qkvgo]_proj\.weight|(?:b|gk)_proj\.(?:weight|bias)|A_log|D|dt_bias)", r"\1", Form.PLAIN),
    (r"([qkv]_conv1d)\.(weight|bias)", r"\1.conv.\2", Form.PLAIN),
    (r"o_norm\.weight", r"o_norm.norm.weight", Form.PLAIN),
)
_SPARSE_ATTENTION = (
    (r"(q|k|v|gv|go)_proj\.weight", r"W_\1.weight", Form.PLAIN),
    (r"(o_proj\.weight|variance_ema)", r"\1", Form.PLAIN),
    (r"indexer\.([qkw])_proj\.weight", r"W_I\1.weight", Form.PLAIN),
    (r"indexer\.(gate_bias)", r"\1", Form.PLAIN),
)
_DENSE = ((r"((?:gate|up|down)_proj\.weight)", r"mlp.mlp.\1", Form.PLAIN),)
_DENSE_FUSED = (
    (r"(?:gate|up)_proj\.weight", r"mlp.mlp.gate_up_proj.weight", Form.PLAIN),
    (r"(down_proj\.weight)", r"mlp.mlp.\1", Form.PLAIN),
)
_MIXTURE = (
    (r"shared_expert\.(gate|up|down)_proj\.weight", r"moe.shared_\1.weight", Form.PLAIN),
    (r"router\.(weight)", r"moe.gate.gate.\1", Form.PLAIN),
    (r"router\.(logit_bias|null_logit)", r"moe.gate.\1", Form.PLAIN),
    (r"experts\.(gate|up|down)_proj\.codes", r"moe.tq_\1.weight_indices", Form.CODES),
    (r"experts\.(gate|up|down)_proj\.scales", r"moe.tq_\1.row_norms", Form.PLAIN),
    (r"experts\.(gate|up|down)_proj\.A", r"moe.tq_\1.tqp_A", Form.PLAIN),
    (r"experts\.(gate|up|down)_proj\.B", r"moe.tq_\1.tqp_B", Form.ADAPTER),
    (r"experts\.hidden_signs", r"moe.tq_gate.rotation_matrix", Form.ROTATION),
    (r"experts\.up_signs", r"moe.tq_up.rotation_matrix", Form.ROTATION),
    (r"experts\.intermediate_signs", r"moe.tq_down.rotation_matrix", Form.ROTATION),
    (r"experts\.hidden_levels", r"moe.tq_gate.weight_codebook", Form.PLAIN),
    (r"experts\.hidden_levels", r"moe.tq_up.weight_codebook", Form.PLAIN),
    (r"experts\.intermediate_levels", r"moe.tq_down.weight_codebook", Form.PLAIN),
)
_DENSE_EXPERTS = (r"experts\.(gate|up|down)_proj\.weight", r"moe.W_\1", Form.TRANSPOSED)
_BASE_EXPERTS = (r"experts\.(gate|up|down)_proj\.weight", r"moe.tq_\1.base_weight", Form.BASE)

OURS_ALONE = re.compile(r"model\.(step_size|blend)|.*\.router\.(usage_ema|null_bias)")
"""Tensors without a published key. An import gives them their initial values, an export leaves them out."""

_LAYER = re.compile(r"(?:model\.layers\.(\d+)|mtp\.layer)\.(mixer_connection|mixer|mlp_connection|mlp)\.(.+)")
_ADAPTERS = re.compile(r".*\.experts\.(gate|up|down)_proj\.[AB]")
_QUANTIZED = ("tq_gate", "tq_up", "tq_down")


@dataclass(frozen=True)
class Variant:
    """
    What two published checkpoints of one configuration may have different.

    Attributes:
        quantized_names: the modules `tq_gate`, `tq_up` and `tq_down` -> their names, with or without `_weights`.
        fused: the dense feed-forward holds gate and up in one `gate_up_proj`, gate first.
        base_rank: the routed experts are a dense base in rotated space with adapters of this rank. None: they are not.
    """

    quantized_names: Mapping[str, str] = field(default_factory=lambda: {name: f"{name}_weights" for name in _QUANTIZED})
    fused: bool = False
    base_rank: int | None = None

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> "Variant":
        """The variant that a checkpoint with these keys is."""
        spelled = {
            name: name if any(f".{name}." in key for key in shapes) else f"{name}_weights" for name in _QUANTIZED
        }
        fused = any(key.endswith(".gate_up_proj.weight") for key in shapes)
        has_base = any(key.endswith(".base_weight") for key in shapes)
        ranks = [shape[-1] for key, shape in shapes.items() if key.endswith(".tqp_A") and shape]
        return cls(spelled, fused, ranks[0] if has_base and ranks else None)

    def spell(self, key: str) -> str:
        """The key with this variant's names of the quantized modules."""
        return re.sub(r"\.(tq_(?:gate|up|down))\.", lambda match: f".{self.quantized_names[match[1]]}.", key)


@dataclass(frozen=True)
class Entry:
    """
    One published key.

    Attributes:
        key, shape: as published.
        form: how it holds ours.
        names: our tensors on disk that it holds, in order: one per expert, or one, or gate and up; none if kept.
        disk_shape: of each of them.
        in_fp32: our checkpoints hold them in fp32, whatever the dtype of the model.
        per_expert: the first dimension counts experts, of which the files of expert-parallel ranks hold blocks.
    """

    key: str
    shape: tuple[int, ...]
    form: Form = Form.PLAIN
    names: tuple[str, ...] = ()
    disk_shape: tuple[int, ...] = ()
    in_fp32: bool = False
    per_expert: bool = False

    @property
    def kept(self) -> bool:
        """Whether ours cannot give it back bit for bit, so that an import keeps the original."""
        return self.form in (Form.ADAPTER, Form.BASE, Form.KEPT)

    @property
    def rotation(self) -> str | None:
        """Key of the rotation that the conversion needs."""
        return self.sibling("rotation_matrix") if self.form in (Form.ADAPTER, Form.BASE) else None

    def sibling(self, leaf: str) -> str:
        """The key `leaf` of the same published module."""
        return f"{self.key.rpartition('.')[0]}.{leaf}"


def published_table(config: LightningLMConfig, variant: Variant) -> tuple[dict[str, Entry], list[ModelTensor]]:
    """
    Every canonical key of a configuration, in the order of the model's tensors, and our tensors that have none.

    Raises CheckpointError when the published layout cannot hold such a model.
    """
    quantization = config.expert_quantization
    if quantization is not None and quantization["kind"] != "codebook":
        raise CheckpointError(
            f"config.expert_quantization.kind = {quantization['kind']!r}: the published layout has codes of 'codebook' "
            "only; `launch/export.py merge` makes dense experts of any"
        )
    with torch.device("meta"):
        model = LightningLMForCausalLM(config)
    items = model_tensors(model)
    table: dict[str, Entry] = {}
    ours_alone, unknown = [], []
    for item in items:
        entries = list(_entries(item, model, variant))
        for entry in entries:
            before = table.get(entry.key)
            table[entry.key] = entry if before is None else _joined(before, entry)
        if OURS_ALONE.fullmatch(item.name):
            ours_alone.append(item)
        elif not entries and not item.name.startswith("model.rotary."):
            unknown.append(item.name)
    if unknown:
        raise CheckpointError(
            f"the published layout has no key for {', '.join(unknown)} (router_layout = {config.router_layout!r}, "
            f"router_scoring = {config.router_scoring!r})"
        )
    names = {item.name for item in items}
    return table | {entry.key: entry for entry in _entries_beside(config, variant, names)}, ours_alone


def _entries(item: ModelTensor, model: LightningLMForCausalLM, variant: Variant) -> Iterator[Entry]:
    """The keys that hold one tensor of the model."""
    config = model.config
    prefix, rules, leaf = "", _GLOBAL, item.name
    if match := _LAYER.fullmatch(item.name):
        layer, part, leaf = match.groups()
        prefix, rules = _prefixes(layer, config)[part], _rules(part, layer, config, variant)
    kept_in_fp32 = "|".join([*model._keep_in_fp32_modules_strict, _ADAPTERS.pattern])
    in_fp32 = not isinstance(item.tensor, torch.nn.Parameter) or re.search(kept_in_fp32, item.name) is not None
    for pattern, replacement, form in rules:
        if match := re.fullmatch(pattern, leaf):
            shape = item.disk_shape
            if form is Form.TRANSPOSED:
                shape = shape[::-1]
            elif form is Form.ROTATION:
                shape = (*shape, *shape)
            elif leaf == "router.null_logit" and config.num_null_experts == 0:
                shape = (1,)
            per_expert = item.experts is not None
            names = tuple(item.all_disk_names)
            yield Entry(
                variant.spell(prefix + match.expand(replacement)),
                (len(names), *shape) if per_expert else shape,
                form,
                names,
                item.disk_shape,
                in_fp32,
                per_expert,
            )


def _entries_beside(config: LightningLMConfig, variant: Variant, names: set[str]) -> Iterator[Entry]:
    """The keys that are not a tensor of the model: one table of frequencies serves all layers, and what is kept."""
    for layer, kind in _layers(config):
        prefixes = _prefixes(layer, config)
        head_dim = config.head_dim if kind == INDEXED_ATTENTION else config.linear_head_dim
        frequencies = Entry(f"{prefixes['mixer']}rotary_emb.inv_freq", (head_dim // 2,), Form.KEPT)
        if (name := f"model.rotary.inv_freq_{head_dim}") in names:
            frequencies = replace(
                frequencies, form=Form.PLAIN, names=(name,), disk_shape=frequencies.shape, in_fp32=True
            )
        yield frequencies
        if kind == INDEXED_ATTENTION:
            yield Entry(prefixes["mixer"] + "_variance_ema_snapshot", (), Form.KEPT)
        ours = "mtp.layer" if layer is None else f"model.layers.{layer}"
        if config.num_experts and f"{ours}.mlp.router.null_logit" not in names:  # published without null slots, too
            yield Entry(f"{prefixes['mlp']}moe.gate.null_logit", (1,), Form.KEPT)
        if variant.base_rank is not None:
            experts = config.mtp_num_experts if layer is None else config.num_experts
            for module in _QUANTIZED:
                sizes = (config.hidden_size, config.moe_intermediate_size)
                outputs, inputs = sizes if module == "tq_down" else sizes[::-1]
                stem = variant.spell(f"{prefixes['mlp']}moe.{module}.")
                yield Entry(f"{stem}rotation_matrix", (inputs, inputs), Form.KEPT)
                yield Entry(f"{stem}tqp_A", (experts, outputs, variant.base_rank), Form.KEPT, per_expert=True)
                yield Entry(f"{stem}tqp_B", (experts, variant.base_rank, inputs), Form.KEPT, per_expert=True)


def _joined(first: Entry, second: Entry) -> Entry:
    """The key that holds the tensors of both, one below the other."""
    return replace(first, names=first.names + second.names, shape=(first.shape[0] + second.shape[0], *first.shape[1:]))


def _layers(config: LightningLMConfig) -> list[tuple[str | None, str]]:
    """(number, kind of mixer) of every layer; None is the second-token layer."""
    layers: list[tuple[str | None, str]] = [(str(i), kind) for i, kind in enumerate(config.layer_types)]
    return layers + [(None, INDEXED_ATTENTION)] * config.num_nextn_predict_layers


def _prefixes(layer: str | None, config: LightningLMConfig) -> dict[str, str]:
    """Part of a layer of ours -> what its published keys begin with."""
    if layer is not None:
        attention, feed_forward = f"layers.{layer}.attn_block.", f"layers.{layer}.mlp_block."
        mixer, mlp = f"{attention}sublayer.", f"{feed_forward}sublayer."
    else:
        attention, feed_forward = "mtp_block.attn_block.", "mtp_block.mlp_block."
        if config.num_experts:
            attention, feed_forward = (f"mtp_block.reversible_stack.blocks.{i}.block." for i in (0, 1))
        mixer, mlp = "mtp_block.attn.", "mtp_block.mlp."
    return {"mixer_connection": attention, "mixer": mixer, "mlp_connection": feed_forward, "mlp": mlp}


def _rules(part: str, layer: str | None, config: LightningLMConfig, variant: Variant) -> tuple:
    if part == "mixer":
        indexed = layer is None or config.layer_types[int(layer)] == INDEXED_ATTENTION
        return _SPARSE_ATTENTION if indexed else _DELTANET
    if part != "mlp":
        return _CONNECTION
    if config.num_experts == 0:
        return _DENSE_FUSED if variant.fused else _DENSE
    return (*_MIXTURE, _DENSE_EXPERTS if variant.base_rank is None else _BASE_EXPERTS)


# An alias begins with one of these; the same tensor lies under the canonical key that begins with the replacement.
_STACK_ALIASES = (
    (r"stack\.blocks\.(\d+)\.", lambda match: f"layers.{match[1]}."),
    (r"stack\.bootstrap_layer\.", lambda match: "layers.0."),
    (r"stack\.mid_layers\.(\d+)\.(?:block|wrapper\.layer)\.", lambda match: f"layers.{int(match[1]) + 1}."),
)
_SECOND_TOKEN_ALIASES = (
    (r"mtp_block\.reversible_stack\.bootstrap_layer\.block\.", "mtp_block.reversible_stack.blocks.0.block."),
    (
        r"mtp_block\.reversible_stack\.mid_layers\.0\.(?:block|wrapper\.layer)\.block\.",
        "mtp_block.reversible_stack.blocks.1.block.",
    ),
)
_SUBLAYER_ALIASES = (
    (r"mtp_block\.(?:reversible_stack\.blocks\.0\.block|attn_block)\.sublayer\.", "mtp_block.attn."),
    (r"mtp_block\.(?:reversible_stack\.blocks\.1\.block|mlp_block)\.sublayer\.", "mtp_block.mlp."),
)


def canonical_key(key: str) -> str:
    """The canonical key of the tensor that a published state dict holds under `key`: `key` itself if it is no alias."""
    for aliases in (_STACK_ALIASES, _SECOND_TOKEN_ALIASES, _SUBLAYER_ALIASES):
        for pattern, replacement in aliases:
            if match := re.match(pattern, key):
                key = (replacement(match) if callable(replacement) else replacement) + key[match.end() :]
                break
    return key


def alias_keys(key: str, config: LightningLMConfig) -> list[str]:
    """The aliases of a canonical key in a published state dict of this configuration."""
    if config.num_experts == 0:
        pairs = {
            "mtp_block.attn.": ["mtp_block.attn_block.sublayer."],
            "mtp_block.mlp.": ["mtp_block.mlp_block.sublayer."],
        }
    else:
        stack = "mtp_block.reversible_stack."
        attention = [f"{stack}blocks.0.block.", f"{stack}bootstrap_layer.block."]
        feed_forward = [
            f"{stack}blocks.1.block.",
            f"{stack}mid_layers.0.block.block.",
            f"{stack}mid_layers.0.wrapper.layer.block.",
        ]
        pairs = {
            "mtp_block.attn.": [f"{prefix}sublayer." for prefix in attention],
            "mtp_block.mlp.": [f"{prefix}sublayer." for prefix in feed_forward],
            attention[0]: attention[1:],
            feed_forward[0]: feed_forward[1:],
        }
        for i in range(config.num_hidden_layers):
            middle = [f"stack.mid_layers.{i - 1}.{part}." for part in ("block", "wrapper.layer")]
            pairs[f"layers.{i}."] = [f"stack.blocks.{i}.", *(middle if i else ["stack.bootstrap_layer."])]
    for prefix, aliases in pairs.items():
        if key.startswith(prefix):
            return [alias + key.removeprefix(prefix) for alias in aliases]
    return []
