"""Conversion of catalogue rows to the parts of a step summary.

The coordinator (step summaries of closed steps) and the API (slices and open steps) share it, so
that equal rows give equal numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stagescope_service.statistics.codec import summary_from_bytes
from stagescope_service.statistics.part import PartRecord
from stagescope_service.store.tables import ProcessColumns, SummaryRow
from stagescope_wire.schema import LAYOUT_COLUMNS, Part


def part_key(incarnation: str, seq: int) -> str:
    """Return the key of a payload's part in a step summary."""
    return f"{incarnation}:{seq}"


def pair_name(pair: tuple[str, str]) -> str:
    """Return the value of the column `summaries.pair` for a pair of streams."""
    return "/".join(pair)


def incarnation_of(key: str) -> str:
    """Return the incarnation in a key that `part_key` made."""
    return key.rpartition(":")[0]


def part_records(
    summaries: Iterable[SummaryRow],
    processes: Iterable[ProcessColumns],
    replaced: Collection[tuple[str, int | None]] = (),
) -> list[PartRecord]:
    """Return the parts of `summaries`.

    Args:
        summaries: with their blobs; rows without one are skipped.
        processes: for the layouts.
        replaced: (incarnation, seq) of payloads that do not count (`Catalogue.replaced`).

    Raises:
        InvalidInput: a blob is not a summary of this version.
    """
    layouts = {
        row["incarnation"]: {
            name: value
            for name, value in row.items()
            if name in LAYOUT_COLUMNS and isinstance(value, str | int)
        }
        for row in processes
    }
    return [
        PartRecord(
            key=part_key(row["incarnation"], row["seq"]),
            summary=summary_from_bytes(row["summary"]),
            stage=row["stage"],
            role=row["role"],
            rank=row["rank"],
            part=Part.of_columns(row),
            data_rank=row["data_rank"],
            layout=layouts.get(row["incarnation"], {}),
            incarnation=row["incarnation"],
        )
        for row in summaries
        if row["summary"] is not None and (row["incarnation"], row["seq"]) not in replaced
    ]
