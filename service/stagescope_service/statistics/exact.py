"""Equality of the two streams, and the first token in which they differ.

Equality is exact if two producers computed the streams. Numbers are equal, not bits: the streams
may arrive in different dtypes. -0.0 equals 0.0, since both are the log of 1, and frameworks write
either of them. NaN equals nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import Check
from stagescope_service.statistics.part import RankRow
from stagescope_service.statistics.summary import UNKNOWN, Produced, Summary, Tokens
from stagescope_wire.nonfinite import Json

NOT_KEPT: Final = "in a token that was not kept"
"""The location of a difference if no unequal token was kept."""


_LISTED: Final = 5
"""Ranks listed in a text."""


def are_equal(cell: Cell) -> bool:
    """Return whether the two streams are the same numbers wherever either is finite."""
    return cell.tokens > 0 and not unequal_tokens(cell)


def bitwise_equal(
    cell: Cell, pair: tuple[str, str], produced: Produced, ranks: Sequence[RankRow] = ()
) -> Check:
    """Check whether equal streams are the results of two computations, or one is a copy.

    Args:
        cell: The tokens.
        pair: Names of p and q.
        produced: Who computed these tokens, or those of the step that they belong to.
        ranks: The ranks that hold them; they are named if some copied and others did not.
    """
    p, q = pair
    share = cell.share(Field.EQUAL)
    if not cell.tokens:
        return Check("bitwise_equal", "unknown", "no token counts", {"share": share})
    if not are_equal(cell):
        text = f"{p} and {q} are the same number in {share:.1%} of the tokens"
        return Check("bitwise_equal", "ok", text, {"share": share})
    origins = _by_origin(produced) or {UNKNOWN_ORIGIN: {("", ""): cell.tokens}}
    tokens = {origin: sum(found.values()) for origin, found in origins.items()}
    sums = sum(tokens.values())
    of = "them" if sums == cell.tokens else "the step's tokens"
    clauses = []
    for origin, found in origins.items():
        where, proved = "", cell.tokens
        if len(origins) > 1:
            proved = tokens[origin]
            who = [f"{row.role} {row.rank}" for row in ranks if origin in _by_origin(row.produced)]
            listed = f": {', '.join(who[:_LISTED])}{', ...' if len(who) > _LISTED else ''}"
            where = f" in {proved / sums:.1%} of {of} ({proved} tokens{listed if who else ''})"
        if origin == COPIED:
            names = ", ".join(sorted(name for name, _ in found))
            text = f"both come from {names}{where}: one is a copy, nothing was measured"
        elif origin == UNKNOWN_ORIGIN:
            text = (
                f"who computed them is not reported{where}. One may be a copy of the other "
                "(synchronous and bypass modes do that), so nothing was measured. Record "
                "producers={...} with the streams, so that equality counts"
            )
        else:
            sides = [", ".join(sorted({names[side] for names in found})) for side in (0, 1)]
            text = (
                f"two producers computed them{where} ({p}: {sides[0]}; {q}: {sides[1]}): "
                f"{'' if cell.masked > cell.tokens else 'exact, '}proved on {proved} tokens"
            )
        clauses.append(text)
    text = f"{p} and {q} are the same numbers in all {cell.tokens} tokens, and "
    text += "; ".join(clauses)
    is_exact = [*origins] == [TWO_PRODUCERS]
    if neither := cell.masked - cell.tokens:
        text += f"; {neither} more {'is' if neither == 1 else 'are'} finite in neither stream"
        text += ", so it was not measured" if is_exact else ""
    return Check("bitwise_equal", "ok" if is_exact else "suspect", text, {"share": share, **tokens})


COPIED: Final = "copied"
UNKNOWN_ORIGIN: Final = "of_unknown_producer"
TWO_PRODUCERS: Final = "of_two_producers"


def _by_origin(produced: Produced) -> dict[str, Produced]:
    """Return the tokens that are copies, of an unknown producer and of two, without empty kinds."""
    found: dict[str, dict[tuple[str, str], int]] = {
        COPIED: {},
        UNKNOWN_ORIGIN: {},
        TWO_PRODUCERS: {},
    }
    for (p, q), tokens in produced.items():
        origin = UNKNOWN_ORIGIN if "" in (p, q) else COPIED if p == q else TWO_PRODUCERS
        if tokens:
            found[origin][p, q] = tokens
    return {origin: each for origin, each in found.items() if each}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first known token, by sample and position, in which two streams differ.

    Attributes:
        sample_uid: None where the payload has none.
        source: the payload (`Summary.sources`); `row` is the row in it.
        round, position: in the sample; position is the token's index in the row, or its value in
            `positions`.
        token_id: None where no responses were handed over.
        p, q: the two log-probs.
        is_first: whether no earlier token differs; False if one that was not kept may.
    """

    sample_uid: str | None
    source: str
    row: int
    round: int
    position: int
    token_id: int | None
    p: float
    q: float
    is_first: bool

    def text(self, pair: tuple[str, str], role: str | None = None, rank: int | None = None) -> str:
        """Describe the location, the rank that recorded it, and both values with all digits.

        Args:
            pair: the streams of p and q.
            role, rank: of the rank, where it is known.
        """
        p, q = pair
        where = f"sample {self.sample_uid}" if self.sample_uid else f"row {self.row}"
        of = "" if role is None else f" of {role} rank {rank}"
        token = f"token {self.position}"
        text = f"{where}{of}, round {self.round}, {token}: {p} {self.p!r}, {q} {self.q!r}"
        return text if self.is_first else f"{text} (one before it may differ that was not kept)"

    def to_json(self) -> dict[str, Json]:
        """Return the fields, without the payload."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "source"}


def unequal_tokens(cell: Cell) -> int:
    """Return the number of tokens in which the streams differ, or only one value is finite.

    Tokens where neither is finite are not counted: whether they are equal is unknown.
    """
    return cell.tokens - int(cell[Field.EQUAL]) + _one_sided_tokens(cell)


def first_difference(summary: Summary) -> Difference | None:
    """Return the first known token in which the two streams differ.

    None if they are equal, or if no differing token was kept; `unequal_tokens` distinguishes the
    two cases. A summary keeps only the first non-finite tokens, including those that are finite in
    neither stream.
    """
    non_finite, sequences, keys = summary.non_finite, summary.sequences, summary.sequences.keys()

    def sort_key(tokens: Tokens, at: int) -> tuple[tuple[str, int, int], int]:
        return keys[int(tokens.sequence[at])], int(tokens.position[at])

    known = [(summary.unequal, at) for at in range(min(len(summary.unequal), 1))]
    one_sided = [(non_finite, at) for at in range(len(non_finite)) if _is_one_sided(non_finite, at)]
    if not known and not one_sided:
        return None
    tokens, at = min([*known, *one_sided], key=lambda each: sort_key(*each))
    cell = summary.total
    # The non-finite tokens that were not kept follow all that were.
    last_kept = max((sort_key(non_finite, each) for each in range(len(non_finite))), default=None)
    has_all_one_sided = len(one_sided) == _one_sided_tokens(cell)
    is_all_finite = bool(known) or cell.tokens == int(cell[Field.EQUAL])
    before_others = last_kept is not None and sort_key(tokens, at) <= last_kept
    sequence, token_id = int(tokens.sequence[at]), int(tokens.token_id[at])
    return Difference(
        sample_uid=sequences.samples[sequence] or None,
        source=summary.sources[int(sequences.source[sequence])],
        row=int(sequences.row[sequence]),
        round=int(tokens.round[at]),
        position=int(tokens.position[at]),
        token_id=None if token_id == UNKNOWN else token_id,
        p=float(tokens.p[at]),
        q=float(tokens.q[at]),
        is_first=is_all_finite and (has_all_one_sided or before_others),
    )


def _one_sided_tokens(cell: Cell) -> int:
    """Return the number of tokens that are finite in exactly one stream."""
    missing = sum(
        int(cell[Field[f"{side}_{kind}"]])
        for side in ("P", "Q")
        for kind in ("NAN", "POSINF", "NEGINF")
    )
    return max(2 * (cell.masked - cell.tokens) - missing, 0)


def _is_one_sided(tokens: Tokens, at: int) -> bool:
    return math.isfinite(tokens.p[at]) != math.isfinite(tokens.q[at])
