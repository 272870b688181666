"""Zero as proof: streams of two producers that agree in every bit, and where they first do not."""

from __future__ import annotations

import dataclasses
from typing import Any

from stagescope_service.statistics.summary import UNKNOWN, Summary


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

    @property
    def text(self) -> str:
        """Where it is, and both values with all their digits."""
        where = f"sample {self.sample}" if self.sample else f"row {self.row}"
        token = f"token {self.position}"
        return f"{where}, round {self.round}, {token}: {self.p!r} against {self.q!r}"

    def to_json(self) -> dict[str, Any]:
        """Return built-in types, without the payload."""
        fields = dataclasses.asdict(self)
        fields["sample_uid"] = fields.pop("sample")
        fields.pop("source")
        return fields


def first_difference(summary: Summary) -> Difference | None:
    """Return where the two streams first differ.

    None where they are equal, and where an older record does not say it: see `Field.EQUAL`.
    """
    tokens, sequences = summary.unequal, summary.sequences
    if not len(tokens):
        return None
    sequence, token_id = int(tokens.sequence[0]), int(tokens.token_id[0])
    return Difference(
        sample=sequences.samples[sequence] or None,
        source=summary.sources[int(sequences.source[sequence])],
        row=int(sequences.row[sequence]),
        round=int(tokens.round[0]),
        position=int(tokens.position[0]),
        token_id=None if token_id == UNKNOWN else token_id,
        p=float(tokens.p[0]),
        q=float(tokens.q[0]),
    )
