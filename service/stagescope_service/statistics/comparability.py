"""Whether two streams are comparable, which must be known before their numbers are trusted.

Each check (`checks`) runs on all tokens, on each rank and each round. Some also run on each sample
(`sample_checks`), so that the total does not hide a faulty part. Failed checks come first, the most
likely cause at the front. A cause precedes the ones that it explains.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final, NamedTuple, get_args

import numpy as np

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import (
    ENOUGH,
    FAR_TOKENS,
    FITS,
    MANY,
    Check,
    Scope,
    constant,
    fits,
    lag_means,
    probabilities,
    rounded,
    shifted,
    unrelated,
)
from stagescope_service.statistics.coverage import coverage, missing_values, padding
from stagescope_service.statistics.exact import are_equal, bitwise_equal
from stagescope_service.statistics.fill_values import FillValues
from stagescope_service.statistics.noise_checks import biased, edge_token, scaled
from stagescope_service.statistics.part import RankRow
from stagescope_service.statistics.profiles import Edge
from stagescope_service.statistics.sample_checks import check_samples
from stagescope_service.statistics.staleness import Drift, differ_alike, slope_in_fresh, versions
from stagescope_service.statistics.summary import Produced, Summary
from stagescope_service.statistics.sure_tokens import SureTokens, is_temperature

WHAT_TO_CHECK: Final = {
    "bitwise_equal": "whether the trainer copies the rollout's log-probs (a bypass mode)",
    "constant": "whether the stream is filled in at all, and which code fills it",
    "probabilities": "whether what is handed over is a log-prob, and of the token that was sampled",
    "coverage": "where log-probs became NaN or infinite, if they are; else which tokens the engine "
    "returns log-probs for, and what the trainer fills in for the others",
    "padding": "whether the mask ends where the response ends",
    "shifted": "whether both streams give token t the log-prob of token t: logits at t - 1 score "
    "token t",
    "unrelated": "whether rows keep their order between engine and trainer (sample_ids pair them), "
    "and both score the same token ids",
    "first_token": "what precedes a round: the chat template, white space and BOS of engine and "
    "trainer, a stale prefix cache, and prefill kernels of another precision",
    "last_token": "what ends a round: whether both sides score the stop token, and whether the "
    "mask ends there",
    "rounded": "in which dtype the engine returns log-probs, and whether one stream is a copy",
    "renormalised": "top_p, top_k and min_p of the rollout, and whether the engine returns raw or "
    "processed log-probs",
    "calibration": "sampling parameters, weights and adapters of the engine that sampled",
    "temperature": "whether both sides divide logits by the same temperature",
    "versions": "which policy version sampled which tokens, and how engine and trainer count them: "
    "the slice of staleness 0 is the mismatch alone",
}
"""Advice on each cause, the likeliest cause first."""
LIKELIEST_FIRST: Final = (*WHAT_TO_CHECK,)
_MOST: Final = 0.5
"""Minimum share of the sum of |d| in missing tokens for them to explain the difference."""
_FAR: Final = 1.0
"""Nats beyond which edge tokens of rounds are suspect, whether another check fails or not."""
_LISTED: Final = 5
_OF_MEAN_RATIO: Final = frozenset({"renormalised", "calibration"})
"""Checks that the first or last tokens of rounds alone can fail."""
_BY_EDGES: Final = _OF_MEAN_RATIO | {"shifted", "unrelated"}
"""The same if they are so far off that they outweigh all others."""
_DECISIVE: Final = frozenset(
    {"constant", "probabilities", "coverage", "unrelated", "temperature", "calibration"}
)
"""Checks without which streams are not comparable. The others need data that not every step has:
neighbours in a round, tokens that differ, reported policy versions."""
_OF_RATIOS: Final = _OF_MEAN_RATIO | {"rounded", "temperature", "first_token", "last_token"}
"""Checks that one cause may fail in the smaller counts of a rank."""


@dataclasses.dataclass(frozen=True)
class Comparability:
    """All checks, and a verdict.

    The verdict is 'comparable' or 'suspect', or 'exact' if two producers agree in all tokens. It is
    'not measured' if the streams are equal, and one is a copy of the other, their producers are
    unknown, or a token is finite in neither. It is 'unknown' if no check failed but a necessary one
    was not possible: tokens are too few, or policy drift explains its result as well.
    """

    verdict: str
    checks: tuple[Check, ...]

    @property
    def suspects(self) -> tuple[Check, ...]:
        """The failed checks, the most likely cause first."""
        return tuple(check for check in self.checks if check.status == "suspect")

    @property
    def undecided(self) -> tuple[Check, ...]:
        """The checks that the verdict needs and that could not be made or decided."""
        return tuple(each for each in self.checks if _is_undecided(each))

    @property
    def cause(self) -> str | None:
        """The name of the most likely cause, None if no check failed."""
        return next((check.name for check in self.suspects), None)


def examine(summary: Summary, ranks: Sequence[RankRow] = ()) -> Comparability:
    """Run every check on a summary's two streams and on their parts.

    Args:
        summary: The statistics of all tokens.
        ranks: The cell of each rank, if the summary covers several.
    """
    step, pair, total = _Step(summary), summary.pair, summary.total
    drift = step.drift
    found = _check_fresh(summary) if drift and summary.is_staleness_known else []
    found += [bitwise_equal(total, pair, summary.produced, ranks)]
    sure = SureTokens.of(summary)
    if drift and sure and not (sure.fit_a_temperature and differ_alike(total, summary.fresh)):
        sure = None  # policy drift moves sure tokens as another model or a temperature does
    of_total = step.check_cell(total, filled=step.filled.of_sources(None))
    if sure is not None and not (drift and drift.scales):
        *of_total, scaling, ratio = of_total
        shown, ratio = sure.judged(scaling, ratio, *pair)
        if drift and shown is not scaling:
            shown = drift.judged(shown)
        of_total += [shown, ratio]
    found += [*of_total, missing_values(summary, ranks), versions(summary)]
    scopes = [Scope(check, total.tokens, 0) for check in found]
    rounds = [
        _Slice(str(key), cell, summary.produced, step.filled.of_round(key))
        for key, cell in summary.rounds.items()
    ]
    for kind, parts in (("rank", step.ranks(ranks)), ("round", rounds)):
        if len(parts) > 1:
            scopes += step.check_slices(kind, parts)
    scopes = step.by_edge_tokens(scopes)
    scopes += check_samples(summary).scopes()
    return _rank_checks(total, _without_explained(scopes), sure)


def examine_ranks(summary: Summary, ranks: Sequence[RankRow]) -> list[Comparability]:
    """Run the checks that each rank's own tokens allow, and the checks of each of its samples.

    Args:
        summary: The statistics of the step.
        ranks: Its ranks.
    """
    step, found = _Step(summary), []
    for part, samples in zip(step.ranks(ranks), _samples_of_ranks(summary, ranks), strict=True):
        own = [
            bitwise_equal(part.cell, summary.pair, part.produced),
            *step.check_cell(part.cell, slices=len(ranks), filled=part.filled),
        ]
        checks = _without_explained([*_scopes_of(part.cell, own), *samples])
        is_of_many = _is_of_many(part.cell, summary)
        found.append(_rank_checks(part.cell, checks, is_of_many=is_of_many))
    return found


@dataclasses.dataclass(frozen=True)
class RankCause:
    """The most likely cause of some ranks, found in each by its own tokens."""

    check: Check
    places: tuple[tuple[str, int], ...]
    """(role, rank) of each."""
    alone: str
    """The check's text for the first rank."""


