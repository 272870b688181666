"""The summary: the statistics of one pair of streams over a set of tokens.

Summaries of disjoint tokens merge; a summary consists of

* cells by round, by true turn and by staleness (see `cell`),
* the histogram of |d| by round,
* the worst tokens and the non-finite tokens, K of each,
* a vector for each fragment of a sample (a row that has model tokens), and the positions of its
  sample that it covers,
* profiles of d by place, probability and lattice (see `profiles`),
* counts of the experts that rollout and trainer chose (see `routing`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from stagescope_service.statistics import cell as cells
from stagescope_service.statistics.cell import Bool, Cell, Field, Float32, Float64, Int64
from stagescope_service.statistics.histogram import Histogram
from stagescope_service.statistics.profile_bins import Bin, Profiles
from stagescope_service.statistics.routing import Routing, WorstRoutes
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_wire.errors import InvalidInput
from stagescope_wire.policy_versions import differ_in_number, is_numbered, merge_names

MAX_ENGINES: Final = 4096
"""Maximum number of engine instances of a payload; above it, engines are not distinguished."""
UNKNOWN: Final = -1
"""An unknown round, turn or token id."""
Produced = Mapping[tuple[str, str], int]
"""(producer of p, producer of q) -> number of counted tokens; '' where that is not reported."""


@dataclasses.dataclass(frozen=True)
class Slices:
    """Cells [n, WIDTH] by an ascending integer key [n] (round, turn or staleness)."""

    keys: Int64
    cells: Float64

    @classmethod
    def merge(cls, slices: Sequence[Slices]) -> Slices:
        """Merge cells with equal keys; the order of the arguments affects the last bits."""
        keys = np.concatenate([s.keys for s in slices]) if slices else np.empty(0, np.int64)
        stacked = np.concatenate([s.cells for s in slices]) if slices else cells.empty(0)
        unique, where = np.unique(keys, return_inverse=True)
        return cls(
            unique, cells.merge_groups(where.reshape(-1).astype(np.int64), len(unique), stacked)
        )

    def get(self, key: int) -> Cell | None:
        """Return the cell of a key, None if absent."""
        found = np.flatnonzero(self.keys == key)
        return Cell(self.cells[found[0]]) if found.size else None

    def items(self) -> list[tuple[int, Cell]]:
        """Return (key, cell) pairs, ascending."""
        return [(int(key), Cell(row)) for key, row in zip(self.keys, self.cells, strict=True)]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Single tokens in display order; arrays of one length.

    `sequence` is an index into the summary's sequences.
    """

    sequence: Int64
    position: Int64
    round: Int64
    turn: Int64
    token_id: Int64
    p: Float64
    q: Float64

    COLUMNS = ("sequence", "position", "round", "turn", "token_id", "p", "q")

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, order: Int64) -> Tokens:
        """Return the tokens at these indexes."""
        return Tokens(*(getattr(self, name)[order] for name in self.COLUMNS))


