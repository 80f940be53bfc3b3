"""What is wrong with a checkpoint folder: a list of findings, each naming the file, what was found and expected."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.writer import encode_manifest

# A file of these kinds that the manifest does not list would change what some reader loads.
_LOADED_SUFFIXES = (".safetensors", ".json", ".bin", ".pt", ".py", ".jinja")
_SAMPLED_TENSORS = 2
_HASHING_THREADS = 4
_CHUNK_BYTES = 2**24
_NAMED_TENSORS = 3

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the file (or tensor) it concerns, what was found, what was expected."""

    file: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.file}: found {self.found}, expected {self.expected}"


def explain(folder: str | Path, verify: str = "full", progress: Progress | None = None) -> list[Finding]:
    """
    Everything that is wrong with a checkpoint folder; an empty list when it is sound. Never raises for a bad folder.

    Args:
        verify: `"full"` hashes every byte. `"fast"` checks names, sizes and heads of all files, hashes the small files
            and the two smallest tensors of each shard (of those that have bytes).
        progress: called, from several threads, with the number of bytes that were hashed.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        path = folder / layout.MANIFEST
        if folder.is_dir() and not path.exists():
            expected = "the last file that a save writes: without it this is not a complete checkpoint"
            return [Finding(str(path), "no such file", expected)]
        found = str(error).removeprefix(f"{path}: ").removeprefix(f"{folder}: ")
        return [Finding(str(path), found, "the manifest of a complete checkpoint")]
    return check_files(folder, manifest, verify, progress)


def check_files(folder: Path, manifest: dict, verify: str, progress: Progress | None = None) -> list[Finding]:
    """The files of a checkpoint against its manifest, see `explain`."""
    if verify not in ("fast", "full"):
        raise ValueError(f"verify = {verify!r}: must be 'fast' or 'full'")
    findings = _check_presence(folder, manifest)
    damaged = {finding.file for finding in findings}
    sound = [name for name in manifest["files"] if str(folder / name) not in damaged]
    shards = [name for name in sound if name.endswith(".safetensors")]
    others = [name for name in sound if name not in shards]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for name, found in zip(others, pool.map(lambda name: _sha256(folder / name, progress), others), strict=True):
            if found != (expected := manifest["files"][name]["sha256"]):
                findings.append(_changed(folder / name, "", found, expected))
        for found in pool.map(lambda name: _check_shard(folder / name, manifest, verify == "full", progress), shards):
            findings.extend(found)
    if not findings:
        findings = _check_indexes(folder, manifest, shards)
    return findings


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint. Raises CheckpointError when there is none, or it was damaged or edited."""
    path = folder / layout.MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: not a complete checkpoint, it has no {layout.MANIFEST} (the last file that a save writes)"
        )
    content = path.read_bytes()
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged, not readable as JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != layout.FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(
            f"{path}: format {found!r}, but this version reads format {layout.FORMAT} only, and nothing converts: "
            "train or grow the checkpoint again, or use the version of lightninglm that wrote it"
        )
    if content != encode_manifest(manifest):
        raise CheckpointError(f"{path}: edited or damaged, its content does not have the SHA-256 that it states")
    return manifest


def _check_presence(folder: Path, manifest: dict) -> list[Finding]:
    findings = []
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            lost = _named(_stored_tensors(folder, manifest, name))
            findings.append(Finding(str(path), "no such file", f"{entry['bytes']:,} bytes{lost}"))
        elif (size := path.stat().st_size) != entry["bytes"]:
            lost = _named(_cut_off_tensors(folder, manifest, name))
            findings.append(Finding(str(path), f"{size:,} bytes", f"{entry['bytes']:,} bytes{lost}"))
    for path in sorted(folder.iterdir()):
        known = path.name in manifest["files"] or path.name == layout.MANIFEST
        if not known and path.is_file() and path.suffix in _LOADED_SUFFIXES:
            findings.append(Finding(str(path), "a file that no save wrote", "no such file (move it elsewhere)"))
    return findings


