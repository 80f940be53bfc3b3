"""The LightningLM model: byte embedding, memory, streams through the reversible stack, head; as HuggingFace classes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.utils import ModelOutput, cached_file, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from .byte_embedding import ByteEmbedding, token_bytes
from .cache import LightningLMCache
from .configuration_lightninglm import LightningLMConfig
from .decoder_layer import DecoderLayer
from .documents import document_starts, fill_padding
from .initialization import initialize_model
from .layer_context import LayerContext
from .losses import IGNORED, linear_cross_entropy, softcap_logits
from .memory_stream import MemoryStream, continued_document, last_real_token
from .multi_token_prediction import MultiTokenPrediction, split_streams
from .norms import RMSNorm
from .reversible import ReversibilityReport, checkpointed_layer, reversible_stack, sequential_stack
from .rotary import RotaryEmbedding
from .router import FlatRouter, Router

logger = logging.get_logger(__name__)

# A folder holds one tensor per expert; in memory the experts of a layer are stacked.
register_checkpoint_conversion_mapping(
    "lightninglm",
    [
        WeightConverter(f".experts.*.{stack}.{part}", f".experts.{stack}.{part}", [MergeModulelist(dim=0)])
        for stack in ("gate_proj", "up_proj", "down_proj")
        for part in ("weight", "codes", "scales", "A", "B")
    ],
    overwrite=True,
)


@dataclass
class LightningLMModelOutput(ModelOutput):
    """
    What `LightningLMModel` computes.

    Attributes:
        last_hidden_state: [B, T, H] after the final norm.
        cache: the decoding cache, None unless `use_cache`.
        aux_loss: fp32 scalar, the auxiliary losses summed over the layers.
        memory: [B, H], detached; the `prev_memory` of the next chunk of the same sequence.
        embeddings: [B, T, H], the embedded tokens without memory.
        context: what the layers saw (masks, positions, rotary tables).
    """

    last_hidden_state: torch.Tensor | None = None
    cache: LightningLMCache | None = None
    aux_loss: torch.Tensor | None = None
    memory: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None
    context: LayerContext | None = None


@dataclass
class LightningLMCausalLMOutput(ModelOutput):
    """
    What `LightningLMForCausalLM` computes. Losses are fp32 scalars, there when labels were given.

    Attributes:
        loss: next_token_loss + mtp_loss_weight * second_token_loss + aux_loss, each normalized as `forward` says.
        logits: [B, T or fewer, V] fp32, soft-capped; None in training when labels were given.
        cache: the decoding cache.
        next_token_loss, second_token_loss: cross-entropies of tokens t + 1 and t + 2 (the latter with its head only).
        aux_loss: the scaled auxiliary losses (router, indexer) as they enter `loss`.
        memory: [B, H], detached; the `prev_memory` of the next chunk of the same sequence.
        mtp_logits: [B, T, V] fp32 for token t + 2, when asked for.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: LightningLMCache | None = None
    next_token_loss: torch.Tensor | None = None
    second_token_loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    memory: torch.Tensor | None = None
    mtp_logits: torch.Tensor | None = None


