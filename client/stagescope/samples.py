"""`SampleTokens`: the tokens of one sample as a table, with its text and what the loss did."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

from stagescope import render
from stagescope.columns import Kinds
from stagescope.table import Table
from stagescope.wire import nonfinite
from stagescope.wire.errors import StagescopeError
from stagescope.wire.nonfinite import Json

_SHOWN_TOKENS: Final = 4000
"""Tokens of the text in a notebook."""
_FULL_SHADE: Final = 0.5
"""|d| in nats from which on a token is shaded fully."""
_SHADE: Final = "213,94,0"
_NOT_FINITE: Final = "204,0,160"
_LEGEND: Final = (
    f"shaded by |d|, fully from {_FULL_SHADE} nat on; purple: not finite; faint: not of the model"
)
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
        >>> step = session.step(5)
        >>> tokens = step.sample(step.samples()[0]["sample_uid"])
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

    def _repr_html_(self) -> str:
        """Return the text with every token shaded by its |d|, and the table below it."""
        shown = range(min(len(self), _SHOWN_TOKENS))
        tokens = "".join(map(self._token, shown))
        more = f" ... {len(self) - len(shown)} more tokens" if len(self) > len(shown) else ""
        return render.html_block(
            self.heading,
            '<div style="white-space:pre-wrap;line-height:1.7;max-height:20em;overflow-y:auto">'
            f"{tokens}{more}</div><div><small>{html.escape(_LEGEND)}</small></div>"
            f"<details><summary>as a table</summary>{super()._repr_html_()}</details>",
        )

    def _token(self, at: int) -> str:
        text, d = self["text"][at], self["d"][at]
        token_id = self["token_id"][at]
        shown = f"{'·' if token_id is None else token_id} " if text is None else str(text)
        if not self["mask"][at]:
            return f'<span style="opacity:.5">{html.escape(shown)}</span>'
        facts = [f"position {self['position'][at]}", f"round {self['round'][at]}"]
        facts += [f"{name} {render.format_value(self[name][at])}" for name in ("d", "p", "q")]
        facts += [str(self["fate"][at])] if self["fate"][at] else []
        value = float(d) if isinstance(d, int | float) else math.nan
        strength = min(abs(value) / _FULL_SHADE, 1.0) if math.isfinite(value) else 1.0
        colour = _SHADE if math.isfinite(value) else _NOT_FINITE
        return (
            f'<span style="background:rgba({colour},{0.8 * strength:.2f})" '
            f'title="{html.escape(", ".join(facts))}">{html.escape(shown)}</span>'
        )

    @property
    def text(self) -> str | None:
        """The sample as text; None without a tokenizer."""
        texts = self["text"]
        return None if None in texts else "".join(map(str, texts))