_W_SUM, _RAW_SUM, _WEIGHT_SUM = map(ROW.index, ("w_sum", "raw_sum", "weight_sum"))
_NO_INT: Final = np.empty(0, np.int64)
_NO_FLOAT: Final = np.empty(0)
NO_TOKENS: Final = Tokens(_NO_INT, _NO_INT, _NO_INT, _NO_INT, _NO_INT, _NO_FLOAT, _NO_FLOAT)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """One row for each fragment of a sample.

    Attributes:
        samples: sample_uid, or '' if the payload has none.
        source: int64 [n], index of the payload (`Summary.sources`).
        row: int64 [n], index of the row in that payload.
        placed: bool [n, 2]: whether positions and rounds are relative to the full sample.
        values: float64 [n, len(ROW)].
        cover: int64 [stretches, 3]: sequence, first and last position (half open) of each run of
            model tokens.
        marks: int64 [marks, 3]: sequence, position and id of tokens that distinguish the sample
            from others (`identity`); empty without sample ids, and in a step's merged summary.
        mark_values: float32 [marks]: their q.
    """

    samples: tuple[str, ...]
    source: Int64
    row: Int64
    placed: Bool
    values: Float64
    cover: Int64
    marks: Int64 = dataclasses.field(default_factory=lambda: np.empty((0, 3), np.int64))
    mark_values: Float32 = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))

    def __len__(self) -> int:
        return len(self.samples)

    def runs(self) -> list[Int64]:
        """Return int64 [runs, 2] of each fragment: the positions of its model tokens, half open."""
        cover = self.cover[np.argsort(self.cover[:, 0], kind="stable")]
        bounds = np.searchsorted(cover[:, 0], np.arange(1, len(self)))
        return np.split(cover[:, 1:], bounds)[: len(self)]

    def keys(self) -> list[tuple[str, int, int]]:
        """Return the samples' identity and sort keys."""
        return [self.key(at) for at in range(len(self))]

    def key(self, at: int) -> tuple[str, int, int]:
        """Return one sample's key: the id, else (source, row)."""
        sample = self.samples[at]
        return (sample, 0, 0) if sample else ("", int(self.source[at]), int(self.row[at]))

    def sample_index(self) -> Int64:
        """Return int64 [n]: the index of each fragment's sample in `by_sample`."""
        keys = self.keys()
        index_of = {key: index for index, key in enumerate(sorted(set(keys)))}
        return np.array([index_of[key] for key in keys], np.int64)

    def by_sample(self) -> tuple[list[tuple[str, int, int]], Float64]:
        """Merge the fragments of each sample: (keys, values [samples, len(ROW)]), by key."""
        unique, where = sorted(set(self.keys())), self.sample_index()
        merged = np.zeros((len(unique), len(ROW)))
        np.add.at(merged, where, self.values)
        largest = ROW.index("d_abs_max")
        merged[:, largest] = 0.0
        np.maximum.at(merged[:, largest], where, self.values[:, largest])
        return unique, merged

    @cached_property
    def different_share(self) -> float:
        """The share of the tokens that different responses have, over 0 to 1.

        Responses with as many tokens and, to 0.01 nats, the same sum of q are copies: answers of a
        group that was sampled from a sure model.
        """
        columns = [ROW.index(name) for name in ("tokens", "q_sum")]
        tokens, q_sum = self.values[:, columns].T
        known = np.isfinite(q_sum) & (tokens > 0)
        total = float(tokens[known].sum())
        different = np.unique(np.stack([tokens, np.round(q_sum, 2)])[:, known], axis=1)
        return float(different[0].sum()) / total if total else 1.0

    def fragmented(self) -> Bool:
        """bool [n]: fragments without an offset whose sample has further fragments here."""
        keys = self.keys()
        count = Counter(keys)
        shared = np.array([count[key] > 1 for key in keys], bool)
        return shared & ~self.placed.all(axis=1)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The statistics of one pair of streams over the tokens of one or more payloads."""

    pair: tuple[str, str]
    settings: StatisticsSettings
    dtypes: dict[str, tuple[str, ...]]
    """Stream -> the dtypes in which it arrived."""
    rounds: Slices
    turns: Slices
    staleness: Slices
    histogram: Histogram
    worst: Tokens
    non_finite: Tokens
    sequences: Sequences
    sources: tuple[str, ...]
    """A name for each payload."""
    empty_samples: tuple[str, ...]
    """Samples of rows without a model token, ascending; another fragment may contain some."""
    unnamed_empty: int
    """Number of rows without a model token and without a sample id."""
    versions: tuple[int, ...]
    """Policy versions under the mask, ascending; empty if not reported."""
    unequal: Tokens = NO_TOKENS
    """The first token, by sample and position, whose p and q are finite and differ, if any."""
    produced: Produced = dataclasses.field(default_factory=dict)
    """Who computed the two streams of how many tokens."""
    ignored: tuple[str, ...] = ()
    """Tensors with more distinct rounds, turns or versions than the limit; they are not used."""
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Reason -> number of the payload's tokens under the mask that this summary excludes."""
    profiles: Profiles = dataclasses.field(default_factory=lambda: Profiles.merge([]))
    """Sums of d by place, probability and lattice."""
    engines: Mapping[str, Float64] = dataclasses.field(default_factory=dict)
    """Engine instance -> `profiles.COLUMNS` of its tokens, where rows say theirs; see
    `of_engines`."""
    version_names: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Texts of those versions that are texts, in the order of their appearance."""
    routing: Routing | None = None
    """Whether rollout and trainer chose the same experts; None: no routes are recorded."""
    token_digest: str = ""
    """A hash of the rows' token ids and masks; '' with sample ids, without responses, and in a
    step's merged summary."""

    @cached_property
    def total(self) -> Cell:
        """The cell of all tokens."""
        return Cell(cells.merge(self.rounds.cells))

    def of_engines(self) -> dict[str, Bin]:
        """Return the sums over the tokens of each engine instance, as bins of key 0."""
        return {name: Bin.of(0, values) for name, values in self.engines.items()}

    @property
    def fresh(self) -> Cell:
        """The cell of the tokens of staleness 0 if every token's age is known, else of all."""
        if not self.is_staleness_known:
            return self.total
        return self.staleness.get(0) or Cell(cells.empty())

    @property
    def has_stale_tokens(self) -> bool:
        """Whether older policy versions sampled tokens; unknown for a rank alone."""
        return bool((self.staleness.keys > 0).any())

    @property
    def has_impossible_versions(self) -> bool:
        """Whether tokens are of policy versions ahead of the trainer's own, which do not exist."""
        return bool((self.staleness.keys < 0).any())

    @property
    def is_staleness_known(self) -> bool:
        """Whether the age of every token is known and possible for a past trainer.

        In a merged summary, each payload decides by its own texts and tensors about its tokens.
        """
        known = bool(self.staleness.keys.size) and self.are_versions_numbered
        return known and not self.has_impossible_versions and not self.tokens_of_unknown_age

    @property
    def tokens_of_unknown_age(self) -> int:
        """Number of tokens under the mask that are in no cell by staleness."""
        return self.total.masked - int(self.staleness.cells[:, Field.MASKED].sum())

    @property
    def version_labels(self) -> tuple[str, ...]:
        """The policy versions under the mask, the oldest first if their order is known."""
        named, codes = self.version_names, [*self.versions]
        if not self.are_versions_numbered:
            codes = [*(code for code in codes if code not in named), *named]
        return tuple(dict.fromkeys(named.get(code, str(code)) for code in codes))

    @property
    def why_no_staleness(self) -> str:
        """Why the age of the tokens is not known."""
        if not self.versions:
            return "the policy versions of the tokens are not recorded (versions)"
        if not self.are_versions_numbered:
            return "the policy versions of the tokens are texts that do not differ in one number"
        if self.has_impossible_versions:
            return "tokens are of policy versions ahead of the trainer's own"
        if self.staleness.keys.size:
            return (
                f"the policy version of {self.tokens_of_unknown_age} of {self.total.masked} "
                "tokens is not recorded (versions, and policy_version= of the stage, on each rank)"
            )
        return "the trainer's own version is not recorded (policy_version= of the stage)"

    @property
    def are_versions_numbered(self) -> bool:
        """Whether the order of the policy versions is known.

        Texts without a number have no order, and texts around a number must be equal on all ranks.
        """
        named = self.version_names
        return all(map(is_numbered, named)) and differ_in_number(named.values())

    @property
    def empty_rows(self) -> int:
        """Number of samples (else rows) without a model token; they are in no sequence mean."""
        return self.unnamed_empty + len(set(self.empty_samples) - set(self.sequences.samples))

    @property
    def digest(self) -> str:
        """A hash of the numbers: equal for bitwise equal streams with equal rows."""
        hashed = hashlib.blake2b(digest_size=16)
        for array in (self.rounds.keys, self.rounds.cells, self.sequences.values):
            hashed.update(np.ascontiguousarray(array).tobytes())
        return hashed.hexdigest()

    def named(self, *sources: str) -> Summary:
        """Return a copy with other payload names."""
        return dataclasses.replace(self, sources=sources)

    def without_settings(self) -> Summary:
        """Return the summary that a run without settings has: its weights are the raw ones."""
        values = self.sequences.values.copy()
        values[:, _W_SUM] = values[:, _RAW_SUM]
        values[:, _WEIGHT_SUM] = np.nan  # unknown: 1 + the mean of raw_sum stands for its mean
        rounds, turns, ages = (
            dataclasses.replace(own, cells=cells.without_settings(own.cells))
            for own in (self.rounds, self.turns, self.staleness)
        )
        return dataclasses.replace(
            self,
            settings=StatisticsSettings(worst=self.settings.worst),
            sequences=dataclasses.replace(self.sequences, values=values),
            rounds=rounds,
            turns=turns,
            staleness=ages,
        )

    @classmethod
    def merge(cls, summaries: Sequence[Summary]) -> Summary:
        """Merge summaries of disjoint tokens with equal pairs and settings.

        Counts, extremes, histograms and kept tokens do not depend on the order; sums do in their
        last bits, so merge in a fixed order.

        Raises:
            InvalidInput: no summary, or different pairs or settings.
        """
        if not summaries:
            raise InvalidInput("no summary to merge", expected="at least one")
        head = summaries[0]
        if any((s.pair, s.settings) != (head.pair, head.settings) for s in summaries):
            raise InvalidInput(
                f"summaries of pairs {sorted({s.pair for s in summaries})} and of "
                f"{len({s.settings for s in summaries})} settings",
                expected="one pair and one settings",
            )
        if len(summaries) == 1:
            return head
        sequences, starts = _merge_sequences(summaries)
        worst, non_finite, unequal = (
            _joined([getattr(s, name) for s in summaries], starts)
            for name in ("worst", "non_finite", "unequal")
        )
        keep = head.settings.worst
        worst = ordered(worst, sequences, by_d=True, keep=keep)
        names = merge_names(s.version_names for s in summaries)
        return cls(
            pair=head.pair,
            settings=head.settings,
            dtypes=_merge_texts([s.dtypes for s in summaries]),
            rounds=Slices.merge([s.rounds for s in summaries]),
            turns=Slices.merge([s.turns for s in summaries]),
            staleness=Slices.merge([s.staleness for s in summaries]),
            histogram=Histogram.merge([s.histogram for s in summaries]),
            worst=worst,
            non_finite=ordered(non_finite, sequences, by_d=False, keep=keep),
            sequences=sequences,
            sources=tuple(name for s in summaries for name in s.sources),
            empty_samples=tuple(sorted({name for s in summaries for name in s.empty_samples})),
            unnamed_empty=sum(s.unnamed_empty for s in summaries),
            versions=tuple(sorted({v for s in summaries for v in s.versions}.union(names))),
            unequal=ordered(unequal, sequences, by_d=False, keep=1),
            produced=merge_produced(s.produced for s in summaries),
            ignored=tuple(sorted({name for s in summaries for name in s.ignored})),
            left_out=dict(sum((Counter(s.left_out) for s in summaries), Counter())),
            profiles=Profiles.merge([s.profiles for s in summaries]),
            engines=_merge_engines([s.engines for s in summaries]),
            version_names=names,
            routing=_merge_routing([s.routing for s in summaries], starts, worst),
        )