def causes_of_ranks(
    summary: Summary, ranks: Sequence[RankRow], besides: str | None = None
) -> tuple[RankCause, ...]:
    """Return the most likely cause of each rank by its own tokens, grouped by cause.

    Args:
        summary: The statistics of all tokens.
        ranks: The cell of each rank.
        besides: A cause that is already reported: ranks with it, or with a related check, are
            excluded.
    """
    step = _Step(summary)
    found: dict[str, list[tuple[RankRow, Check]]] = {}
    for row, part, samples in zip(
        ranks, step.ranks(ranks), _samples_of_ranks(summary, ranks), strict=True
    ):
        own = _scopes_of(row.cell, step.check_slice(part, slices=len(ranks)))
        judged = _rank_checks(row.cell, _without_explained([*own, *samples]))
        names = {check.name for check in judged.suspects}
        if not names or besides in names or {besides, judged.cause} <= _OF_RATIOS:
            continue
        check = judged.suspects[0]
        found.setdefault(check.name, []).append((row, check))
    return tuple(
        RankCause(
            _combine("rank", [(f"{row.role} {row.rank}", each) for row, each in where], len(ranks)),
            tuple((row.role, row.rank) for row, _ in where),
            where[0][1].text,
        )
        for where in found.values()
    )


def examine_cell(cell: Cell, summary: Summary, produced: Produced) -> Comparability:
    """Run the checks that need only one cell, of a rank, a round, a turn or a staleness.

    Args:
        cell: The cell.
        summary: The statistics of all tokens, including the cell's.
        produced: Who computed its tokens; for a round, a turn or a staleness, the step's producers.
    """
    step = _Step(summary)
    checks = step.check_cell(cell, slices=max(len(summary.rounds.keys), 1))
    checks.append(bitwise_equal(cell, summary.pair, produced))
    if any(check.status == "suspect" and check.name in _BY_EDGES for check in checks):
        scopes = step.by_edge_tokens(_scopes_of(cell, checks))
        # The profiles of all tokens do not show which slice has first or last tokens far off.
        checks = [scope.check for scope in scopes[: len(checks)]]
    return _rank_checks(cell, checks, is_of_many=_is_of_many(cell, summary))


