"""A comparison as one self-contained HTML file, without network access, all text escaped."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import plotly.graph_objects as go

from stagescope.comparison_report import (
    SIDES,
    TITLES,
    ComparisonReport,
    change_lines,
    deciding_changes,
    findings_of,
    largest_text,
    number_text,
    place_text,
    places_text,
    title_of,
    worst_first,
)
from stagescope.render import printable
from stagescope.wire import nonfinite
from stagescope.wire.nonfinite import JsonObject
from stagescope_service.compare.report.as_json import (
    FirstReport,
    PairReport,
    SectionReport,
    ShardReport,
    TensorReport,
)
from stagescope_service.compare.report.figures import MAX_DETAILED, pictures
from stagescope_service.figure_style import COLOURS, plotly_script

_HERE: Final = Path(__file__).parent


class PageFigures:
    """Figures of a page; the script at its end draws them."""

    def __init__(self) -> None:
        self._by_id: dict[str, object] = {}

    def add(self, figure: go.Figure) -> str:
        """Add a figure; return an empty HTML element for it, below its title as wrapping text."""
        drawing = json.loads(str(figure.to_json()))
        return self._add(drawing["layout"].pop("title")["text"], drawing)

    def add_answer(self, answer: Mapping[str, object]) -> str:
        """Add a figure as `/figures/{name}` answers it; see `add`."""
        return self._add(html.escape(str(answer["title"])), answer["figure"])

    def _add(self, caption: str, drawing: object) -> str:
        element_id = f"figure-{len(self._by_id)}"
        self._by_id[element_id] = drawing
        return f'<figure><figcaption>{caption}</figcaption><div id="{element_id}"></div></figure>'

    def as_script(self) -> str:
        """Return the figures as JSON inside HTML."""
        # A `</script>` in a text would end the element; JSON may escape any character.
        text = json.dumps(nonfinite.spell(self._by_id)).replace("<", "\\u003c")
        return f'<script type="application/json" id="figures">{text}</script>'

    def __len__(self) -> int:
        return len(self._by_id)


def as_page(title: str, body: str, figures: PageFigures) -> str:
    """Return a complete page.

    Its Content-Security-Policy lets the browser fetch nothing, and run only the scripts of this
    package, whatever `body` contains.

    Args:
        title: title of the window; plain text.
        body: body as HTML.
        figures: figures whose elements are in `body`.
    """
    scripts = _scripts() if len(figures) else ()
    allowed = " ".join(f"'sha256-{_checksum(script)}'" for script in scripts) or "'none'"
    policy = (
        "default-src 'none'; style-src 'unsafe-inline' data:; img-src data: blob:; "
        f"script-src {allowed}"
    )
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    run = "".join(f"<script>{script}</script>" for script in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>\n"
        f"<body>{body}{figures.as_script()}{run}</body></html>\n"
    )


@functools.cache
def _scripts() -> tuple[str, str]:
    return plotly_script(), (_HERE / "page.js").read_text(encoding="utf-8")


@functools.cache
def _checksum(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


MAX_LISTED: Final = 200
"""Most entries of a list (findings, items, shards) in the page; the JSON has all."""
_SHOWN: Final = 12
"""Most findings that are visible without unfolding."""

_WIDE: Final = 200


def as_html(report: JsonObject) -> str:
    """Return a `ComparisonReport`, with `changes` and `remarks` if it has them, as a page."""
    report, figures = ComparisonReport(report), PageFigures()
    pairs = cast("list[PairReport]", report["pairs"])
    several_pairs, several_steps = len(pairs) > 1, len(report["sides"][0]["steps"]) > 1
    body = [*_head(report)]
    for pair in pairs:
        body += _pair(pair, figures, with_title=several_pairs)
        for section in pair["sections"]:
            body += _section(section, pair["keys"], several_steps=several_steps)
    return as_page(f"{report['verdict']}: comparison of dumps", "\n".join(body), figures)


def _head(report: JsonObject) -> Iterator[str]:
    yield f"<h1>{_badge(report['verdict'], title_of(report))} comparison of dumps</h1>"
    yield f"<p>{_text(report['reason'])}</p>"
    yield from (f"<p>{_text(remark)}</p>" for remark in report.get("remarks", ()))
    rows = [
        [letter, f"<code>{_text(side['name'])}</code>", _text(side["kind"]),
         _text(", ".join(map(str, side["steps"]))), str(len(side["ranks"])),
         _text(", ".join(side["sections"]))]
        for letter, side in zip(SIDES, report["sides"], strict=False)
    ]  # fmt: skip
    yield html_table(("", "dump", "kind", "steps", "ranks", "sections"), rows)
    if changes := deciding_changes(report):
        yield "<h3>Changed between the attempts</h3>"
        yield _list([line.strip() for row in changes for line in change_lines(row, _WIDE)])


def _pair(pair: PairReport, figures: PageFigures, *, with_title: bool) -> Iterator[str]:
    """Yield the HTML of two sides, without their sections."""
    a, b = (SIDES[side] for side in pair["sides"])
    if with_title:
        yield f"<h2>{a} and {b}: {_badge(pair['verdict'])}</h2><p>{_text(pair['reason'])}</p>"
    if pair["first"] is not None:
        yield from _first(pair["first"], a, b)
    if pair["causes"]:
        yield "<h3>Likely causes</h3><ol>"
        for cause in pair["causes"]:
            title, why = _text(cause["title"]), _text(cause["evidence"])
            yield f"<li><b>{title}</b><br>because {why}{_list(cause['checks'])}</li>"
        yield "</ol>"
    if pair["excluded"]:
        yield "<h3>Excluded by what agrees</h3>" + _list(pair["excluded"])
    if pair["findings"]:
        yield "<h3>Not compared, or worth knowing</h3>"
        found = [_text(text) + _items(items) for text, items, _ in findings_of(pair)]
        yield _cut(found[:_SHOWN])
        if more := found[_SHOWN:]:
            yield _folded(f"{len(more)} more", _cut(more))
    yield from _figures(pair, figures)


def _section(
    section: SectionReport, keys: Mapping[str, Sequence[str]], *, several_steps: bool
) -> Iterator[str]:
    names = ", ".join(keys.get(section["section"], ()))
    paired = f" (rows paired by {names})" if names else ""
    title = TITLES.get(section["section"], section["section"])
    yield f"<h3>{_text(f'{title}{paired}')}</h3>"
    yield _tensors(section["tensors"], several_steps=several_steps)


def _figures(pair: PairReport, figures: PageFigures) -> Iterator[str]:
    for figure in pictures(pair):
        yield figures.add(figure)
    tensors = [tensor for section in pair["sections"] for tensor in section["tensors"]]
    more = sum(tensor["verdict"] == "different" for tensor in tensors) - MAX_DETAILED
    if more > 0:
        yield f"<p>{more} more tensors differ: see their numbers below.</p>"


def _first(first: FirstReport, a: str, b: str) -> Iterator[str]:
    yield '<div class="box"><b>First difference</b>: at the '
    name = f"{first['section']}/{first['name']}"
    yield f"{_text(first['station'])}, <code>{_text(name)}</code>"
    yield f"<br>{_text(first['reason'])}"
    if (location := first["location"]) is not None:
        if location["sample"] is not None:
            yield f"<br>sample <code>{_text(location['sample'])}</code>, "
            yield f"its value {location['position']} (from 0)"
        for letter, side in ((a, location["a"]), (b, location["b"])):
            location_text = f"{place_text(side['place'])}, at {list(side['coordinate'])}"
            value = number_text(side["value"])
            yield f"<br>{letter}: <code>{value}</code> ({_text(location_text)})"
    yield "</div>"


def _tensors(tensors: Sequence[TensorReport], *, several_steps: bool) -> str:
    heads = ("", "tensor", "values", "max |d|", "mean |d|", "relative", "cosine", "why")
    rows = []
    for tensor in tensors:
        found = tensor["statistics"]
        step = f" of step {tensor['step']}" if several_steps else ""
        name = f"<code>{_text(tensor['name'])}</code>{step}{_shards(tensor['places'])}"
        columns = (found["max_abs"], found["mean_abs"], found["relative"], found["cosine"])
        numbers = [str(found["pairs"]), *(f"{number:.6g}" for number in columns)]
        rows.append([_badge(tensor["verdict"]), name, *numbers, _text(tensor["reason"])])
    return html_table(heads, rows, "tensors", numbers=range(2, 7))


def _shards(shards: Sequence[ShardReport]) -> str:
    if len(shards) < 2:
        return ""
    lines = [
        f"{_badge(each['verdict'])} {_text(places_text(each))}: {_text(largest_text(each))} "
        f"{_text(each['problem'])}"
        for each in worst_first(shards)
    ]
    return _folded(f"{len(shards)} ranks and parts", _cut(lines))


def html_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    kind: str = "",
    numbers: Collection[int] = (),
) -> str:
    """Return a table of HTML cells, which scrolls on its own in a narrow window."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if at in numbers else ''}>{cell}</{tag}>"
            for at, cell in enumerate(cells)
        )

    head = line("th", [_text(text) for text in heads])
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _badge(verdict: str, text: str = "") -> str:
    colour = COLOURS[verdict]
    return f'<span class="verdict" style="background:{colour}">{_text(text or verdict)}</span>'


def _list(texts: Sequence[str]) -> str:
    return _cut([_text(text) for text in texts])


def _cut(lines: Sequence[str]) -> str:
    """Return a list of HTML lines, the first `MAX_LISTED`."""
    more = len(lines) - MAX_LISTED
    shown = [*lines[:MAX_LISTED], f"... {more} more (see the JSON)"] if more > 0 else lines
    return f"<ul>{''.join(f'<li>{line}</li>' for line in shown)}</ul>"


def _items(items: Sequence[str]) -> str:
    if len(items) < 2:
        return "".join(f"<br><code>{_text(item)}</code>" for item in items)
    return _folded(f"these are {len(items)}", _list(items))


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def _text(value: object) -> str:
    return html.escape(printable(str(value)))
