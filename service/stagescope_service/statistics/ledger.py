"""The sample positions that have been counted, and copies of samples that should be alike."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from stagescope_service.statistics.identity import Identities, RowIdentity
from stagescope_service.statistics.part import GroupKey, PartRecord
from stagescope_service.statistics.summary import Summary

Key = tuple[str, str]
"""Name of the sample, and the context-parallel rank if positions inside it are unknown."""

Interval = tuple[int, int]
"""Half open."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """The part of a summary that was counted before.

    Attributes:
        skips: (row, first, last) stretches that were counted before, or that belong to a row
            which its sender replaced.
        fresh: number of tokens that count now.
        other_mask: the claim with a row that replaces one of this summary but masks other tokens.
    """

    skips: tuple[tuple[int, int, int], ...]
    fresh: int
    other_mask: str | None = None

    @property
    def is_all_repeated(self) -> bool:
        """Whether there is no new token."""
        return self.fresh == 0 and bool(self.skips)

    @property
    def repeated(self) -> int:
        """Number of tokens that were counted before."""
        return sum(last - first for _, first, last in self.skips)


class Ledger:
    """Disjoint, sorted intervals of counted positions by sample."""

    def __init__(self) -> None:
        self._intervals: dict[Key, list[Interval]] = {}
        self._rows: dict[tuple[GroupKey, Key], tuple[str, list[Interval]]] = {}
        """A row that begins with its sample, of each sender -> the name of its claim, its runs."""

    def claim(
        self,
        summary: Summary,
        cp_rank: object,
        identities: Sequence[RowIdentity],
        *,
        sender: GroupKey = (),
        name: str = "",
    ) -> Claim:
        """Add a summary's coverage and return the part of it that does not count.

        If a sample has several rows, the one that is claimed first counts. The rows of a summary
        are claimed from last to first.

        Args:
            summary: The summary of one part.
            cp_rank: Its context-parallel rank, None if samples are not split.
            identities: The identity of each of its sequences.
            sender: A rank, or the ranks of a role. If two of its rows begin with their sample and
                share tokens, only one of them counts at all.
            name: The name of this claim in `Claim.other_mask`.
        """
        sequences = summary.sequences
        runs, rows = sequences.runs(), sequences.row.tolist()
        placed = sequences.placed[:, 0].tolist()
        skips: list[tuple[int, int, int]] = []
        fresh, other_mask = 0, None
        for index in reversed(range(len(sequences))):
            identity, row = identities[index], rows[index]
            stretches = runs[index] + identity.shift
            own: list[Interval] = [*map(tuple, stretches.tolist())]
            repeated = own
            if not identity.dropped:
                # Context-parallel parts without an offset all begin at 0.
                part = "" if cp_rank is None or placed[index] else str(cp_rank)
                key = (identity.sample, part)
                present = self._intervals.setdefault(key, [])
                known = None if placed[index] else self._rows.setdefault((sender, key), (name, own))
                if known is not None and known[1] is not own and _overlap(present, own):
                    other_mask = other_mask or (known[0] if known[1] != own else None)
                else:
                    repeated = []
                    if not present and (stretches[1:, 0] > stretches[:-1, 1]).all():
                        present += own  # the sample's first row, nearly always
                    else:
                        repeated = [each for run in own for each in self._add(present, *run)]
                    tokens = int((stretches[:, 1] - stretches[:, 0]).sum())
                    fresh += tokens - sum(b - a for a, b in repeated)
            skips.extend((row, a - identity.shift, b - identity.shift) for a, b in repeated)
        return Claim(tuple(sorted(skips)), fresh, other_mask)

    @staticmethod
    def _add(present: list[Interval], first: int, last: int) -> list[Interval]:
        """Add first..last to disjoint intervals; return the stretches that were present before."""
        begin = max(0, bisect.bisect_left(present, (first, first)) - 1)
        end = begin
        repeated, low, high = [], first, last
        while end < len(present) and present[end][0] <= last:
            a, b = present[end]
            if b < first:
                begin += 1
            else:
                if max(a, first) < min(b, last):
                    repeated.append((max(a, first), min(b, last)))
                low, high = min(low, a), max(high, b)
            end += 1
        present[begin:end] = [(low, high)]
        return repeated


def _overlap(present: Sequence[Interval], runs: Sequence[Interval]) -> bool:
    """Return whether a run has a position in common with disjoint, sorted intervals."""
    for first, last in runs:
        at = bisect.bisect_left(present, (last, last)) - 1
        if at >= 0 and present[at][1] > first:
            return True
    return False


class CopyChecker:
    """Finds copies whose numbers or masks differ, part by part in the order of precedence."""

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._contents: dict[tuple[object, ...], tuple[bytes, str]] = {}
        """Piece of a sample -> its numbers, and the part that has them."""
        self._masks: dict[tuple[object, ...], tuple[bytes, str]] = {}
        """Sample in a part of a group of replicas -> its mask, and the part that has it."""

    def differing(self, record: PartRecord, holder: PartRecord) -> str | None:
        """Register a part's samples; return an earlier part with other numbers or masks for them.

        The parts come in the order of their precedence: the first one counts.

        Args:
            record: The part.
            holder: The first part of its group and number.
        """
        summary = record.full_summary
        identities = self._identities.of_rows(record.key, summary)
        found = None
        masks: dict[str, bytes] = {}
        sequences = summary.sequences
        for identity, own, values in zip(
            identities, sequences.runs(), sequences.values, strict=True
        ):
            # Sums of other tokens of the sample differ without a difference in what both hold.
            runs = (own + identity.shift).tobytes()
            masks[identity.sample] = masks.get(identity.sample, b"") + runs
            if identity.dropped:
                found = found or holder.key
            for key in _passes(record, (identity.sample, runs, record.cp_rank)):
                content, owner = self._contents.setdefault(key, (values.tobytes(), record.key))
                if owner != record.key and content != values.tobytes():
                    found = found or owner
        return found or self._other_mask(record, masks)

    def _other_mask(self, record: PartRecord, masks: dict[str, bytes]) -> str | None:
        """Return a part whose rank is a declared replica of the record's and masks other tokens.

        Ranks that say where their rows begin may hold other pieces of the same samples.

        Args:
            record: The part.
            masks: Sample -> its runs of model tokens in the part.
        """
        summary = record.full_summary
        if summary.sequences.placed[:, 0].any():
            return None
        for sample in summary.empty_samples:
            masks.setdefault(sample, b"")
        found = None
        for sample, runs in masks.items():
            key = (*record.group, record.part, sample)
            known, owner = self._masks.setdefault(key, (runs, record.key))
            if owner != record.key and known != runs:
                found = found or owner
        return found


def _passes(record: PartRecord, piece: tuple[object, ...]) -> list[tuple[object, ...]]:
    """Return the keys under which a piece of a sample has one content.

    All ranks of a role compute it alike in one pass. One rank computes it alike in all passes,
    unless its weights change in between. The weights of `old` log-probs do not.
    """
    role, part = record.role, record.part
    keys: list[tuple[object, ...]] = [(*piece, role, part.epoch, part.occurrence)]
    if record.summary.pair[0] == "old":
        keys.append((*piece, role, part.epoch, "rank", record.rank))
    return keys
