"""A comparison as one HTML file: everything inside, no network, every text escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from plotly.offline import get_plotlyjs

from stagescope import nonfinite
from stagescope.changes import change_lines
from stagescope.compared import (
    SIDES,
    TITLES,
    Compared,
    deciding_changes,
    number_text,
    place_text,
)
from stagescope_service.compare.figures import COLOURS, pictures

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{font-size:1.2em;border-bottom:1px solid #ccc;margin-top:2em}h3{font-size:1em}
table{border-collapse:collapse;font-size:.9em;width:100%}td,th{text-align:left;padding:.2em .6em;
border-bottom:1px solid #eee;vertical-align:top}td.n{text-align:right;font-variant-numeric:
tabular-nums}.v{color:#fff;border-radius:.3em;padding:.1em .5em;white-space:nowrap}
code{background:#f4f4f4;padding:0 .2em;overflow-wrap:anywhere}.box{background:#faf6ee;padding:.6em
1em;border-left:4px solid #c90}details{margin:.3em 0}summary{cursor:pointer}
"""

_Said = Mapping[str, Any]
_WIDE: Final = 200


def as_html(said: _Said) -> str:
    """Return a comparison (`report.as_json`) as a whole HTML page."""
    said = Compared(said)
    body = "\n".join(
        [*_head(said), *(line for pair in said["pairs"] for line in _pair(said, pair))]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_text(said['verdict'])}: comparison of dumps</title>"
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>\n"
        f"<body>{body}</body></html>\n"
    )


def _head(said: _Said) -> Iterator[str]:
    yield f"<h1>{_badge(said['verdict'])} comparison of dumps</h1><p>{_text(said['reason'])}</p>"
    rows = [
        [letter, f"<code>{_text(side['name'])}</code>", _text(side["kind"]),
         _text(", ".join(map(str, side["steps"]))), str(len(side["ranks"])),
         _text(", ".join(side["sections"]))]
        for letter, side in zip(SIDES, said["sides"], strict=False)
    ]  # fmt: skip
    yield _table(("", "dump", "kind", "steps", "ranks", "sections"), rows)
    if changes := deciding_changes(said):
        yield "<h3>Changed between the attempts</h3>"
        yield _list([line.strip() for row in changes for line in change_lines(row, _WIDE)])


def _pair(said: _Said, pair: _Said) -> Iterator[str]:
    a, b = (SIDES[side] for side in pair["sides"])
    yield f"<h2>{a} and {b}: {_badge(pair['verdict'])}</h2><p>{_text(pair['reason'])}</p>"
    if pair["first"] is not None:
        yield from _first(pair["first"], a, b)
    if pair["causes"]:
        yield "<h3>Likely causes</h3><ol>"
        for cause in pair["causes"]:
            checks = "".join(f"<li>{_text(check)}</li>" for check in cause["checks"])
            title, why = _text(cause["title"]), _text(cause["evidence"])
            yield f"<li><b>{title}</b><br>because {why}<ul>{checks}</ul></li>"
        yield "</ol>"
    if pair["excluded"]:
        yield "<h3>Excluded by what agrees</h3>" + _list(pair["excluded"])
    if pair["findings"]:
        yield "<h3>Not compared, or worth knowing</h3><ul>"
        for finding in pair["findings"]:
            side = "" if finding["side"] is None else f"{SIDES[pair['sides'][finding['side']]]}: "
            yield f"<li>{_text(side + finding['message'])}{_items(finding['items'])}</li>"
        yield "</ul>"
    for at, figure in enumerate(pictures(pair)):
        yield _figure(figure, f"figure-{a}{b}-{at}")
    for section in pair["sections"]:
        keys = ", ".join(pair["keys"].get(section["section"], ()))
        paired = f" (rows paired by {keys})" if keys else ""
        title = TITLES.get(section["section"], section["section"])
        yield f"<h3>{_text(f'{title}{paired}')}</h3>"
        yield _tensors(section["tensors"])


def _first(first: _Said, a: str, b: str) -> Iterator[str]:
    yield '<div class="box"><b>First difference</b>: at the '
    name = f"{first['section']}/{first['name']}"
    yield f"{_text(first['station'])}, <code>{_text(name)}</code>"
    yield f"<br>{_text(first['reason'])}"
    if (location := first["location"]) is not None:
        if location["sample"] is not None:
            yield f"<br>sample <code>{_text(location['sample'])}</code>, "
            yield f"its value {location['position']} (from 0)"
        for letter, side in ((a, location["a"]), (b, location["b"])):
            where = f"{place_text(side['place'])}, at {list(side['coordinate'])}"
            yield f"<br>{letter}: <code>{number_text(side['value'])}</code> ({_text(where)})"
    yield "</div>"


def _tensors(tensors: Sequence[_Said]) -> str:
    heads = ("", "tensor", "values", "max |d|", "mean |d|", "relative", "cosine", "why")
    rows = []
    for tensor in tensors:
        found = tensor["statistics"]
        numbers = (found[name] for name in ("max_abs", "mean_abs", "relative", "cosine"))
        name = f"<code>{_text(tensor['name'])}</code>{_places(tensor['places'])}"
        rows.append([
            _badge(tensor["verdict"]), name, str(found["pairs"]),
            *(f"{value:.6g}" for value in numbers), _text(tensor["reason"]),
        ])  # fmt: skip
    return _table(heads, rows)


def _places(places: Sequence[_Said]) -> str:
    if len(places) < 2:
        return ""
    lines = [
        f"{_badge(each['verdict'])} {_text(place_text(each['a']))}: max |d| "
        f"{each['statistics']['max_abs']:.6g} {_text(each['problem'])}"
        for each in places
    ]
    listed = "".join(f"<li>{line}</li>" for line in lines)
    return f"<details><summary>{len(places)} ranks and parts</summary><ul>{listed}</ul></details>"


def _figure(figure: Any, name: str) -> str:
    # In a script `</` would end it; JSON may spell the slash.
    described = json.dumps(nonfinite.spell(json.loads(figure.to_json()))).replace("</", "<\\/")
    return (
        f'<div id="{name}"></div><script>'
        f'{{const f={described};Plotly.newPlot("{name}",f.data,f.layout,{{responsive:true}})}}'
        "</script>"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _badge(verdict: str) -> str:
    return f'<span class="v" style="background:{COLOURS[verdict]}">{_text(verdict)}</span>'


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(text)}</li>' for text in texts)}</ul>"


def _items(items: Sequence[str]) -> str:
    if not items:
        return ""
    return f"<details><summary>{len(items)}</summary>{_list(items)}</details>"


def _text(value: Any) -> str:
    return html.escape(str(value))