class LightningLMPreTrainedModel(PreTrainedModel):
    """What the model with and without head share: initialization, loading, and the controls of the trainer."""

    config_class = LightningLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["DecoderLayer"]
    _skip_keys_device_placement: ClassVar = ["cache"]
    _keep_in_fp32_modules_strict: ClassVar = [
        r"\.router\.",
        r"\.b_(pre|post|res)$",
        r"\.alpha_(pre|post|res)$",
        r"\.mixer\.(A_log|dt_bias|D)$",
    ]
    _is_stateful = True  # a recurrent state cannot be rolled back: no assisted generation

    def _apply(self, fn, recurse=True):
        """Moves the model; a cast leaves buffers (statistics, scales, step sizes) and fp32 parameters as they are."""
        kept = {id(buffer) for buffer in self.buffers()}
        in_fp32 = re.compile("|".join(self._keep_in_fp32_modules_strict))
        for name, parameter in self.named_parameters():
            if in_fp32.search(name):
                kept |= {id(parameter), id(parameter.grad)}

        def moved(tensor):
            new = fn(tensor)
            return new if new.dtype == tensor.dtype or id(tensor) not in kept else tensor.to(new.device)

        return super()._apply(moved, recurse)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Gives values to whatever was neither loaded nor initialized before, from torch's global generator."""
        initialize_model(self, seed=int(torch.randint(2**62, ())), only_missing=True)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers; the byte table comes from the `tokenizer.json` beside the weights, if there is one."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():  # loading makes every parameter trainable
            if isinstance(module, FlatRouter):
                module.freeze_inert_null_logit()
        names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        where = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        tokenizer = cached_file(
            pretrained_model_name_or_path, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **where
        )
        if tokenizer is not None:
            model.set_token_bytes(token_bytes(tokenizer))
        return loaded

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers; refuses a model that holds only a rank's share of the experts."""
        for name, module in self.named_modules():
            if hasattr(module, "expert_start") and module.num_local_experts != module.num_experts:
                raise ValueError(
                    f"{name} holds {module.expert_count} of {module.num_experts} experts: under expert parallelism use "
                    "lightninglm.distributed.checkpointing, its folders load with from_pretrained"
                )
        super().save_pretrained(save_directory, *args, **kwargs)

    def set_token_bytes(self, tokens: Sequence[bytes]) -> None:
        """
        Tells the embedding what bytes every token id stands for.

        Raises:
            ValueError: not `vocab_size` tokens, another tokenizer than the model's, or bytes that do not fit the codec.
        """
        self.base_model.embed_tokens.set_tokens(list(tokens))

    def load_token_bytes(self, folder: str | Path) -> None:
        """`set_token_bytes` with the byte-level BPE tokenizer of `folder/tokenizer.json`."""
        self.set_token_bytes(token_bytes(Path(folder) / "tokenizer.json"))

    @property
    def step_sizes(self) -> list[float]:
        """Step size h_n of every layer; the device is read only after a change."""
        return self.base_model.stack_coefficients()[0]

    def set_step_size(self, step_sizes: Sequence[float]) -> None:
        """Sets h_n of every layer, in the buffer and in the config. To be called between optimizer steps only."""
        model = self.base_model
        if len(step_sizes) != len(model.layers):
            raise ValueError(f"{len(step_sizes)} step sizes for {len(model.layers)} layers")
        model.step_size.copy_(torch.tensor(step_sizes, dtype=torch.float32))
        self.config.step_sizes = [float(h) for h in step_sizes]

    @torch.no_grad()
    def after_optimizer_step(
        self, reduce: Callable[[torch.Tensor], None] | None = None, update: bool = True
    ) -> list[torch.Tensor]:
        """
        What happens once per optimizer step, outside the graph: routers balance, indexers update their variance.

        Args:
            reduce: sums a flat fp64 tensor over all ranks, in place; called once. None: one process.
            update: False after a skipped step: the statistics are dropped, nothing moves.
        Returns:
            Per router, the picks [E] int64 of every expert in this step.
        """
        modules = [module for module in self.modules() if hasattr(module, "statistics")]
        statistics = [tensor for module in modules for tensor in module.statistics()]
        if statistics and update and reduce is not None:
            flat = torch.cat([tensor.double().flatten() for tensor in statistics])
            reduce(flat)
            for tensor, total in zip(statistics, flat.split([t.numel() for t in statistics]), strict=True):
                tensor.copy_(total.view_as(tensor))
        picks = [module.pick_counts[: module.num_experts].clone() for module in modules if isinstance(module, Router)]
        for module in modules:
            module.after_optimizer_step(update)
        return picks

    def get_input_embeddings(self) -> nn.Module:
        """The byte embedding (it has no table of vocabulary size)."""
        return self.base_model.embed_tokens

    def resize_token_embeddings(self, *args, **kwargs):
        """Not possible: raises NotImplementedError."""
        raise NotImplementedError(
            "the byte embedding follows from the tokenizer's bytes and the head from config.vocab_size; a model with "
            "other tokens is built from a config with another vocab_size"
        )


