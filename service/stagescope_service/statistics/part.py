"""Inputs of a step summary (parts), and its results by rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.summary import Produced, Summary
from stagescope_wire.schema import ROLES, Part

GroupKey = tuple[object, ...]
"""The identity of a set of ranks: their role, their grouping, the index, the cp rank."""
Priority = tuple[bool, int, int, int, int, int, str, tuple[int, int], int, str, str]
Precedence = tuple[bool, int, int, tuple[int, str], tuple[int, int], int, int, int, str, str]

_FIRST_PART: Final = Part()
_ROW_CONTENT: Final = [ROW.index(name) for name in ("tokens", "q_sum", "qq_sum", "non_finite")]
_ENOUGH_ROWS: Final = 32
"""Minimum tokens that show equal rows, by sums of a rank's rollout log-probs, or by the token ids
and masks of a payload."""


@dataclasses.dataclass(frozen=True)
class PartRecord:
    """One rank's summary of one part of a stage.

    Attributes:
        key: The caller's name for it, unique among the parts handed over.
        data_rank: Ranks with the same rows share it; None if the process did not report one.
        layout: `schema.LAYOUT_COLUMNS` by name; unknown ones are absent.
        handed: The summary of the full payload, if `summary` was recomputed without tokens that
            count elsewhere.
        skipped: The (row, first, last) positions that `summary` excludes.
        ranked: The same without tokens that another part of this rank counts
            (`ranks_to_recompute`).
    """

    key: str
    summary: Summary
    stage: str
    role: str
    rank: int
    part: Part = _FIRST_PART
    data_rank: int | None = None
    layout: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    incarnation: str = ""
    handed: Summary | None = None
    skipped: tuple[tuple[int, int, int], ...] = ()
    ranked: Summary | None = None

    def without_settings(self) -> PartRecord:
        """Return the part of a run without settings for the statistics."""
        return dataclasses.replace(
            self,
            summary=self.summary.without_settings(),
            handed=self.handed and self.handed.without_settings(),
            ranked=self.ranked and self.ranked.without_settings(),
        )

    @property
    def full_summary(self) -> Summary:
        """The summary of the full payload."""
        return self.handed or self.summary

    @property
    def digest(self) -> str:
        """A hash of the numbers; replicas of the same data have equal ones."""
        return (self.handed or self.summary).digest

    @property
    def token_digest(self) -> str:
        """A hash of the token ids and masks of rows without sample ids; '' if they do not
        distinguish these rows from others, because they are unknown or few."""
        full = self.full_summary
        return full.token_digest if full.total.masked >= _ENOUGH_ROWS else ""

    @property
    def order(self) -> Priority:
        """Sort key: the order in which parts are merged and samples get their names."""
        part, role = self.part, role_order(self.role)
        piece = (part.epoch, part.occurrence, part.minibatch, part.microbatch)
        # A driver's copy of the batch comes last: it would cut across what the ranks hold.
        return (
            self.role not in ROLES,
            *piece,
            *role,
            self._rank_position,
            self.rank,
            self.incarnation,
            self.key,
        )

    @property
    def precedence(self) -> Precedence:
        """Sort key: among parts that hold the same tokens, the lowest counts.

        The newest data of a rank counts. A later epoch does not, since its weights have moved.
        Neither does a later pass of `current` log-probs, which an update may precede.
        """
        part = self.part
        moves = self.summary.pair[0] == "current"
        return (
            self.role not in ROLES,
            part.epoch,
            part.occurrence if moves else -part.occurrence,
            role_order(self.role),
            self._rank_position,
            self.rank,
            -part.minibatch,
            -part.microbatch,
            self.incarnation,
            self.key,
        )

    @property
    def sender(self) -> GroupKey:
        """Key of the passes of one rank that should give each of its tokens the same numbers."""
        passes = self.part.occurrence if self.summary.pair[0] == "current" else None
        return (self.role, self.rank, self.part.epoch, passes)

    @property
    def passes(self) -> GroupKey:
        """Key of the passes in which all ranks that hold a sample should give it the same rows."""
        role, _, epoch, passes = self.sender
        return (role, epoch, passes)

    @property
    def _rank_position(self) -> tuple[int, int]:
        """Sort key: tp 0 first, then the last pp, if they are known."""
        return int(self.layout.get("tp_rank") or 0), -int(self.layout.get("pp_rank") or 0)

    @property
    def group(self) -> GroupKey:
        """Key of the group of ranks that hold the same tokens."""
        cp, dp = self.layout.get("cp_rank"), self.layout.get("dp_rank")
        if self.data_rank is not None:
            return (self.role, "data", self.data_rank, cp)
        if dp is not None:
            return (self.role, "dp", dp, cp)
        return (self.role, "rank", self.rank, cp)

    @property
    def has_ids(self) -> bool:
        """Whether every fragment has a sample id."""
        return all(self.summary.sequences.samples) and len(self.summary.sequences) > 0

    @property
    def cp_rank(self) -> object:
        """The context-parallel rank, None if samples are not split."""
        return self.layout.get("cp_rank") if int(self.layout.get("cp_size") or 1) > 1 else None


class Recompute(NamedTuple):
    """A part to recompute without the (row, first, last) positions that counted elsewhere."""

    key: str
    skips: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class RankRow:
    """One rank's own tokens, whether or not they count in the step summary."""

    role: str
    rank: int
    cell: Cell
    parts: int
    counted_parts: int
    produced: Produced = dataclasses.field(default_factory=dict)
    """Who computed its tokens' streams."""
    sources: tuple[int, ...] = ()
    """Indexes in `Summary.sources` of its parts that count."""


def role_order(role: str) -> tuple[int, str]:
    """Return the sort key of a role; those of `schema.ROLES` come before others."""
    return (ROLES.index(role) if role in ROLES else len(ROLES), role)


def same_rows(counted: Sequence[PartRecord]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return the ranks that handed over the same rows and each count.

    The rollout's log-probs of two samples are never equal in every bit, and neither are their sums,
    except in a constant stream. Ranks that name samples, a data_rank or a dp_rank said which rows
    they hold. A group has at least one rank that did not.
    """
    contents: dict[tuple[str, int], list[tuple[Part, bytes]]] = {}
    cells_of: dict[tuple[str, int], list[Cell]] = {}
    silent: set[tuple[str, int]] = set()
    for record in counted:
        place, summary = (record.role, record.rank), record.full_summary
        rows = summary.sequences.values[:, _ROW_CONTENT].tobytes()
        contents.setdefault(place, []).append((record.part, rows))
        cells_of.setdefault(place, []).append(summary.total)
        if not record.has_ids and record.data_rank is None and "dp_rank" not in record.layout:
            silent.add(place)
    groups: dict[tuple[tuple[Part, bytes], ...], list[tuple[str, int]]] = {}
    for place, parts in contents.items():
        tokens = sum(cell.tokens for cell in cells_of[place])
        varies = any(cell[Field.Q_MIN] < cell[Field.Q_MAX] for cell in cells_of[place])
        if tokens >= _ENOUGH_ROWS and varies:
            groups.setdefault(tuple(parts), []).append(place)
    return tuple(
        tuple(sorted(group))
        for group in groups.values()
        if len(group) > 1 and not silent.isdisjoint(group)
    )
