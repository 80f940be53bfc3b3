"""What is wrong with a checkpoint folder: a list of findings, each naming the file, what was found and expected."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.errors import CheckpointError
from lightninglm.checkpoint.writer import manifest_sha256

# A file of these kinds that the manifest does not list would change what some reader loads.
_LOADED_SUFFIXES = (".safetensors", ".json", ".bin", ".pt", ".py", ".jinja")
_SAMPLED_TENSORS = 2
_HASHING_THREADS = 4


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the file (or tensor) it concerns, what was found, what was expected."""

    file: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.file}: found {self.found}, expected {self.expected}"


def explain(folder: str | Path, verify: str = "full") -> list[Finding]:
    """
    Everything that is wrong with a checkpoint folder; an empty list when it is sound. Never raises for a bad folder.

    Args:
        verify: `"full"` hashes every byte. `"fast"` checks names, sizes and heads of all files, hashes the small files
            and the two smallest tensors of each shard.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Finding(str(folder / layout.MANIFEST), str(error), "the manifest of a complete checkpoint")]
    return check_files(folder, manifest, verify)


def check_files(folder: Path, manifest: dict, verify: str) -> list[Finding]:
    """The files of a checkpoint against its manifest, see `explain`."""
    if verify not in ("fast", "full"):
        raise ValueError(f"verify = {verify!r}: must be 'fast' or 'full'")
    findings = _check_presence(folder, manifest)
    damaged = {finding.file for finding in findings}
    sound = [name for name in manifest["files"] if str(folder / name) not in damaged]
    shards = [name for name in sound if name.endswith(".safetensors")]
    hashed = sound if verify == "full" else [name for name in sound if name not in shards]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for name, sha256 in zip(hashed, pool.map(lambda name: _file_sha256(folder / name), hashed), strict=True):
            if sha256 != manifest["files"][name]["sha256"]:
                findings.append(Finding(str(folder / name), f"SHA-256 {sha256}", manifest["files"][name]["sha256"]))
        for some in pool.map(lambda name: _check_shard(folder / name, manifest["tensors"]), shards):
            findings.extend(some)
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
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged, not readable as JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != layout.FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(f"{path}: format {found!r}, this version reads format {layout.FORMAT}")
    found, expected = manifest_sha256(manifest), manifest.get("sha256")
    if found != expected:
        raise CheckpointError(f"{path}: edited or damaged, found SHA-256 {found}, expected {expected}")
    return manifest


def _check_presence(folder: Path, manifest: dict) -> list[Finding]:
    findings = []
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            findings.append(Finding(str(path), "no such file", f"{entry['bytes']:,} bytes"))
        elif path.stat().st_size != entry["bytes"]:
            findings.append(Finding(str(path), f"{path.stat().st_size:,} bytes", f"{entry['bytes']:,} bytes"))
    for path in sorted(folder.iterdir()):
        known = path.name in manifest["files"] or path.name == layout.MANIFEST
        if not known and path.is_file() and path.suffix in _LOADED_SUFFIXES:
            findings.append(Finding(str(path), "a file that no save wrote", "no such file (move it elsewhere)"))
    return findings


def _check_shard(path: Path, tensors: dict[str, dict]) -> list[Finding]:
    """The head against the manifest, and the hashes of the smallest tensors."""
    try:
        head, start = layout.decode_head(path)
    except CheckpointError as error:
        return [Finding(str(path), str(error), "a sound safetensors head")]
    findings = []
    for name, entry in head.items():
        stored = tensors.get(name)
        if stored is None:
            findings.append(Finding(str(path), f"tensor {name}", "no such tensor (the manifest does not list it)"))
        elif (entry["dtype"], entry["shape"]) != (stored["dtype"], stored["shape"]):
            found = f"{name} {entry['dtype']} {entry['shape']}"
            findings.append(Finding(str(path), found, f"{stored['dtype']} {stored['shape']}"))
    if not findings:
        with path.open("rb") as file:
            for name in islice(sorted(head, key=lambda name: _span(head[name])), _SAMPLED_TENSORS):
                file.seek(start + head[name]["data_offsets"][0])
                sha256 = hashlib.sha256(file.read(_span(head[name]))).hexdigest()
                if sha256 != tensors[name]["sha256"]:
                    findings.append(Finding(str(path), f"{name} with SHA-256 {sha256}", tensors[name]["sha256"]))
    return findings


def _check_indexes(folder: Path, manifest: dict, shards: list[str]) -> list[Finding]:
    """Every tensor of the manifest lies in the one file that its index names."""
    held = {name: shard for shard in shards for name in layout.decode_head(folder / shard)[0]}
    findings = []
    indexed = {}
    for kind, index in layout.INDEX.items():
        if kind in layout.OPTIONAL_KINDS and index not in manifest["files"]:
            continue
        indexed |= json.loads((folder / index).read_bytes())["weight_map"]
    for name in sorted(held.keys() | indexed.keys() | manifest["tensors"].keys()):
        places = {"file": held.get(name), "index": indexed.get(name)}
        if name not in manifest["tensors"] or None in places.values() or len(set(places.values())) != 1:
            findings.append(Finding(f"{folder}: {name}", f"{places}", "the same shard in file and index"))
    return findings


def _span(entry: dict) -> int:
    return entry["data_offsets"][1] - entry["data_offsets"][0]


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