class LightningLMModel(LightningLMPreTrainedModel):
    """
    Tokens to hidden states.

    Attributes:
        reversibility: a `ReversibilityReport`, filled in by every pass through the stack.
        selection_noise: for the next training forward, a `SelectionNoise` or None; set by the trainer.
    """

    def __init__(self, config: LightningLMConfig):
        super().__init__(config)
        self.gradient_checkpointing = False
        self.embed_tokens = ByteEmbedding(config)
        self.memory = MemoryStream(config) if config.memory_stream else None
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("step_size", torch.tensor(config.step_sizes, dtype=torch.float32))
        self.register_buffer("blend", torch.tensor(config.blends, dtype=torch.float32))
        self._coefficients = None
        self.reversibility = ReversibilityReport()
        self.selection_noise = None
        self.post_init()

    def stack_coefficients(self) -> tuple[list[float], list[float]]:
        """(step sizes, blends) as numbers, read again whenever one of the two buffers was replaced or written to."""
        buffers = (self.step_size, self.blend)
        versions = [buffer._version for buffer in buffers]
        if self._coefficients is None or not (
            all(known is buffer for known, buffer in zip(self._coefficients[0], buffers, strict=True))
            and self._coefficients[1] == versions
        ):
            self._coefficients = (buffers, versions, tuple(buffer.tolist() for buffer in buffers))
        return self._coefficients[2]

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cache: LightningLMCache | None = None,
        use_cache: bool | None = None,
        prev_memory: torch.Tensor | None = None,
        **kwargs,
    ) -> LightningLMModelOutput:
        """
        Args:
            input_ids: [B, T] int64; with a cache, the new tokens only.
            attention_mask: [B, T] bool or integer, non-zero = real token; with a cache also [B, past + T].
            position_ids: [B, T]; by default real tokens are counted from 0, in each document if there are several.
            document_ids: [B, T] int64, equal inside a document (`config.document_boundaries` only). By default
                documents start where `position_ids` are 0, or behind every end-of-sequence token.
            cu_seqlens: [documents + 1], first token of each document in the flattened batch, instead of document_ids.
            cache: of the tokens so far; `use_cache` without one starts a new one.
            prev_memory: [B, H], `memory` of the previous chunk of the same sequence.
        """
        _refuse(kwargs)
        embeddings = self.embed_tokens(input_ids)
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = LightningLMCache(self.config)
        elif not use_cache:
            cache = None
        ctx = self._context(input_ids, attention_mask, position_ids, document_ids, cu_seqlens, cache)
        x = embeddings
        if prev_memory is not None:
            x = self._inject(x, prev_memory, ctx)

        streams, aux = self._run_stack(split_streams(x, self.config.num_streams), ctx)
        hidden = self.norm(streams.mean(2)).to(embeddings.dtype)
        memory = last_real_token(hidden, ctx.keep_mask)
        if cache is not None:
            cache.memory = memory
        return LightningLMModelOutput(
            last_hidden_state=hidden, cache=cache, aux_loss=aux, memory=memory, embeddings=embeddings, context=ctx
        )

    def _run_stack(self, streams: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        config, layers = self.config, self.layers
        if config.stack == "sequential":
            if self.gradient_checkpointing and self.training:
                layers = [lambda p, ctx, layer=layer: checkpointed_layer(layer, p, ctx) for layer in layers]
            return sequential_stack(layers, streams, ctx)
        checkpointed = self.gradient_checkpointing and config.stack_backend == "stored"  # "reversible" keeps less still
        return reversible_stack(
            layers,
            streams,
            ctx,
            *self.stack_coefficients(),
            frac_bits=config.frac_bits,
            backend="checkpointed" if checkpointed else config.stack_backend,
            output=config.stack_output,
            report=self.reversibility,
        )

    def _context(self, input_ids, attention_mask, position_ids, document_ids, cu_seqlens, cache) -> LayerContext:
        """Masks, documents and positions of the new tokens; registers the tokens with the cache."""
        (rows, length), past = input_ids.shape, 0 if cache is None else cache.get_seq_length()
        if past + length > self.config.max_position_embeddings:
            logger.warning_once(
                f"{past + length} tokens exceed config.max_position_embeddings = "
                f"{self.config.max_position_embeddings}: the model was not trained at this length"
            )
        keep = _keep_mask(attention_mask, input_ids, past)
        if self.config.document_boundaries:
            document_ids = self._documents(input_ids, keep, position_ids, document_ids, cu_seqlens, cache)
        elif document_ids is not None or cu_seqlens is not None:
            raise ValueError("document_ids and cu_seqlens need config.document_boundaries = True")
        all_keep, all_documents = keep, document_ids
        if cache is not None:
            cache.extend(input_ids.new_ones(rows, length, dtype=torch.bool) if keep is None else keep, document_ids)
            all_keep, all_documents = cache.keep_mask, cache.document_ids
            keep = all_keep[:, past:]
        if position_ids is None:
            if all_keep is None:
                all_keep = input_ids.new_ones(rows, length, dtype=torch.bool)
            position_ids = token_positions(all_keep, all_documents)[:, past:]
        position_ids = position_ids.expand(rows, length)
        return LayerContext(
            position_ids=position_ids,
            keep_mask=keep,
            document_ids=document_ids,
            rotary=self.rotary.forward(position_ids),  # ZeRO-3's module hooks take no integer keys
            cache=cache,
            record_statistics=self.training and torch.is_grad_enabled(),
            selection_noise=self.selection_noise if self.training else None,
        )

    def _documents(self, input_ids, keep, position_ids, document_ids, cu_seqlens, cache) -> torch.Tensor:
        """[B, T] document numbers from what was given, see `forward`."""
        if document_ids is not None:
            return document_ids
        if cu_seqlens is not None:
            tokens = torch.arange(input_ids.numel(), device=input_ids.device)
            return torch.bucketize(tokens, cu_seqlens[1:].to(tokens), right=True).view_as(input_ids)
        if position_ids is not None:
            starts = position_ids.expand_as(input_ids) == 0
            starts = starts if keep is None else starts & keep
            if cache is not None and cache.document_ids is not None:
                return cache.document_ids[:, -1:] + starts.cumsum(1)
            return (starts.cumsum(1) - 1).clamp(min=0)
        if self.config.eos_token_id is None:
            raise ValueError(
                "config.document_boundaries = True needs document_ids, cu_seqlens, position_ids that restart at 0, or "
                "config.eos_token_id"
            )
        if cache is not None and cache.document_ids is not None:
            raise ValueError(
                "with config.document_boundaries and a cache, give position_ids or document_ids: whether the last "
                "cached token ended its document is not known"
            )
        eos = torch.as_tensor(self.config.eos_token_id, device=input_ids.device)
        ends = torch.isin(input_ids, eos)
        ends = ends if keep is None else ends & keep
        return ends.cumsum(1) - ends.long()

    def _inject(self, x: torch.Tensor, prev_memory: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        if self.memory is None:
            raise ValueError("prev_memory needs config.memory_stream = True")
        reached = None
        if ctx.cache is not None and ctx.document_ids is not None:
            reached = continued_document(ctx.cache.document_ids, ctx.cache.keep_mask)[:, -x.shape[1] :]
        elif ctx.document_ids is not None:
            reached = continued_document(ctx.document_ids, ctx.keep_mask)
        return self.memory(x, prev_memory, reached).to(x.dtype)


class LightningLMForCausalLM(LightningLMPreTrainedModel, GenerationMixin):
    """The model with its head, and with the second-token layer when `config.num_nextn_predict_layers` is 1."""

    accepts_loss_kwargs = True  # transformers.Trainer passes num_items_in_batch

    def __init__(self, config: LightningLMConfig):
        super().__init__(config)
        self.model = LightningLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MultiTokenPrediction(config) if config.num_nextn_predict_layers else None
        self.post_init()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cache: LightningLMCache | None = None,
        use_cache: bool | None = None,
        prev_memory: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        num_second_items_in_batch: int | torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_logits: bool | None = None,
        output_mtp_logits: bool = False,
        **kwargs,
    ) -> LightningLMCausalLMOutput:
        r"""
        Args:
            labels: [B, T], -100 = no target. Position t is trained on labels[t + 1], the second-token layer on
                labels[t + 2]; targets that are padding or in another document do not count.
            num_items_in_batch: next-token targets of the whole optimizer step (default: of this call). The loss is the
                sum over this call's targets divided by it, so that losses add up over micro-batches and ranks. Means
                over this call's tokens (the auxiliary losses) are weighted by its share of the targets.
            num_second_items_in_batch: likewise the targets of the second-token layer; without it, its loss is the mean
                over this call's targets, weighted by the same share.
            logits_to_keep: logits of the last n positions only, or of the given positions; 0 means all.
            return_logits: by default True, except in training with labels: the loss does not need the logits, which are
                the largest tensor of the model.
            output_mtp_logits: compute `mtp_logits`.

        The other arguments are those of `LightningLMModel.forward`.
        """
        if use_cache is None and labels is not None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            cu_seqlens=cu_seqlens,
            cache=cache,
            use_cache=use_cache,
            prev_memory=prev_memory,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        result = LightningLMCausalLMOutput(cache=outputs.cache, memory=outputs.memory)
        if return_logits or (return_logits is None and not (self.training and labels is not None)):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            result.logits = self._logits(hidden[:, kept])

        if output_mtp_logits and self.mtp is None:
            raise ValueError("output_mtp_logits needs config.num_nextn_predict_layers = 1")
        second_hidden = mtp_aux = None
        if self.mtp is not None and (labels is not None or output_mtp_logits):
            second_hidden, mtp_aux = self.mtp(hidden, outputs.embeddings, outputs.context)
            second_hidden = self.model.norm(second_hidden).to(hidden.dtype)
            if output_mtp_logits:
                result.mtp_logits = self._logits(second_hidden)
        if labels is not None:
            counts = num_items_in_batch, num_second_items_in_batch
            self._add_losses(result, outputs, second_hidden, mtp_aux, labels, *counts)
        return result

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return softcap_logits(hidden, self.lm_head.weight, self.config.logit_softcap)

    def _add_losses(self, result, outputs, second_hidden, mtp_aux, labels, num_items, num_second_items) -> None:
        """Fills in the losses, as `forward` describes them."""
        config, ctx = self.config, outputs.context
        targets = shifted_targets(labels, 1, ctx)
        count = (targets != IGNORED).sum()
        total = count.clamp(min=1) if num_items is None else num_items
        share = count / total
        result.next_token_loss = self._cross_entropy(outputs.last_hidden_state, targets) / total
        result.loss = result.next_token_loss
        aux = config.aux_loss_scale * outputs.aux_loss
        if second_hidden is not None:
            targets = shifted_targets(labels, 2, ctx)
            second = self._cross_entropy(second_hidden, targets)
            if num_second_items is None:
                result.second_token_loss = share * second / (targets != IGNORED).sum().clamp(min=1)
            else:
                result.second_token_loss = second / num_second_items
            result.loss = result.loss + config.mtp_loss_weight * result.second_token_loss
            if config.mtp_aux:
                aux = aux + config.mtp_loss_weight * mtp_aux
        result.aux_loss = share * aux
        result.loss = result.loss + result.aux_loss

    def _cross_entropy(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(),
            self.config.logit_softcap,
            self.config.loss_backend,
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own `LightningLMCache`


def token_positions(keep_mask: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
    """Position of each token [B, T]: the real tokens before it in its row, or in its document."""
    before = keep_mask.cumsum(1) - keep_mask.long()
    if document_ids is not None:
        starts = document_starts(fill_padding(document_ids, keep_mask))
        before = before - torch.where(starts, before, 0).cummax(1).values
    return before


def shifted_targets(labels: torch.Tensor, shift: int, ctx: LayerContext) -> torch.Tensor:
    """
    Targets [B, T] for predicting labels[t + shift] at position t: -100 behind the end, where either token is padding,
    and where the two are in different documents.
    """

    def shifted(tensor, fill):
        return F.pad(tensor[:, shift:], (0, shift), value=fill)[:, : labels.shape[1]]

    targets = shifted(labels, IGNORED)
    if ctx.keep_mask is not None:
        targets = targets.masked_fill(~(ctx.keep_mask & shifted(ctx.keep_mask, False)), IGNORED)
    if ctx.document_ids is not None:
        targets = targets.masked_fill(ctx.document_ids != shifted(ctx.document_ids, -1), IGNORED)
    return targets


def _keep_mask(attention_mask: torch.Tensor | None, input_ids: torch.Tensor, past: int) -> torch.Tensor | None:
    """The bool mask [B, T] of the new tokens."""
    if attention_mask is None:
        return None
    rows, length = input_ids.shape
    if attention_mask.is_floating_point() or attention_mask.shape not in ((rows, length), (rows, past + length)):
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} {list(attention_mask.shape)}: needs bool or integers of shape "
            f"{[rows, length]}" + (f" or {[rows, past + length]}" if past else "") + ", non-zero for real tokens"
        )
    return attention_mask[:, -length:] != 0


def _refuse(kwargs: dict) -> None:
    """Arguments of other transformers models that are not supported here may be passed as None or False only."""
    for name, value in kwargs.items():
        if value is not None and value is not False:
            raise TypeError(f"LightningLM does not take the argument {name} = {value!r}")


__all__ = [
    "LightningLMCausalLMOutput",
    "LightningLMForCausalLM",
    "LightningLMModel",
    "LightningLMModelOutput",
    "LightningLMPreTrainedModel",
]
