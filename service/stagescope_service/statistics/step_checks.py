"""The checks that single cells of a step allow: of its total, its ranks and its rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property
from typing import Final, NamedTuple, get_args

import numpy as np

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import (
    ENOUGH,
    FAR_TOKENS,
    FITS,
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
from stagescope_service.statistics.coverage import coverage, padding
from stagescope_service.statistics.exact import are_equal, bitwise_equal
from stagescope_service.statistics.fill_values import FillValues
from stagescope_service.statistics.noise_checks import biased, edge_token, scaled
from stagescope_service.statistics.part import RankRow
from stagescope_service.statistics.profile_bins import Edge
from stagescope_service.statistics.quick_look import (
    CELL_CHECKS,
    CellCheck,
    may_be_equal,
    may_fail,
)
from stagescope_service.statistics.staleness import Drift, slope_in_fresh
from stagescope_service.statistics.summary import Produced, Summary

_FAR: Final = 1.0
"""Nats beyond which edge tokens of rounds are suspect, whether another check fails or not."""
_LISTED: Final = 5
OF_MEAN_RATIO: Final = frozenset({"renormalised", "calibration"})
"""Checks that the first or last tokens of rounds alone can fail."""
BY_EDGES: Final = OF_MEAN_RATIO | {"shifted", "unrelated"}
"""The same if they are so far off that they outweigh all others."""


class Slice(NamedTuple):
    """A rank or a round: its name, its tokens, and their producers, or those of the step."""

    name: str
    cell: Cell
    produced: Produced
    filled: float
    """The sum of |d| of its tokens that were filled in."""
    rank: tuple[str, int] | None = None
    """(role, rank), if it is a rank."""


class StepChecks:
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

    def ranks(self, rows: Sequence[RankRow]) -> list[Slice]:
        """Return the ranks as parts of the step."""
        return [
            Slice(
                f"{row.role} {row.rank}",
                row.cell,
                row.produced or self.summary.produced,
                self.filled.of_sources(row.sources),
                (row.role, row.rank),
            )
            for row in rows
        ]

    def rounds(self) -> list[Slice]:
        """Return the rounds as parts of the step."""
        return [
            Slice(str(key), cell, self.summary.produced, self.filled.of_round(key))
            for key, cell in self.summary.rounds.items()
        ]

    def check_cell(
        self,
        cell: Cell,
        *,
        slices: int = 1,
        filled: float = 0.0,
        only: Container[CellCheck] = CELL_CHECKS,
    ) -> list[Check]:
        """Run the checks that need one cell.

        Args:
            cell: the tokens.
            slices: number of slices of the cell's kind that are checked.
            filled: the sum of |d| of its tokens that were filled in.
            only: the checks to run.
        """
        pair, sequences, drift = self.summary.pair, self.summary.sequences, self.drift
        checks: dict[CellCheck, Callable[[], Check]] = {
            "constant": lambda: constant(cell, *pair),
            "probabilities": lambda: probabilities(cell, *pair),
            "coverage": lambda: coverage(cell, *pair),
            "rounded": lambda: rounded(cell, *pair),
            "shifted": lambda: shifted(cell, *pair, filled=filled),
            "unrelated": lambda: unrelated(cell, *pair, drifts=drift is not None),
            "padding": lambda: padding(cell),
            "temperature": lambda: scaled(cell, *pair, sequences, slices=slices),
            "calibration": lambda: biased(cell, *pair, sequences),
        }
        found = [check() for name, check in checks.items() if name in only]
        return found if drift is None else [drift.judged(check) for check in found]

    def check_slice(
        self, part: Slice, *, slices: int, only: Container[CellCheck] = CELL_CHECKS
    ) -> list[Check]:
        """Run the checks that the tokens of a slice allow."""
        cell = part.cell
        found = self.check_cell(cell, slices=slices, filled=part.filled, only=only)
        if cell.tokens >= ENOUGH and are_equal(cell) and cell[Field.BOTH_ZERO] < cell.tokens / 2:
            found.append(bitwise_equal(cell, self.summary.pair, part.produced))
        return found

    def check_slices(self, kind: str, parts: Sequence[Slice]) -> list[Scope]:
        """Check each slice, if there are several, and report the ones that failed."""
        if len(parts) < 2:
            return []
        cells = np.stack([part.cell.vector for part in parts])
        candidates, equal = may_fail(cells), may_be_equal(cells)
        by_name: dict[str, dict[int, Check]] = {}
        for at in np.flatnonzero(np.logical_or.reduce([equal, *candidates.values()])).tolist():
            only = [name for name, mask in candidates.items() if mask[at]]
            for check in self.check_slice(parts[at], slices=len(parts), only=only):
                if check.status == "suspect":
                    by_name.setdefault(check.name, {})[at] = check
        fitting = np.array([fits(part.cell) for part in parts]) if by_name else equal
        tokens = cells[:, Field.TOKENS]
        found = []
        for failed in by_name.values():
            has_failed = np.zeros(len(parts), bool)
            has_failed[[*failed]] = True
            where = [(parts[at].name, check) for at, check in failed.items()]
            ranks = tuple(rank for at in failed if (rank := parts[at].rank) is not None)
            check = dataclasses.replace(combine(kind, where, len(parts)), ranks=ranks)
            unknown = tokens[~has_failed & ~fitting]
            found.append(Scope(check, float(tokens[has_failed].sum()), float(unknown.sum())))
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
            explained = OF_MEAN_RATIO
            if lags and cause.values["others"] < FITS * min(lags)[0]:
                explained = BY_EDGES
            found = [
                dataclasses.replace(scope, check=cause)
                if scope.check.status == "suspect" and scope.check.name in explained
                else scope
                for scope in found
            ]
            if cause.values["edge"] > _FAR and cause.values["tokens"] >= FAR_TOKENS:
                found.append(Scope(cause, self.summary.total.tokens, 0))
        return found


def scopes_of(cell: Cell, checks: Iterable[Check]) -> list[Scope]:
    """Return checks as those of all tokens of a cell."""
    return [Scope(check, cell.tokens, 0) for check in checks]


def combine(kind: str, where: Sequence[tuple[str, Check]], of: int) -> Check:
    """Combine one check's failures in several slices into one."""
    listed = ", ".join(name for name, _ in where[:_LISTED])
    more = ", ..." if len(where) > _LISTED else ""
    head = where[0][1]
    text = f"in {len(where)} of {of} {kind}s ({listed}{more}): {head.text}"
    return Check(head.name, "suspect", text, {**head.values, f"{kind}s": len(where)})
