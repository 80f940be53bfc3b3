"""
Published checkpoint in, our checkpoint folder out.

First everything is read and checked, and all that is wrong is said at once; only then is the target written, tensor by
tensor. Memory is bounded by the largest tensor and the writer's shards; the source is mapped.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.expert_bases import base_hashes
from lightninglm.checkpoint.published.checking import SourceCheck
from lightninglm.checkpoint.published.keys import Form, Variant, published_table
from lightninglm.checkpoint.published.source import PublishedSource
from lightninglm.checkpoint.writer import CheckpointWriter, refuse_existing
from lightninglm.modeling.byte_embedding import token_bytes, tokens_sha256
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.initialization import initial_tensor

RECORD = "published.json"
FORMAT = 1
SMALL_FILES_BYTES = 32 * 2**20  # room for indexes, manifest and tokenizer beside the tensors


@dataclass(frozen=True)
class ImportReport:
    """
    What an import did.

    Attributes:
        keys: canonical keys imported.
        tensors: tensors of the new checkpoint.
        aliases: further keys that hold the same tensors as canonical ones.
        stale_aliases: aliases that hold something else and were ignored, as asked for.
        ignored: entries of the source that are not tensors.
        initial: our tensors that the published layout lacks, at their initial values.
        notes: conversions that were asked for, in words.
    """

    keys: int
    tensors: int
    aliases: int
    stale_aliases: list[str]
    ignored: list[str]
    initial: list[str]
    notes: list[str]


def no_progress(nbytes: int) -> AbstractContextManager[Callable[[int], None]]:
    """Shows nothing."""
    return nullcontext(lambda nbytes: None)


def import_published(
    source: PublishedSource,
    target: str | Path,
    config: LightningLMConfig,
    *,
    tokenizer_folder: str | Path | None = None,
    ignore_stale_aliases: bool = False,
    recompute_rope: bool = False,
    progress: Callable[[int], AbstractContextManager[Callable[[int], None]]] = no_progress,
) -> ImportReport:
    """
    Makes a checkpoint folder of a published checkpoint.

    Args:
        target: folder to create; must not exist.
        config: of the model, see `resolve_config`.
        tokenizer_folder: its tokenizer files are copied; the tokenizer must have `config.vocab_size` ids.
        ignore_stale_aliases: take the canonical tensor where an alias holds another one, instead of refusing.
        recompute_rope: let `config.rope_source = "config"` replace the frequencies of the file.
        progress: bytes to read -> a context that gives a function to call with the bytes read since the last call.
            Every byte is read twice, to check it and to write it.
    Raises CheckpointError, naming every key that is missing, left over, of a wrong shape or dtype, not finite, or in
    disagreement with its alias. Nothing is written then.
    """
    refuse_existing(Path(target))
    if tokenizer_folder is not None:
        config.tokenizer_sha256 = _tokenizer_sha256(Path(tokenizer_folder), config)
    table, ours_alone = published_table(config, Variant.of(source.shapes))
    with progress(2 * source.nbytes) as read:
        check = SourceCheck(source, config, table, read)
        check.run(ignore_stale_aliases, recompute_rope)
        if check.problems:
            raise CheckpointError(
                f"{source.path}: {len(check.problems)} problems, nothing was written\n  " + "\n  ".join(check.problems)
            )
        record = {"format": FORMAT, "tensors": check.record, "aliases": check.aliases}
        record_bytes = (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()
        dtypes = Counter(located.dtype for located in check.located.values() if located.entry.form is Form.PLAIN)
        dtype = str(dtypes.most_common(1)[0][0]).removeprefix("torch.")
        count = len(ours_alone)
        with CheckpointWriter(target, expected_bytes=check.bytes_to_write() + SMALL_FILES_BYTES) as writer:
            for name, tensor in check.tensors():
                writer.add(name, tensor)
                count += 1
            for item in ours_alone:
                writer.add(item.name, initial_tensor(item.name, item.disk_shape, item.tensor.dtype, config, seed=0))
            state = _trainer_state(source, record_bytes)

            def last_files(folder: Path, tensors: dict[str, dict]) -> dict[str, bytes]:
                state["expert_bases"] = base_hashes({name: entry["sha256"] for name, entry in tensors.items()})
                return {RECORD: record_bytes}

            writer.commit(
                config.to_dict() | {"architectures": ["LightningLMForCausalLM"], "dtype": dtype},
                state,
                tokenizer_folder=tokenizer_folder,
                check=last_files,
            )
    return ImportReport(
        keys=len(table),
        tensors=count,
        aliases=len(check.aliases),
        stale_aliases=check.stale_aliases,
        ignored=source.ignored,
        initial=[item.name for item in ours_alone],
        notes=check.notes,
    )


def _tokenizer_sha256(folder: Path, config: LightningLMConfig) -> str:
    """Hash of the tokenizer's bytes. Raises CheckpointError when it does not suit the model."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the byte embedding needs the tokenizer's")
    try:
        tokens = token_bytes(path)
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if len(tokens) != config.vocab_size:
        raise CheckpointError(f"{path}: {len(tokens)} ids, but config.vocab_size = {config.vocab_size}")
    return tokens_sha256(tokens)


def _trainer_state(source: PublishedSource, record: bytes) -> dict:
    """The state of a run that has not begun, as a finished stage that others can grow from."""
    imported = {"source": source.path.name, "published_json_sha256": hashlib.sha256(record).hexdigest()}
    return {
        "format": layout.FORMAT,
        "stage": "imported",
        "step": 0,
        "total_steps": 0,
        "tokens": 0,
        "lineage_tokens": 0,
        "finished": True,
        "adam_step": 0.0,
        "data": {"position": 0, "domain_offsets": {}, "next_domain_offsets": {}, "seed": 0},
        "ramps": {},
        "new_tensors": {"names": [], "warmup_steps": 0},
        "seed": 0,
        "lineage": [{"imported": imported}],
        "skipped_steps": 0,
    }
