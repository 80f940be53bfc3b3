"""
Kronecker byte embedding: a token enters as the bytes of its text, without a table of vocabulary size.

The code of a token with bytes b_0 .. b_{n-1} has n equal entries at b_i * X + i among Y = 256 * X, normalized to mean 0
and standard deviation 1 (arXiv 2605.29459). Projecting it needs the n columns of the weight at those entries and the
sum of all columns, so nothing of width Y is ever built.

Shape suffixes: T tokens, X most bytes of a token, Y codec size, H hidden size, V vocabulary.
"""

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .norms import RMSNorm


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary (as in GPT-2) -> the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(tokenizer_json: str | Path) -> list[bytes]:
    """
    The raw bytes of every token id of a byte-level BPE tokenizer; an added token stands for the UTF-8 of its text.

    Args:
        tokenizer_json: path of the `tokenizer.json` of the `tokenizers` library.
    Raises:
        ValueError: the tokenizer is not byte-level BPE, or its ids have gaps.
    """
    tokenizer = json.loads(Path(tokenizer_json).read_text(encoding="utf-8"))
    if tokenizer["model"].get("type") != "BPE":
        raise ValueError(f"{tokenizer_json}: model.type is not BPE; the byte embedding needs byte-level BPE")
    alphabet = byte_alphabet()
    added = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
    by_id = {}
    for piece, index in tokenizer["model"]["vocab"].items():
        if index in added:
            continue
        unknown = [character for character in piece if character not in alphabet]
        if unknown:
            raise ValueError(
                f"{tokenizer_json}: token {index} {piece!r} contains {unknown[0]!r}, which is not in the byte-level "
                "alphabet; the byte embedding needs byte-level BPE"
            )
        by_id[index] = bytes(alphabet[character] for character in piece)
    by_id |= {index: text.encode() for index, text in added.items()}
    missing = [index for index in range(len(by_id)) if index not in by_id]
    if missing:
        raise ValueError(f"{tokenizer_json}: {len(by_id)} tokens, but no token has id {missing[0]}; ids must not skip")
    return [by_id[index] for index in range(len(by_id))]


def tokens_sha256(tokens: list[bytes]) -> str:
    """Hash of what the embedding sees of a tokenizer: the bytes of all ids in order."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()


def decoded_text(index: int, raw: bytes, max_bytes: int) -> bytes:
    """
    The published codec's bytes of a token: its decoded text, cut to whole characters within `max_bytes`.

    Incomplete UTF-8 becomes U+FFFD, so that many ids share one code. Empty text becomes `<unk_index>`.
    """
    text = raw.decode("utf-8", errors="replace") or f"<unk_{index}>"
    return text.encode()[:max_bytes].decode("utf-8", errors="ignore").encode()


def byte_table(tokens: list[bytes], max_bytes: int, codec_bytes: str) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The table that the embedding looks tokens up in.

    Args:
        tokens: raw bytes of every id.
        max_bytes: X, most bytes of a token.
        codec_bytes: `"raw_bytes"`, or `"decoded_text"` for published weights (ids may then share a code).
    Returns:
        bytes [V, X] uint8 (zero behind the end) and lengths [V] int16.
    Raises:
        ValueError: with raw bytes, a token that is empty or too long, or two tokens with the same bytes.
    """
    if codec_bytes == "decoded_text":
        tokens = [decoded_text(index, raw, max_bytes) for index, raw in enumerate(tokens)]
    else:
        seen: dict[bytes, int] = {}
        for index, raw in enumerate(tokens):
            if not 1 <= len(raw) <= max_bytes:
                raise ValueError(f"token {index} {raw!r} has {len(raw)} bytes: must have 1 to {max_bytes}")
            if raw in seen:
                raise ValueError(f"tokens {seen[raw]} and {index} have the same bytes {raw!r}, so the same embedding")
            seen[raw] = index
    padded = b"".join(token.ljust(max_bytes, b"\0") for token in tokens)
    table_VX = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(len(tokens), max_bytes)
    return table_VX, torch.tensor([len(token) for token in tokens], dtype=torch.int16)