def _merge_routing(
    parts: Sequence[Routing | None], starts: Sequence[int], worst: Tokens
) -> Routing | None:
    known = [(part, at) for part, at in zip(parts, starts, strict=True) if part is not None]
    routes = WorstRoutes.merge([part.worst for part, _ in known], [at for _, at in known])
    return Routing.merge([part for part, _ in known], routes.only(worst.sequence, worst.position))


def _merge_engines(tables: Sequence[Mapping[str, Float64]]) -> dict[str, Float64]:
    merged: dict[str, Float64] = {}
    for table in tables:
        for engine, values in table.items():
            merged[engine] = merged[engine] + values if engine in merged else values
    return dict(sorted(merged.items()))


def _merge_sequences(summaries: Sequence[Summary]) -> tuple[Sequences, list[int]]:
    """Concatenate the sequences; return them and the start index of each summary's."""
    starts = [0, *itertools.accumulate(len(s.sequences) for s in summaries)][:-1]
    sources = [0, *itertools.accumulate(len(s.sources) for s in summaries)][:-1]
    moved = [
        dataclasses.replace(
            summary.sequences,
            source=summary.sequences.source + source,
            cover=summary.sequences.cover + np.array([start, 0, 0]),
            marks=summary.sequences.marks + np.array([start, 0, 0]),
        )
        for summary, start, source in zip(summaries, starts, sources, strict=True)
    ]
    samples = tuple(sample for part in moved for sample in part.samples)
    names = [field.name for field in dataclasses.fields(Sequences) if field.name != "samples"]
    arrays = {name: np.concatenate([getattr(part, name) for part in moved]) for name in names}
    return Sequences(samples, **arrays), starts


