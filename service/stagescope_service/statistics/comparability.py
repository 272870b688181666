"""Whether two streams are comparable, which must be known before their numbers are trusted.

Each check (`checks`) runs on all tokens, on each rank and each round. Some also run on each sample
(`sample_checks`), so that the total does not hide a faulty part. Failed checks come first, the most
likely cause at the front. A cause precedes the ones that it explains.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from stagescope_service.statistics.cell import Bool, Cell, Field, Int64
from stagescope_service.statistics.checks import (
    ENOUGH,
    MANY,
    Check,
    Scope,
    unrelated,
)
from stagescope_service.statistics.coverage import missing_values
from stagescope_service.statistics.exact import are_equal, bitwise_equal
from stagescope_service.statistics.noise_checks import biased, scaled
from stagescope_service.statistics.part import RankRow
from stagescope_service.statistics.quick_look import may_fail
from stagescope_service.statistics.sample_checks import check_samples
from stagescope_service.statistics.staleness import differ_alike, versions
from stagescope_service.statistics.step_checks import (
    BY_EDGES,
    OF_MEAN_RATIO,
    StepChecks,
    combine,
    scopes_of,
)
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
_DECISIVE: Final = frozenset(
    {"constant", "probabilities", "coverage", "unrelated", "temperature", "calibration"}
)
"""Checks without which streams are not comparable. The others need data that not every step has:
neighbours in a round, tokens that differ, reported policy versions."""
_OF_RATIOS: Final = OF_MEAN_RATIO | {"rounded", "temperature", "first_token", "last_token"}
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
    step, pair, total = StepChecks(summary), summary.pair, summary.total
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
    scopes += step.check_slices("rank", step.ranks(ranks))
    scopes += step.check_slices("round", step.rounds())
    scopes = _placed_gaps(step.by_edge_tokens(scopes), total, ranks)
    scopes += check_samples(summary).scopes()
    return _rank_checks(total, _without_explained(scopes), sure)


def _placed_gaps(scopes: Sequence[Scope], total: Cell, ranks: Sequence[RankRow]) -> list[Scope]:
    """Return the checks without `coverage` of all tokens, if it fails in some ranks and these hold
    every token that a stream lacks.

    The check of these ranks names them, however large their share of the tokens is.
    """
    cells = {(row.role, row.rank): row.cell for row in ranks}
    for scope in scopes:
        if scope.check.name == "coverage" and scope.check.ranks:
            lacking = sum(_lacking(cells[rank]) for rank in scope.check.ranks)
            if lacking == _lacking(total) and len(scope.check.ranks) < len(cells):
                return [each for each in scopes if each.check.name != "coverage" or each is scope]
    return [*scopes]


def _lacking(cell: Cell) -> float:
    return cell[Field.P_LACKS] + cell[Field.Q_LACKS]


def examine_ranks(summary: Summary, ranks: Sequence[RankRow]) -> list[Comparability]:
    """Run the checks that each rank's own tokens allow, and the checks of each of its samples.

    Args:
        summary: The statistics of the step.
        ranks: Its ranks.
    """
    step, found = StepChecks(summary), []
    for part, samples in zip(step.ranks(ranks), _samples_of_ranks(summary, ranks), strict=True):
        own = [
            bitwise_equal(part.cell, summary.pair, part.produced),
            *step.check_cell(part.cell, slices=len(ranks), filled=part.filled),
        ]
        checks = _without_explained([*scopes_of(part.cell, own), *samples])
        is_of_many = _is_of_many(part.cell, summary)
        found.append(_rank_checks(part.cell, checks, is_of_many=is_of_many))
    return found


def may_be_suspect(summary: Summary, ranks: Sequence[RankRow]) -> Bool:
    """Return a mask of the ranks in which a check of `examine_ranks` may fail.

    It costs a tenth of the checks, and most steps have no such rank.
    """
    if not ranks:
        return np.zeros(0, bool)
    cells = np.stack([row.cell.vector for row in ranks])
    found: Bool = cells[:, Field.EQUAL] >= cells[:, Field.TOKENS]
    for failing in may_fail(cells).values():
        found = found | failing
    rank, sample = _ranks_of_fragments(summary, ranks)
    samples = check_samples(summary)
    is_out_of_place = (samples.moved | samples.strange)[sample] & (rank >= 0)
    found[rank[is_out_of_place]] = True
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
    step = StepChecks(summary)
    found: dict[str, list[tuple[RankRow, Check]]] = {}
    for row, part, samples in zip(
        ranks, step.ranks(ranks), _samples_of_ranks(summary, ranks), strict=True
    ):
        own = scopes_of(row.cell, step.check_slice(part, slices=len(ranks)))
        judged = _rank_checks(row.cell, _without_explained([*own, *samples]))
        names = {check.name for check in judged.suspects}
        if not names or besides in names or {besides, judged.cause} <= _OF_RATIOS:
            continue
        check = judged.suspects[0]
        found.setdefault(check.name, []).append((row, check))
    return tuple(
        RankCause(
            combine("rank", [(f"{row.role} {row.rank}", each) for row, each in where], len(ranks)),
            tuple((row.role, row.rank) for row, _ in where),
            where[0][1].text,
        )
        for where in found.values()
    )


def examine_cell(cell: Cell, summary: Summary, produced: Produced) -> Comparability:
    """Run the checks that need only one cell; see `examine_cells`."""
    return examine_cells([cell], summary, produced)[0]


def examine_cells(
    chosen: Iterable[Cell], summary: Summary, produced: Produced
) -> list[Comparability]:
    """Run the checks that need only one cell, of a rank, a round, a turn or a staleness.

    Args:
        chosen: The cells.
        summary: The statistics of all tokens, including those of the cells.
        produced: Who computed their tokens; for a round, a turn or a staleness, the step's
            producers.
    """
    step, found = StepChecks(summary), []
    for cell in chosen:
        checks = step.check_cell(cell, slices=max(len(summary.rounds.keys), 1))
        checks.append(bitwise_equal(cell, summary.pair, produced))
        if any(check.status == "suspect" and check.name in BY_EDGES for check in checks):
            scopes = step.by_edge_tokens(scopes_of(cell, checks))
            # The profiles of all tokens do not show which slice has first or last tokens far off.
            checks = [scope.check for scope in scopes[: len(checks)]]
        found.append(_rank_checks(cell, checks, is_of_many=_is_of_many(cell, summary)))
    return found


def _samples_of_ranks(summary: Summary, ranks: Sequence[RankRow]) -> list[list[Scope]]:
    """Return, for each rank, the checks of the samples that it holds a counting piece of."""
    rank, sample = _ranks_of_fragments(summary, ranks)
    checked = check_samples(summary)
    order = np.argsort(rank, kind="stable")
    ends = np.searchsorted(rank[order], np.arange(len(ranks) + 1))
    return [
        checked.scopes(np.unique(sample[order[begin:end]]))
        for begin, end in itertools.pairwise(ends.tolist())
    ]


def _ranks_of_fragments(summary: Summary, ranks: Sequence[RankRow]) -> tuple[Int64, Int64]:
    """Return the place in `ranks` of each piece of a sample, -1 for none of them, and its sample's
    index."""
    rank_of = np.full(len(summary.sources), -1, np.int64)
    for at, row in enumerate(ranks):
        rank_of[[source for source in row.sources if 0 <= source < len(rank_of)]] = at
    return rank_of[summary.sequences.source], summary.sequences.sample_index()


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