def code_values(max_bytes: int, rounded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Values of a normalized code of n bytes, for n = 0 .. max_bytes: at its n entries, and everywhere else.

    With Y = 256 * max_bytes: mean mu = sqrt(n) / Y, unbiased deviation s = sqrt((1 - n / Y) / (Y - 1)), and an entry x
    becomes (x - mu) / (s + 1e-6). The code of an empty token is zero.

    Args:
        rounded: round the values to bf16, as the published model does before its matrix product.
    Returns:
        hot [max_bytes + 1], cold [max_bytes + 1], fp32.
    """
    size = 256 * max_bytes
    hot, cold = [0.0], [0.0]
    for n in range(1, max_bytes + 1):
        mean, deviation = math.sqrt(n) / size, math.sqrt((1 - n / size) / (size - 1)) + 1e-6
        hot.append((1 / math.sqrt(n) - mean) / deviation)
        cold.append(-mean / deviation)
    values = torch.tensor([hot, cold], dtype=torch.float64).float()
    return (values.bfloat16().float() if rounded else values).unbind()


def dense_codes(tokens: list[bytes], max_bytes: int) -> torch.Tensor:
    """Reference: the codes [len(tokens), Y] in fp64, spelled out."""
    codes_TY = torch.zeros(len(tokens), 256 * max_bytes, dtype=torch.float64)
    for t, token in enumerate(tokens):
        for i, byte in enumerate(token):
            codes_TY[t, byte * max_bytes + i] = 1 / math.sqrt(len(token))
        if token:
            codes_TY[t] = (codes_TY[t] - codes_TY[t].mean()) / (codes_TY[t].std() + 1e-6)
    return codes_TY


class _ProjectCodes(torch.autograd.Function):
    """out_t = (hot_t - cold_t) * sum of the columns in codes_t + cold_t * sum of all columns; fp32, no atomics."""

    @staticmethod
    def forward(ctx, weight_HY, codes_TX, hot_T, cold_T):
        size = weight_HY.shape[1]
        table_YH = F.pad(weight_HY.float(), (0, 1)).t().contiguous()  # row Y is the padding of short tokens
        sums_TH = F.embedding_bag(codes_TX, table_YH, mode="sum", padding_idx=size)
        ctx.save_for_backward(codes_TX, hot_T, cold_T)
        ctx.weight_dtype, ctx.size = weight_HY.dtype, size
        return sums_TH.mul_((hot_T - cold_T)[:, None]).addr_(cold_T, weight_HY.float().sum(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH):
        codes_TX, hot_T, cold_T = ctx.saved_tensors
        # The transposed gather: row y sums the gradients of the tokens with code y, in the order of the tokens.
        codes, order = codes_TX.flatten().sort(stable=True)
        starts = torch.searchsorted(codes, torch.arange(ctx.size + 1, dtype=codes.dtype, device=codes.device))
        tokens = order[: int(starts[-1])] // codes_TX.shape[1]  # waits for the device, as the last layer of a backward
        scaled_TH = (hot_T - cold_T)[:, None] * grad_TH
        grad_YH = F.embedding_bag(tokens, scaled_TH, starts, mode="sum", include_last_offset=True)
        grad_HY = grad_YH.t() + (cold_T @ grad_TH)[:, None]
        return grad_HY.to(ctx.weight_dtype), None, None, None


class ByteProjection(nn.Module):
    """
    The bias-free linear map from the codec to the hidden size, applied to codes that are never built.

    Args:
        max_bytes: X; the codec size is Y = 256 * X.
        hidden_size: H.
    """

    def __init__(self, max_bytes: int, hidden_size: int):
        super().__init__()
        self.max_bytes = max_bytes
        self.weight = nn.Parameter(torch.empty(hidden_size, 256 * max_bytes))

    def forward(self, bytes_TX: torch.Tensor, lengths_T: torch.Tensor, hot: torch.Tensor, cold: torch.Tensor):
        """
        Args:
            bytes_TX: [T, X] uint8. lengths_T: [T] bytes of each token. hot, cold: values by length (`code_values`).
        Returns:
            [T, H] fp32.
        """
        place_X = torch.arange(self.max_bytes, dtype=torch.int32, device=bytes_TX.device)
        codes_TX = torch.where(
            place_X < lengths_T[:, None], bytes_TX.int() * self.max_bytes + place_X, self.weight.shape[1]
        )
        lengths_T = lengths_T.long()
        return _ProjectCodes.apply(self.weight, codes_TX, hot[lengths_T], cold[lengths_T])

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}"


class ByteEmbedding(nn.Module):
    """
    Token ids -> bytes -> projected code -> RMSNorm.

    The byte table follows from the tokenizer (`set_tokens`); it is not a weight and never saved.

    Args:
        config: reads vocab_size, hidden_size, max_token_bytes, codec_bytes, tokenizer_sha256, rms_norm_eps.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.proj = ByteProjection(config.max_token_bytes, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("token_bytes", None, persistent=False)
        self.register_buffer("token_lengths", None, persistent=False)

    def set_tokens(self, tokens: list[bytes]) -> None:
        """
        Builds the byte table and records the tokenizer's hash in the config.

        Args:
            tokens: the raw bytes of every id (`token_bytes`).
        Raises:
            ValueError: their number is not `vocab_size`, the tokenizer is not the one the model was trained with, or
                the bytes do not fit the codec (`byte_table`).
        """
        if len(tokens) != self.config.vocab_size:
            raise ValueError(f"the tokenizer has {len(tokens)} ids, but config.vocab_size = {self.config.vocab_size}")
        found = tokens_sha256(tokens)
        if self.config.tokenizer_sha256 not in (None, found):
            raise ValueError(
                f"the tokenizer's bytes have sha256 {found[:16]}..., config.tokenizer_sha256 is "
                f"{self.config.tokenizer_sha256[:16]}...: the model was trained with another tokenizer"
            )
        table_VX, lengths_V = byte_table(tokens, self.config.max_token_bytes, self.config.codec_bytes)
        self.config.tokenizer_sha256 = found
        device = self.proj.weight.device
        self.token_bytes, self.token_lengths = table_VX.to(device), lengths_V.to(device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [B, T] int64 -> [B, T, H] in the dtype of the projection."""
        if self.token_bytes is None:
            raise RuntimeError(
                "the byte embedding has no byte table yet: call model.load_token_bytes(folder with tokenizer.json) or "
                "model.set_token_bytes(list of bytes); from_pretrained does it when the folder holds tokenizer.json"
            )
        hot, cold = code_values(self.config.max_token_bytes, rounded=self.config.codec_bytes == "decoded_text")
        flat_T = input_ids.flatten()
        projected_TH = self.proj(
            self.token_bytes[flat_T], self.token_lengths[flat_T], hot.to(flat_T.device), cold.to(flat_T.device)
        )
        return self.norm(projected_TH).view(*input_ids.shape, -1).to(self.proj.weight.dtype)