def merge_produced(tables: Iterable[Produced]) -> dict[tuple[str, str], int]:
    """Add up the tokens by their producers, in the order of the producers' names."""
    tokens = Counter[tuple[str, str]]()
    for table in tables:
        tokens.update(table)
    return dict(sorted(tokens.items()))


def _merge_texts(tables: Sequence[Mapping[str, tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
    """Return stream -> the union of the tables' texts, ascending."""
    streams = sorted({stream for table in tables for stream in table})
    return {
        stream: tuple(sorted({text for table in tables for text in table.get(stream, ())}))
        for stream in streams
    }


def _joined(tables: Sequence[Tokens], starts: Sequence[int]) -> Tokens:
    """Concatenate tables whose sequences begin at these indexes."""
    moved = [
        dataclasses.replace(table, sequence=table.sequence + start)
        for table, start in zip(tables, starts, strict=True)
    ]
    return Tokens(
        *(np.concatenate([getattr(table, name) for table in moved]) for name in Tokens.COLUMNS)
    )


def ordered(tokens: Tokens, sequences: Sequences, *, by_d: bool, keep: int) -> Tokens:
    """Sort tokens by (|d| descending if `by_d`, sample, position) and keep the first ones."""
    size = np.abs(tokens.p - tokens.q) if by_d else np.zeros(len(tokens))
    order = sorted(
        range(len(tokens)),
        key=lambda i: (-size[i], sequences.key(int(tokens.sequence[i])), int(tokens.position[i])),
    )
    return tokens.take(np.array(order[:keep], np.int64))