def _scopes_of(cell: Cell, checks: Iterable[Check]) -> list[Scope]:
    return [Scope(check, cell.tokens, 0) for check in checks]


def _samples_of_ranks(summary: Summary, ranks: Sequence[RankRow]) -> list[list[Scope]]:
    """Return, for each rank, the checks of the samples that it holds a counting piece of."""
    rank_of = np.full(len(summary.sources), -1, np.int64)
    for at, row in enumerate(ranks):
        rank_of[[source for source in row.sources if 0 <= source < len(rank_of)]] = at
    rank = rank_of[summary.sequences.source]
    checked, sample = check_samples(summary), summary.sequences.sample_index()
    order = np.argsort(rank, kind="stable")
    ends = np.searchsorted(rank[order], np.arange(len(ranks) + 1))
    return [
        checked.scopes(np.unique(sample[order[begin:end]]))
        for begin, end in itertools.pairwise(ends.tolist())
    ]


class _Slice(NamedTuple):
    """A rank or a round: its name, its tokens, and their producers, or those of the step."""

    name: str
    cell: Cell
    produced: Produced
    filled: float
    """The sum of |d| of its tokens that were filled in."""
    rank: tuple[str, int] | None = None
    """(role, rank), if it is a rank."""


class _Step:
    """A step with what its checks share: its policy drift and the values that were filled in."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary

    @cached_property
    def filled(self) -> FillValues:
        """The values that were filled in."""
        return FillValues.of(self.summary)

    @cached_property
    def drift(self) -> Drift | None:
        """The policy drift of the tokens, None if no token is stale."""
        summary, drift = self.summary, Drift.of(self.summary)
        if drift is None:
            return None
        total, fresh = summary.total, summary.fresh
        of_all, of_fresh = (
            scaled(cell, *summary.pair, summary.sequences) for cell in (total, fresh)
        )
        slope = slope_in_fresh(of_all, of_fresh, total, fresh)
        if not summary.is_staleness_known and not summary.has_impossible_versions:
            slope = "too few"  # which tokens are fresh is not known
        return dataclasses.replace(drift, scales=slope == "absent", lacks_fresh=slope == "too few")

    def ranks(self, rows: Sequence[RankRow]) -> list[_Slice]:
        """Return the ranks as parts of the step."""
        return [
            _Slice(
                f"{row.role} {row.rank}",
                row.cell,
                row.produced or self.summary.produced,
                self.filled.of_sources(row.sources),
                (row.role, row.rank),
            )
            for row in rows
        ]

    def check_cell(self, cell: Cell, *, slices: int = 1, filled: float = 0.0) -> list[Check]:
        """Run the checks that need one cell.

        Args:
            cell: the tokens.
            slices: number of slices of the cell's kind that are checked.
            filled: the sum of |d| of its tokens that were filled in.
        """
        pair, sequences, drift = self.summary.pair, self.summary.sequences, self.drift
        found = [
            constant(cell, *pair),
            probabilities(cell, *pair),
            coverage(cell, *pair),
            rounded(cell, *pair),
            shifted(cell, *pair, filled=filled),
            unrelated(cell, *pair, drifts=drift is not None),
            padding(cell),
            scaled(cell, *pair, sequences, slices=slices),
            biased(cell, *pair, sequences),
        ]
        return found if drift is None else [drift.judged(check) for check in found]

    def check_slice(self, part: _Slice, *, slices: int) -> list[Check]:
        """Run the checks that the tokens of a slice allow."""
        cell = part.cell
        found = self.check_cell(cell, slices=slices, filled=part.filled)
        if cell.tokens >= ENOUGH and are_equal(cell) and cell[Field.BOTH_ZERO] < cell.tokens / 2:
            found.append(bitwise_equal(cell, self.summary.pair, part.produced))
        return found

    def check_slices(self, kind: str, parts: Sequence[_Slice]) -> list[Scope]:
        """Check each slice and report the ones that failed."""
        by_name: dict[str, dict[str, Check]] = {}
        for part in parts:
            for check in self.check_slice(part, slices=len(parts)):
                if check.status == "suspect":
                    by_name.setdefault(check.name, {})[part.name] = check
        found = []
        for failed in by_name.values():
            others = [part for part in parts if part.name not in failed]
            tokens = sum(part.cell.tokens for part in parts if part.name in failed)
            unknown = sum(part.cell.tokens for part in others if not fits(part.cell))
            check = _combine(kind, [*failed.items()], len(parts))
            named = (part.rank for part in parts if part.name in failed)
            ranks = tuple(rank for rank in named if rank is not None)
            found.append(Scope(dataclasses.replace(check, ranks=ranks), tokens, unknown))
        return found

    def by_edge_tokens(self, scopes: Sequence[Scope]) -> list[Scope]:
        """Return the checks, with `first_token` or `last_token` for those that these alone fail.

        If they are more than `_FAR` off, they are suspect whether another check fails or not. They
        then spoil the correlation, and make mean |d| at other lags smaller than at a token's own.
        Samples that are out of place beside them fail their own checks.
        """
        found = [*scopes]
        suspects = {scope.check.name for scope in scopes if scope.check.status == "suspect"}
        # A temperature scales the first tokens of a sure model most, too, and d with q in all.
        if "temperature" in suspects:
            return found
        _, lags = lag_means(self.summary.total)
        for edge in get_args(Edge):
            sums = self.summary.profiles.edge_tokens(edge)
            cause = None if sums is None else edge_token(edge, *sums)
            if sums is None or cause is None:
                continue
            share = self.filled.share_of_edge(sums[0])
            if share == "few":
                continue
            if share == "all":
                named = Check("coverage", "ok", "both streams cover the mask")
                found = [
                    dataclasses.replace(scope, check=named)
                    if "filled" in scope.check.values
                    else scope
                    for scope in found
                ]
            explained = _OF_MEAN_RATIO
            if lags and cause.values["others"] < FITS * min(lags)[0]:
                explained = _BY_EDGES
            found = [
                dataclasses.replace(scope, check=cause)
                if scope.check.status == "suspect" and scope.check.name in explained
                else scope
                for scope in found
            ]
            if cause.values["edge"] > _FAR and cause.values["tokens"] >= FAR_TOKENS:
                found.append(Scope(cause, self.summary.total.tokens, 0))
        return found


def _without_explained(scopes: Sequence[Scope]) -> list[Check]:
    """Return the checks without those that fail only because a slice of their tokens fails.

    Tokens out of place in two samples spoil the correlation of all.
    """
    kept = [scope.check for scope in scopes]
    for name in ("shifted", "unrelated"):
        failed = [s for s in scopes if s.check.name == name and s.check.status == "suspect"]
        # Among checks of equally many tokens the first one, over all at once, is the broadest.
        failed.reverse()
        failed.sort(key=lambda scope: scope.tokens)
        for broader in failed[1:]:
            explained = failed[0].explains(broader)
            kept.remove(broader.check if explained else failed[0].check)
            failed[0] = failed[0] if explained else broader
    return kept


def _rank_checks(
    cell: Cell,
    found: Iterable[Check],
    sure: SureTokens | None = None,
    *,
    is_of_many: bool = False,
) -> Comparability:
    """Rank the checks; if several have one name, keep the first failed one.

    Args:
        cell: The tokens.
        found: Their checks.
        sure: The sure tokens of the cell, if they are known.
        is_of_many: Whether a check that needs more tokens was made of these and others.
    """
    by_name: dict[str, Check] = {}
    for check in found:
        known = by_name.get(check.name)
        if known is None or (check.status == "suspect" and known.status != "suspect"):
            by_name[check.name] = check
    scaling = by_name.get("temperature")
    ratio = by_name.get("renormalised") or by_name.get("calibration")
    first = list(LIKELIEST_FIRST)
    if scaling is not None and ratio is not None and is_temperature(scaling, ratio, sure):
        first.remove("temperature")
        first.insert(first.index("renormalised"), "temperature")
    lacking = by_name.get("coverage")
    if lacking is not None and lacking.values.get("explains", 1.0) < _MOST:
        first.remove("coverage")
        first.insert(first.index("unrelated") + 1, "coverage")
    order = {name: place for place, name in enumerate(first)}
    checks = sorted(
        by_name.values(), key=lambda check: (check.status != "suspect", order[check.name])
    )
    suspects = {check.name for check in checks if check.status == "suspect"}
    if "bitwise_equal" in suspects and are_equal(cell):
        verdict = "not measured"
    elif suspects - ({"versions"} if are_equal(cell) else set()):
        verdict = "suspect"
    elif are_equal(cell):
        verdict = "exact" if cell.masked == cell.tokens else "not measured"
    elif cell.tokens < ENOUGH or (not is_of_many and any(map(_is_undecided, checks))):
        verdict = "unknown"
    else:
        verdict = "comparable"
    return Comparability(verdict, tuple(checks))


def _is_undecided(check: Check) -> bool:
    return check.status == "unknown" and check.name in _DECISIVE


def _is_of_many(cell: Cell, summary: Summary) -> bool:
    """Return whether a part of a step has too few tokens for the checks that its step had."""
    return cell.tokens < MANY <= summary.total.tokens


def _check_fresh(summary: Summary) -> list[Check]:
    """Return the checks that fail in the fresh tokens, which need no allowance for policy drift."""
    fresh, pair, sequences = summary.fresh, summary.pair, summary.sequences
    checks = (
        unrelated(fresh, *pair),
        scaled(fresh, *pair, sequences),
        biased(fresh, *pair, sequences),
    )
    return [check for check in checks if check.status == "suspect"]


def _combine(kind: str, where: Sequence[tuple[str, Check]], of: int) -> Check:
    """Combine one check's failures in several slices into one."""
    listed = ", ".join(name for name, _ in where[:_LISTED])
    more = ", ..." if len(where) > _LISTED else ""
    head = where[0][1]
    text = f"in {len(where)} of {of} {kind}s ({listed}{more}): {head.text}"
    return Check(head.name, "suspect", text, {**head.values, f"{kind}s": len(where)})
