"""Copies of samples that should be alike: those of replicas, and of several passes of a rank."""

from __future__ import annotations

import numpy as np

from stagescope_service.statistics.identity import Identities
from stagescope_service.statistics.part import PartRecord


class Copies:
    """Finds copies whose numbers or masks differ, part by part in the order of precedence."""

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._contents: dict[tuple[object, ...], tuple[bytes, str]] = {}
        """Piece of a sample -> its numbers, and the part that has them."""
        self._masks: dict[tuple[object, ...], tuple[bytes, str]] = {}
        """Sample in a part of a group of replicas -> its mask, and the part that has it."""

    def differing(self, record: PartRecord, holder: PartRecord) -> str | None:
        """Register a part's samples; return a part before it with other numbers or masks of them.

        The parts come in the order of their precedence: the first one counts.

        Args:
            record: The part.
            holder: The first part of its group and number.
        """
        summary = record.full_summary
        places = self._identities.places_of(record.key, summary)
        cover = summary.sequences.cover
        bounds = np.searchsorted(cover[:, 0], np.arange(len(places) + 1))
        found = None
        masks: dict[str, bytes] = {}
        for index, (place, values) in enumerate(zip(places, summary.sequences.values, strict=True)):
            # Sums of other tokens of the sample differ without a difference in what both hold.
            runs = (cover[bounds[index] : bounds[index + 1], 1:] + place.shift).tobytes()
            masks[place.sample] = masks.get(place.sample, b"") + runs
            if place.dropped:
                found = found or holder.key
            for key in _passes(record, (place.sample, runs, record.cp_rank)):
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

    All ranks of a role compute it alike in one pass, and one rank in all of them, unless its
    weights change in between: those of `old` log-probs do not.
    """
    role, part = record.role, record.part
    keys: list[tuple[object, ...]] = [(*piece, role, part.epoch, part.occurrence)]
    if record.summary.pair[0] == "old":
        keys.append((*piece, role, part.epoch, "rank", record.rank))
    return keys