def _stored_tensors(folder: Path, manifest: dict, shard: str) -> list[str]:
    """The tensors of a shard according to its index; none if that is damaged too, or it is no shard."""
    index = layout.INDEX.get(shard.partition("-")[0])
    if not shard.endswith(".safetensors") or not (folder / index).is_file():
        return []
    content = (folder / index).read_bytes()
    if hashlib.sha256(content).hexdigest() != manifest["files"][index]["sha256"]:
        return []
    return [name for name, file in json.loads(content)["weight_map"].items() if file == shard]


def _cut_off_tensors(folder: Path, manifest: dict, name: str) -> list[str]:
    """The tensors that a file of the wrong size does not hold whole; all of a shard if its head is damaged."""
    path = folder / name
    stored = _stored_tensors(folder, manifest, name)
    if not stored:
        return []
    try:
        head, start = layout.decode_head(path, whole=False)
    except CheckpointError:
        return stored
    return [name for name, entry in head.items() if start + entry["data_offsets"][1] > path.stat().st_size]


def _changed(path: Path, where: str, found: str, expected: str) -> Finding:
    return Finding(str(path), f"changed bytes{where} (SHA-256 {found[:16]})", f"SHA-256 {expected[:16]}")


def _named(tensors: list[str]) -> str:
    if not tensors:
        return ""
    more = f" and {len(tensors) - _NAMED_TENSORS} more" if len(tensors) > _NAMED_TENSORS else ""
    return f" (lost: {', '.join(tensors[:_NAMED_TENSORS])}{more})"


def _check_shard(path: Path, manifest: dict, every: bool, progress: Progress | None) -> list[Finding]:
    """The head against the manifest, and the hashes of the smallest tensors or of every tensor."""
    tensors, expected = manifest["tensors"], manifest["files"][path.name]["head_sha256"]
    try:
        raw = layout.read_head(path)
        if (found := hashlib.sha256(raw).hexdigest()) != expected:
            return [_changed(path, " in its head", found, expected)]
        head, start = layout.decode_head(path)
    except CheckpointError as error:
        return [Finding(str(path), str(error).removeprefix(f"{path}: "), "a sound safetensors head")]
    if progress is not None:
        progress(start)
    findings = []
    for name, entry in head.items():
        stored = tensors.get(name)
        if stored is None:
            findings.append(Finding(str(path), f"tensor {name}", "no such tensor (the manifest does not list it)"))
        elif (entry["dtype"], entry["shape"]) != (stored["dtype"], stored["shape"]):
            found = f"{name} {entry['dtype']} {entry['shape']}"
            findings.append(Finding(str(path), found, f"{stored['dtype']} {stored['shape']}"))
    if findings:
        return findings
    spans = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in head.items()}
    sample = sorted(filter(spans.get, spans), key=spans.get)[:_SAMPLED_TENSORS]
    for name in head if every else sample:
        found = _sha256(path, progress, start + head[name]["data_offsets"][0], spans[name])
        if found != (expected := tensors[name]["sha256"]):
            findings.append(_changed(path, f" in {name}", found, expected))
    return findings


def _check_indexes(folder: Path, manifest: dict, shards: list[str]) -> list[Finding]:
    """Every tensor of the manifest lies in the one file that its index names."""
    findings, held, indexed = [], {}, {}
    for shard in shards:
        for name in layout.decode_head(folder / shard)[0]:
            if name in held:
                findings.append(Finding(f"{folder}: {name}", f"in {held[name]} and in {shard}", "in one shard"))
            held[name] = shard
    for kind, index in layout.INDEX.items():
        if kind in layout.OPTIONAL_KINDS and index not in manifest["files"]:
            continue
        indexed |= json.loads((folder / index).read_bytes())["weight_map"]
    for name in sorted(held.keys() | indexed.keys() | manifest["tensors"].keys()):
        places = {"file": held.get(name), "index": indexed.get(name)}
        if name not in manifest["tensors"] or None in places.values() or len(set(places.values())) != 1:
            findings.append(Finding(f"{folder}: {name}", f"{places}", "the same shard in file and index"))
    return findings


def _sha256(path: Path, progress: Progress | None, begin: int = 0, length: int | None = None) -> str:
    """Of a file, or of `length` bytes of it."""
    digest, left = hashlib.sha256(), path.stat().st_size if length is None else length
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while chunk := file.read(min(_CHUNK_BYTES, left)):
            digest.update(chunk)
            left -= len(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()
