"""
Holds a published checkpoint against the table of its configuration: where every key lies, and all that is wrong.

What it found to be right can then be read as our tensors, one at a time.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightninglm.checkpoint import layout
from lightninglm.checkpoint.published.conversion import raw_bytes, rotation_of_signs, split, to_ours
from lightninglm.checkpoint.published.keys import Entry, Form, canonical_key
from lightninglm.checkpoint.published.source import PublishedSource, StoredTensor
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.quantizers import signs_of_rotation
from lightninglm.modeling.rotary import rotary_frequencies

FLOATING = (torch.bfloat16, torch.float16, torch.float32)
ZERO_PADDED = ("tqp_A", "tqp_B")


@dataclass(frozen=True)
class Located:
    """
    A canonical key and where its tensor lies: whole in one file, or a block of experts in the file of every rank.

    Attributes:
        stored: the tensors; with `counts` None all of them are the same.
        counts: experts of each rank that are real; behind them is padding.
    """

    entry: Entry
    stored: list[StoredTensor]
    counts: list[int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.stored[0].dtype

    def pieces(self) -> Iterator[Tensor]:
        """The published tensor, in blocks along its first dimension."""
        if self.counts is None:
            yield self.stored[0].read()
        else:
            for stored, count in zip(self.stored, self.counts, strict=True):
                yield stored.read()[:count]

    def parts(self) -> Iterator[Tensor]:
        """The part of each of our tensors, in the order of `entry.names`."""
        for piece in self.pieces():
            yield from split(self.entry, piece)

    def whole(self) -> Tensor:
        """The published tensor."""
        return self.stored[0].read() if self.counts is None else torch.cat(list(self.pieces()))


class SourceCheck:
    """
    Holds a source against the table of its configuration.

    Attributes:
        located: canonical key -> where it lies.
        problems: what is wrong, in words, each with its key.
        record: per key dtype, shape and SHA-256 of the published tensor, for the export.
        aliases, stale_aliases, notes: see ImportReport.
    """

    def __init__(
        self,
        source: PublishedSource,
        config: LightningLMConfig,
        table: dict[str, Entry],
        progress: Callable[[int], None],
    ):
        self.source, self.config, self.table, self.progress = source, config, table, progress
        self.located: dict[str, Located] = {}
        self.problems: list[str] = []
        self.record: dict[str, dict] = {}
        self.aliases: list[str] = []
        self.stale_aliases: list[str] = []
        self.notes: list[str] = []
        self._signs: dict[str, Tensor] = {}
        self._blocks: list[list[str]] = [[] for _ in range(source.ranks)]  # per rank, SHA-256 of its blocks of experts

    def run(self, ignore_stale_aliases: bool, recompute_rope: bool) -> None:
        """Fills all attributes."""
        for key, entry in self.table.items():
            if key not in self.source.tensors:
                self._refuse(f"{key}: missing")
            elif located := self._locate(entry, self.source.tensors[key]):
                self.located[key] = located
        for key in self.source.tensors.keys() - self.table.keys():
            if canonical_key(key) in self.table:
                self.aliases.append(key)
            else:
                self._refuse(f"{key}: left over, this configuration has no such key")
        self.problems.sort()
        for located in self.located.values():
            self._check_values(located)
        self._check_rotations()
        self._check_shared()
        self._check_aliases(ignore_stale_aliases)
        self._check_ranks()
        self._check_frequencies(recompute_rope)

    def _locate(self, entry: Entry, stored: list[StoredTensor]) -> Located | None:
        """Where a key lies; None, with a problem noted, when shape or dtype are wrong."""
        expected = "I8" if entry.form is Form.CODES else "BF16, F16 or F32"
        for part in stored:
            fits = part.dtype == torch.int8 if entry.form is Form.CODES else part.dtype in FLOATING
            if not fits:
                return self._refuse(f"{entry.key}: dtype {part.found}{_place(part)}, expected {expected}")
        if len({part.dtype for part in stored}) > 1:
            return self._refuse(f"{entry.key}: dtypes differ between the files of the ranks")
        if all(part.shape == entry.shape for part in stored):
            return Located(entry, stored)
        ranks = self.source.ranks
        if not entry.per_expert or ranks == 1:
            part = next(part for part in stored if part.shape != entry.shape)
            hint = ""
            if entry.per_expert and part.shape[1:] == entry.shape[1:] and part.shape[0] < entry.shape[0]:
                hint = "; if this is the file of one expert-parallel rank, give the folder with the files of all ranks"
            return self._refuse(
                f"{entry.key}: shape {list(part.shape)}{_place(part)}, expected {list(entry.shape)}{hint}"
            )
        if len(stored) != ranks:
            return self._refuse(f"{entry.key}: in the files of {len(stored)} ranks, expected all {ranks}")
        least, more = divmod(entry.shape[0], ranks)
        counts = [least + (rank < more) for rank in range(ranks)]
        for part, count in zip(stored, counts, strict=True):
            if not (part.shape[1:] == entry.shape[1:] and part.shape[0] in (count, counts[0])):
                blocks = " or ".join(str([n, *entry.shape[1:]]) for n in sorted({count, counts[0]}))
                return self._refuse(
                    f"{entry.key}: shape {list(part.shape)}{_place(part)}, expected {blocks} "
                    f"({entry.shape[0]} experts over {ranks} ranks)"
                )
        return Located(entry, stored, counts)

    def _refuse(self, problem: str) -> None:
        self.problems.append(problem)

    def _check_values(self, located: Located) -> None:
        """Reads a tensor: finite, the same in all files that hold it whole, zero where it is padding. Records it."""
        entry, sha256 = located.entry, hashlib.sha256()
        for rank, piece in enumerate(located.pieces()):
            sha256.update(raw_bytes(piece).numpy())
            if located.counts is not None and piece.numel():
                self._blocks[rank].append(hashlib.sha256(raw_bytes(piece).numpy()).hexdigest())
            bad = _non_finite(piece)
            if bad:
                place = _place(located.stored[rank])
                self._refuse(f"{entry.key}: {bad:,} of {piece.numel():,} values are NaN or infinite{place}")
        if located.counts is None:
            first, *others = located.stored
            for other in others:
                if not _same(first.read(), other.read()):
                    self._refuse(f"{entry.key}: differs between {first.file.path} and {other.file.path}")
        elif entry.key.endswith(ZERO_PADDED):
            for stored, count in zip(located.stored, located.counts, strict=True):
                if stored.read()[count:].any():
                    self._refuse(f"{entry.key}: the experts behind the first {count} are not zero{_place(stored)}")
        self.record[entry.key] = {
            "dtype": layout.DTYPE_NAMES[located.dtype],
            "shape": list(entry.shape),
            "sha256": sha256.hexdigest(),
        }
        self.progress(sum(stored.nbytes for stored in located.stored))

    def _check_rotations(self) -> None:
        """R = H diag(s) / sqrt(n), up to one rounding of 1 / sqrt(n) that all entries share."""
        for key, located in self.located.items():
            if not key.endswith(".rotation_matrix"):
                continue
            rotation = located.whole().float()
            try:
                signs = signs_of_rotation(rotation)
            except ValueError as error:
                self._refuse(f"{key}: {error}")
                continue
            magnitude = float(rotation[0, 0].abs())
            if not torch.equal(rotation, rotation_of_signs(signs, magnitude)):
                self._refuse(f"{key}: its entries differ in magnitude, R = H diag(s) / sqrt(n) has only one")
            self._signs[key] = signs
            self.record[key]["magnitude"] = magnitude

    def _check_shared(self) -> None:
        """Keys that are one tensor of ours must agree: the frequencies of all layers, the levels of gate and up."""
        owners: dict[tuple[str, ...], str] = {}
        for key, located in self.located.items():
            names = located.entry.names
            first = owners.setdefault(names, key) if names else key
            if first != key and not torch.equal(located.whole().float(), self.located[first].whole().float()):
                self._refuse(f"{key}: differs from {first}; the model has one tensor ({names[0]}) for both")

    def _check_aliases(self, ignore_stale: bool) -> None:
        self.aliases.sort()
        for alias in self.aliases:
            canonical = canonical_key(alias)
            by_file = {stored.file: stored for stored in self.source.tensors.get(canonical, ())}
            for stored in self.source.tensors[alias] if by_file else ():
                other = by_file.get(stored.file) or next(iter(by_file.values()))
                if None in (stored.dtype, other.dtype) or not _same(stored.read(), other.read()):
                    self.stale_aliases.append(alias)
                    break
            self.progress(sum(stored.nbytes for stored in self.source.tensors[alias]))
        if not ignore_stale:
            self.problems += [
                f"{alias}: disagrees with {canonical_key(alias)}, of which it should be another name "
                "(--ignore-stale-aliases takes the latter)"
                for alias in self.stale_aliases
            ]

    def _check_ranks(self) -> None:
        """No two ranks hold the same experts: the same file twice is a checkpoint that lacks another's."""
        seen: dict[tuple[str, ...], int] = {}
        for rank, blocks in enumerate(self._blocks):
            if blocks and seen.setdefault(tuple(blocks), rank) != rank:
                first = self.source.files[seen[tuple(blocks)]].path
                self._refuse(f"{self.source.files[rank].path}: holds the same experts as {first}")

    def _check_frequencies(self, recompute: bool) -> None:
        """The frequencies of the file are replaced by those of the configuration only when asked for."""
        if not self.config.rope_enabled or self.config.rope_source == "checkpoint":
            return
        largest = 0.0
        for key, located in self.located.items():
            if key.endswith("rotary_emb.inv_freq"):
                expected = rotary_frequencies(2 * located.entry.shape[0], self.config.rope_theta)
                largest = max(largest, float((located.whole().float() / expected - 1).abs().max()))
        what = (
            f"rotary_emb.inv_freq: config.rope_source = 'config' replaces the frequencies of the file by those of "
            f"rope_theta = {self.config.rope_theta:g}, which differ by up to {largest:.2%}"
        )
        if recompute:
            self.notes.append(what)
        else:
            self._refuse(f"{what}; use rope_source = 'checkpoint', or ask for it with --recompute-rope")

    def bytes_to_write(self) -> int:
        """Bytes of the target's tensors."""
        sizes: dict[str, int] = {}
        for located in self.located.values():
            entry = located.entry
            itemsize = 4 if entry.in_fp32 and located.dtype in FLOATING else located.dtype.itemsize
            itemsize = 1 if entry.form is Form.ROTATION else itemsize
            sizes |= dict.fromkeys(entry.names, torch.Size(entry.disk_shape).numel() * itemsize)
            if entry.kept:
                sizes[layout.PUBLISHED_PREFIX + entry.key] = torch.Size(entry.shape).numel() * located.dtype.itemsize
        return sum(sizes.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that the target holds of the source: (name on disk, tensor)."""
        done: set[str] = set()
        for located in self.located.values():
            entry = located.entry
            signs = self._signs.get(entry.rotation)
            parts = self._merged(located) if entry.form is Form.BASE else located.parts()
            for name, part in zip(entry.names, parts, strict=True) if entry.names else ():
                if name not in done:
                    ours = to_ours(entry, part, signs)
                    yield name, ours.to(located.dtype) if entry.form is Form.BASE else ours
            done |= set(entry.names)
            if entry.kept:
                yield layout.PUBLISHED_PREFIX + entry.key, located.whole()
            self.progress(sum(stored.nbytes for stored in located.stored))
        self.progress(sum(stored.nbytes for alias in self.aliases for stored in self.source.tensors[alias]))

    def _merged(self, base: Located) -> Iterator[Tensor]:
        """The experts of a dense base with their adapters, W_rot + A B_rot."""
        adapters = (self.located[base.entry.sibling(leaf)].parts() for leaf in ("tqp_A", "tqp_B"))
        for dense, adapter_a, adapter_b in zip(base.parts(), *adapters, strict=True):
            yield dense.float() + adapter_a.float() @ adapter_b.float()


def _place(stored: StoredTensor) -> str:
    return f" in {stored.file.path.name}"


def _same(first: Tensor, second: Tensor) -> bool:
    """Bitwise equality of two tensors; nothing is read when they are one in memory."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return True
    return torch.equal(raw_bytes(first), raw_bytes(second))


def _non_finite(tensor: Tensor) -> int:
    """How many values are NaN or infinite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0
    low, high = torch.aminmax(tensor)
    return 0 if low.isfinite() and high.isfinite() else tensor.numel() - int(tensor.isfinite().sum())
