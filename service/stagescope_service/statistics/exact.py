"""Zero as proof: streams of two producers that agree in every bit, and where they first do not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.summary import UNKNOWN, Summary, Tokens


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token, by sample and position, in which two streams differ.

    Attributes:
        sample: sample_uid, or None where the payload has none.
        source: the payload (`Summary.sources`), and the `row` in it.
        round, position: in the sample; position counts the row's tokens from 0, or is what
            `positions` said.
        token_id: None where no responses were handed over.
        p, q: the two log-probs.
    """

    sample: str | None
    source: str
    row: int
    round: int
    position: int
    token_id: int | None
    p: float
    q: float

    def text(self, role: str | None = None, rank: int | None = None) -> str:
        """Where it is, with the rank that handed it over, and both values with all digits."""
        where = f"sample {self.sample}" if self.sample else f"row {self.row}"
        of = "" if role is None else f" of {role} rank {rank}"
        token = f"token {self.position}"
        return f"{where}{of}, round {self.round}, {token}: {self.p!r} against {self.q!r}"

    def to_json(self) -> dict[str, Any]:
        """Return built-in types, without the payload."""
        fields = dataclasses.asdict(self)
        fields["sample_uid"] = fields.pop("sample")
        fields.pop("source")
        return fields


def unequal_tokens(cell: Cell) -> int:
    """Return in how many tokens the streams differ; where one alone is not finite, too.

    Where neither is finite, nobody can tell.
    """
    gone = sum(
        int(cell[Field[f"{side}_{kind}"]])
        for side in ("P", "Q")
        for kind in ("NAN", "POSINF", "NEGINF")
    )
    one_sided = max(2 * (cell.masked - cell.tokens) - gone, 0)
    return cell.tokens - int(cell[Field.EQUAL]) + one_sided


def first_difference(summary: Summary) -> Difference | None:
    """Return where the two streams first differ.

    None where they are equal, and where an older record does not say it: see `Field.EQUAL`.
    """
    odd = summary.non_finite
    places = [
        (int(tokens.sequence[at]), int(tokens.position[at]), tokens, at)
        for tokens, at in [
            *((summary.unequal, at) for at in range(min(len(summary.unequal), 1))),
            *((odd, at) for at in range(len(odd)) if _is_one_sided(odd, at)),
        ]
    ]
    if not places:
        return None
    sequence, position, tokens, at = min(places, key=lambda place: place[:2])
    sequences, token_id = summary.sequences, int(tokens.token_id[at])
    return Difference(
        sample=sequences.samples[sequence] or None,
        source=summary.sources[int(sequences.source[sequence])],
        row=int(sequences.row[sequence]),
        round=int(tokens.round[at]),
        position=position,
        token_id=None if token_id == UNKNOWN else token_id,
        p=float(tokens.p[at]),
        q=float(tokens.q[at]),
    )


def _is_one_sided(tokens: Tokens, at: int) -> bool:
    return math.isfinite(tokens.p[at]) != math.isfinite(tokens.q[at])
