"""
Our checkpoint folder in, the published layout out: safetensors shards of canonical keys, written row by row.

What was imported comes out bit for bit, and every tensor is held against the hash of the original. A checkpoint that
was trained or grown since keeps the dtypes it has; what the published layout wants and ours lacks follows from ours.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError, from_os_error
from lightninglm.checkpoint.published.conversion import raw_bytes, to_published
from lightninglm.checkpoint.published.importing import FORMAT, RECORD, no_progress
from lightninglm.checkpoint.published.keys import Entry, Form, Variant, alias_keys, published_table
from lightninglm.checkpoint.reader import CheckpointReader
from lightninglm.checkpoint.writer import refuse_existing, require_space
from lightninglm.modeling.configuration_lightninglm import PUBLISHED_SWITCHES, LightningLMConfig
from lightninglm.modeling.rotary import rotary_frequencies

SHARD_BYTES = 5 * 10**9
FUNCTION_SWITCHES = (
    "codec_bytes", "rope_source", "conv_mask_inputs", "sparse_variance", "sparse_score_dtype", "null_renorm",
)  # fmt: skip


class ExportMismatchError(CheckpointError):
    """What came out is not what was imported."""


@dataclass(frozen=True)
class ExportReport:
    """
    What an export did.

    Attributes:
        keys: canonical keys written.
        aliases: further keys written.
        as_imported: keys that are bit for bit what an import read; None for a checkpoint that was not imported.
        notes: where the published code would compute something else than this model, in words.
    """

    keys: int
    aliases: int
    as_imported: int | None
    notes: list[str]


def export_published(
    source: str | Path,
    target: str | Path,
    *,
    aliases: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], AbstractContextManager[Callable[[int], None]]] = no_progress,
) -> ExportReport:
    """
    Writes a checkpoint of ours in the published layout.

    Args:
        source: our checkpoint folder.
        target: folder to create: `model-*.safetensors` and `model.safetensors.index.json`.
        aliases: write every tensor under its aliases as well, which a strict load of the published code asks for; that
            makes about four copies of every layer.
        shard_bytes: a shard is closed when the next tensor would make it larger.
        progress: bytes to write -> a context that gives a function to call with the bytes written so far.
    Raises:
        CheckpointError: the source is damaged or the published layout cannot hold it; nothing was written.
        ExportMismatchError: a tensor of an imported checkpoint did not come out as it was read; nothing was written.
    """
    target = Path(target)
    refuse_existing(target)
    with CheckpointReader(source, verify="full") as reader:
        export = _Export(reader)
        outputs = [(key, entry) for key, entry in export.table.items()]
        if aliases:
            outputs += [(name, entry) for key, entry in outputs for name in alias_keys(key, export.config)]
        size = sum(export.nbytes(entry) for _, entry in outputs)
        require_space(target.parent, size)
        temporary = target.parent / (layout.TEMPORARY_PREFIX + target.name)
        try:
            shutil.rmtree(temporary, ignore_errors=True)  # left by an export that was killed
            temporary.mkdir()
            with progress(size) as written:
                hashes = _write(export, outputs, temporary, shard_bytes, written)
            differing = [key for key, entry in export.record.items() if hashes[key] != entry["sha256"]]
            if differing:
                raise ExportMismatchError(f"{source}: not as imported, nothing was written: {', '.join(differing)}")
            os.rename(temporary, target)
        except OSError as error:
            raise from_os_error(error, temporary, size) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return ExportReport(
            keys=len(export.table),
            aliases=len(outputs) - len(export.table),
            as_imported=len(export.record) or None,
            notes=_notes(export.config),
        )


class _Export:
    """
    The published tensors of an open checkpoint.

    Attributes:
        table: canonical key -> entry.
        record: canonical key -> dtype, shape, hash of the original; empty for a checkpoint that was not imported.
    """

    def __init__(self, reader: CheckpointReader):
        self.reader = reader
        self.config = LightningLMConfig.from_dict(reader.config)
        self.record = _read_record(reader)
        variant = Variant.of({key: tuple(entry["shape"]) for key, entry in self.record.items()})
        self.table, _ = published_table(self.config, variant)
        problems = [f"{key}: in {RECORD} only" for key in self.record.keys() - self.table.keys()]
        if self.record:
            problems += [f"{key}: not in {RECORD}" for key in self.table.keys() - self.record.keys()]
        for entry in self.table.values():
            problems += [f"{name}: missing" for name in entry.names if name not in reader.weights]
            problems += [
                f"{name}: shape {list(reader.weights[name].shape)}, expected {list(entry.disk_shape)}"
                for name in entry.names
                if name in reader.weights and reader.weights[name].shape != entry.disk_shape
            ]
        if problems:
            raise CheckpointError(f"{reader.folder}: cannot be exported\n  " + "\n  ".join(sorted(problems)))

    def dtype(self, entry: Entry) -> torch.dtype:
        """That of the original, else the one that ours has."""
        if entry.key in self.record:
            return layout.DTYPES[self.record[entry.key]["dtype"]]
        if entry.form is Form.CODES:
            return torch.int8
        if entry.form in (Form.ROTATION, Form.KEPT):
            return torch.float32
        return self.reader.weights[entry.names[0]].dtype

    def nbytes(self, entry: Entry) -> int:
        """Bytes of a published tensor."""
        return torch.Size(entry.shape).numel() * self.dtype(entry).itemsize

    def parts(self, entry: Entry) -> Iterator[Tensor]:
        """A published tensor in blocks along its first dimension."""
        kept = layout.PUBLISHED_PREFIX + entry.key
        if kept in self.reader.published:
            yield self.reader.read(kept)
        elif entry.form is Form.KEPT:
            yield self._derived(entry).to(self.dtype(entry))
        else:
            signs = None if entry.rotation is None else self.reader.read(self.table[entry.rotation].names[0])
            magnitude = self.record.get(entry.key, {}).get("magnitude")
            for name in entry.names:
                yield to_published(entry, self.reader.read(name), signs, magnitude).to(self.dtype(entry))

    def _derived(self, entry: Entry) -> Tensor:
        """What ours does not hold, for a checkpoint that was not imported."""
        if entry.key.endswith("inv_freq"):
            return rotary_frequencies(2 * entry.shape[0], self.config.rope_theta)
        if entry.key.endswith("null_logit"):
            return torch.zeros(entry.shape)
        return self.reader.read(self.table[entry.sibling("variance_ema")].names[0])  # _variance_ema_snapshot


def _read_record(reader: CheckpointReader) -> dict[str, dict]:
    """The tensors in `published.json`, which an import writes."""
    if RECORD not in reader.manifest["files"]:
        return {}
    record = json.loads((reader.folder / RECORD).read_bytes())
    if record["format"] != FORMAT:
        raise CheckpointError(f"{reader.folder / RECORD}: format {record['format']}, this version reads {FORMAT}")
    return record["tensors"]


def _write(
    export: _Export,
    outputs: list[tuple[str, Entry]],
    folder: Path,
    shard_bytes: int,
    written: Callable[[int], None],
) -> dict[str, str]:
    """Writes all shards and their index; returns the SHA-256 of every tensor."""
    shards: list[list[tuple[str, Entry]]] = [[]]
    filled = 0
    for key, entry in outputs:
        if shards[-1] and filled + export.nbytes(entry) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((key, entry))
        filled += export.nbytes(entry)
    hashes: dict[str, str] = {}
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # wide elements first, so that every tensor starts at a multiple of its element size
        shard.sort(key=lambda item: -export.dtype(item[1]).itemsize)
        heads = [(key, torch.empty(entry.shape, dtype=export.dtype(entry), device="meta")) for key, entry in shard]
        with (folder / name).open("xb") as file:
            file.write(layout.encode_head(heads))
            for key, entry in shard:
                sha256 = hashlib.sha256()
                for part in export.parts(entry):
                    content = memoryview(raw_bytes(part).numpy())
                    sha256.update(content)
                    file.write(content)
                    written(len(content))
                hashes[key], places[key] = sha256.hexdigest(), name
            file.flush()
            os.fsync(file.fileno())
    index = {"metadata": {"total_size": sum(export.nbytes(entry) for _, entry in outputs)}, "weight_map": places}
    with (folder / "model.safetensors.index.json").open("x", encoding="utf-8") as file:
        json.dump(index, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    return hashes


def _notes(config: LightningLMConfig) -> list[str]:
    """Where the published code computes something else with the same weights."""
    expected = {name: PUBLISHED_SWITCHES[name] for name in FUNCTION_SWITCHES}
    expected["stack"] = expected["mtp_stack"] = "midpoint" if config.num_experts else "sequential"
    if config.stack == "midpoint":
        layers = config.num_hidden_layers
        expected["step_sizes"] = [0.125] + [0.25] * (layers - 1)
        expected["blends"] = [PUBLISHED_SWITCHES["default_blend"]] * layers
    if not config.num_null_experts:
        del expected["null_renorm"]
    return [
        f"config.{name} = {getattr(config, name)!r}, the published code has {value!r}"
        for name, value in expected.items()
        if getattr(config, name) != value
    ]
