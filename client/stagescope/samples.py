"""`SampleTokens`: the tokens of one sample as a table, with its text and what the loss did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stagescope.columns import Kinds
from stagescope.table import Table
from stagescope.wire import nonfinite
from stagescope.wire.errors import StagescopeError
from stagescope.wire.nonfinite import Json

_COLUMNS: Final[dict[str, tuple[str, str]]] = {
    "position": ("positions", "int"),
    "text": ("texts", "text"),
    "token_id": ("token_ids", "int?"),
    "round": ("round", "int?"),
    "d": ("d", "float"),
    "p": ("p", "float"),
    "q": ("q", "float"),
    "fate": ("fate", "text"),
    "weight": ("weight", "float"),
    "weight_raw": ("weight_raw", "float"),
    "advantage": ("advantage", "float"),
    "clipped": ("clipped", "text"),
    "turn": ("turn", "int?"),
    "mask": ("mask", "int"),
}
"""Column of the table -> (field of the answer, kind)."""


class SampleTokens(Table):
    """One row a token, in the order of the sample; d = p - q in nats.

    A column that was not recorded is None throughout; `about["unrecorded"]` says how to record it,
    `about["texts_reason"]` why there are no texts.

    Usage:
        >>> tokens = session.step(5).sample("s0")
        >>> tokens.text            # the decoded sample
        >>> tokens.where(fate="rejected")
    """

    __slots__ = ()

    @classmethod
    def of_answer(cls, answer: Json) -> SampleTokens:
        """Return the table of an answer of `/steps/{step}/samples/{sample_uid}`."""
        if not isinstance(answer, dict) or not isinstance(answer.get("positions"), list):
            raise StagescopeError(
                "the service answered without tokens",
                advice="install versions of service and client that belong together",
            )
        length = len(answer["positions"])
        columns: dict[str, Sequence[Json]] = {
            name: values if kind == "text" else nonfinite.column(name, values)
            for name, (field, kind) in _COLUMNS.items()
            for values in (answer.get(field) or [None] * length,)
        }
        kinds: Kinds = {name: kind for name, (_, kind) in _COLUMNS.items()}
        fields = {field for field, _ in _COLUMNS.values()}
        about = {name: value for name, value in answer.items() if name not in fields}
        reasons = [f"no texts: {about['texts_reason']}"] if about.get("texts_reason") else []
        reasons += [about["loss_note"]] if about.get("loss_note") else []
        about["note"] = "; ".join(reasons)
        title = f"tokens of {about.get('sample_uid') or 'a row'}"
        return cls(columns, title=title, about=about, kinds=kinds)

    @property
    def text(self) -> str | None:
        """The sample as text; None without a tokenizer."""
        texts = self["text"]
        return None if None in texts else "".join(map(str, texts))
