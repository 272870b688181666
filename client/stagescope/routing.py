"""The table of routes: whether rollout and trainer chose the same experts, layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final

from stagescope.plotting import PlottedTable
from stagescope.table import Row, Table
from stagescope_wire import render
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render_html import escaped

_ROUNDS: Final = 6
"""Most rounds with a column of their own in text."""
_WORST: Final = 5
"""Worst tokens in text."""
_LAYERS: Final = 4
"""Layers of a token in text."""
_LOW: Final = 0.9
"""Agreement of a layer below which its line says what its routes match instead."""
_MATCH: Final = 0.2
"""Least share of tokens for that."""


class Routing(PlottedTable):
    """The agreement of routes, one row per layer.

    In text, the answer comes first, then what is wrong with the routes. The table has the share of
    tokens with the same experts, in total and by round. The worst tokens with their experts follow.

    Usage:
        >>> routing = session.step(5).routing()
        >>> routing.about["text"]
        >>> routing["agreement"]
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the answer, the table, and the worst tokens with their experts."""
        lines = [line for sign, text in self._said() for line in render.wrapped(sign, text, width)]
        numbers = [row["round"] for row in self.about.get("rounds") or ()]
        shown = [_line(row, numbers if len(numbers) <= _ROUNDS else []) for row in self[:rows]]
        if shown:
            lines += ["", *Table.from_rows(shown).lines(width=width)]
        lines += self._omissions(rows)
        worst = [*_worst(self.about.get("worst") or ())]
        title = "worst tokens, the rollout's experts against the trainer's:"
        for text in [title, *worst] if worst else ():
            lines += render.wrapped("", text, width)
        return lines

    def _repr_html_(self) -> str:
        said = "".join(f"<div>{escaped(sign + text)}</div>" for sign, text in self._said())
        return f"{said}{super()._repr_html_()}"

    def _said(self) -> list[tuple[str, str]]:
        """Return signs and texts: the answer, and what is wrong with the routes."""
        faults = self.about.get("faults") or ()
        return [("", str(self.about.get("text") or "")), *(("! ", each["text"]) for each in faults)]


def _line(row: Row, rounds: list[int]) -> JsonObject:
    line: dict[str, Json] = {
        "layer": row["layer"],
        "tokens": row["tokens"],
        "same experts": _percent(row["agreement"]),
        "order only": _percent(row["order_only"]),
    }
    if len(rounds) > 1:
        line |= {
            f"round {number}": _percent(share)
            for number, share in zip(rounds, row["by_round"], strict=True)
        }
    if row["rollout_unset"] or row["trainer_unset"]:
        line["no choice"] = f"{row['rollout_unset']} / {row['trainer_unset']}"
    return {**line, **_matches(row)}


def _matches(row: Row) -> JsonObject:
    """Return which token or layer of the trainer a layer's routes match where not their own."""
    own = row["agreement"]
    if own is None or own >= _LOW:
        return {}
    found = {"token before": row["earlier"], "token after": row["later"]}
    other = f"layer {row['best_other']}"
    line = {name: _percent(share) for name, share in found.items() if (share or 0.0) >= _MATCH}
    if (row["best_other_agreement"] or 0.0) >= _MATCH:
        line["other layer"] = f"{other}, {_percent(row['best_other_agreement'])}"
    return line


def _percent(share: Json) -> str:
    return f"{share:.1%}" if isinstance(share, int | float) else "-"


def _worst(tokens: Iterable[JsonObject]) -> Iterator[str]:
    for token in itertools.islice(tokens, _WORST):
        sample = token["sample_uid"] or f"row {token['row']}"
        differing = token["differing"]
        layers = [
            f"layer {each['layer']}: {_experts(each['rollout'])} against "
            f"{_experts(each['trainer'])}"
            for each in differing[:_LAYERS]
        ]
        if len(differing) > _LAYERS:
            layers.append(f"and {len(differing) - _LAYERS} more layers")
        lacks = " and ".join(f"the {side}" for side in token.get("lacks") or ())
        experts = f"no route of {lacks}" if lacks else "; ".join(layers) or "the same experts"
        yield f"{sample} position {token['position']}, |d| {token['abs_diff']:.3g}: {experts}"


def _experts(chosen: list[int]) -> str:
    return " ".join(map(str, chosen))
