"""Hashes of every tensor of a stage, kept when its checkpoints are gone, so that two runs can be compared."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.reader import CheckpointReader
from lightninglm.checkpoint.retention import newest_checkpoint

HASHES = "hashes.json"
FORMAT = 1


@dataclass(frozen=True)
class StageHashes:
    """
    SHA-256 of the raw bytes of every tensor, weights and optimizer state.

    Attributes:
        checkpoint: name of the checkpoint's folder.
        after: the stages that were trained before this one.
        tensors: name -> SHA-256.
    """

    checkpoint: str
    after: list[str]
    tensors: Mapping[str, str]


@dataclass(frozen=True)
class Comparison:
    """Names of the tensors of one stage that two runs have alike, have differently, or that one of them lacks."""

    equal: int
    different: list[str]
    only_first: list[str]
    only_second: list[str]

    @property
    def same(self) -> bool:
        """Whether both have the same tensors with the same bytes."""
        return not (self.different or self.only_first or self.only_second)


def write_hashes(checkpoint: str | Path) -> Path:
    """Writes `hashes.json` beside a stage's last checkpoint, from its manifest: no tensor is read."""
    checkpoint = Path(checkpoint)
    content = {"format": FORMAT, **asdict(_of_checkpoint(checkpoint))}
    target = checkpoint.parent / HASHES
    temporary = target.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
    return target


def read_hashes(path: str | Path) -> dict[str, StageHashes]:
    """
    The hashes in a run folder, by stage, in the order in which the stages were trained; or those of one stage, under
    the name "".

    Args:
        path: a run folder, a stage folder (its `hashes.json`, or else its newest checkpoint), a checkpoint, or a file.
    Raises CheckpointError when there is nothing of the kind, or it is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    single = _of_stage(path)
    if single is not None:
        return {"": single}
    if path.is_dir():
        stages = {
            folder.name: found for folder in sorted(path.iterdir()) if folder.is_dir() and (found := _of_stage(folder))
        }
        if stages:
            return dict(sorted(stages.items(), key=lambda stage: len(stage[1].after)))
    raise CheckpointError(f"{path}: not a run, a stage, a checkpoint or a {HASHES}: no hashes of tensors in it")


def compare_hashes(first: Mapping[str, str], second: Mapping[str, str]) -> Comparison:
    """Compares {tensor: SHA-256} of two runs."""
    common = first.keys() & second.keys()
    different = sorted(name for name in common if first[name] != second[name])
    return Comparison(
        len(common) - len(different), different, sorted(first.keys() - common), sorted(second.keys() - common)
    )


def _of_stage(path: Path) -> StageHashes | None:
    """The hashes of one stage, None if the path is something else."""
    if path.is_file():
        return _read_file(path)
    if (path / layout.MANIFEST).is_file():
        return _of_checkpoint(path)
    if (path / HASHES).is_file():
        return _read_file(path / HASHES)
    checkpoint, _ = newest_checkpoint(path)
    return None if checkpoint is None else _of_checkpoint(checkpoint)


def _of_checkpoint(folder: Path) -> StageHashes:
    reader = CheckpointReader(folder, verify=None)
    lineage = reader.trainer_state.get("lineage", [])
    tensors = {name: entry["sha256"] for name, entry in sorted(reader.manifest["tensors"].items())}
    return StageHashes(folder.name, [entry["stage"] for entry in lineage if "stage" in entry], tensors)


def _read_file(path: Path) -> StageHashes:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged, not readable as JSON ({error})") from error
    if not isinstance(content, dict) or not content.keys() >= {"format", "checkpoint", "after", "tensors"}:
        raise CheckpointError(f"{path}: not the {HASHES} of a stage")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {content['format']!r}, this version reads format {FORMAT}")
    return StageHashes(content["checkpoint"], content["after"], content["tensors"])
