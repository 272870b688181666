"""A comparison as one self-contained HTML file, without network access.

The templates escape every text: names come from trainings, which are not trusted.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import plotly.graph_objects as go
from markupsafe import Markup, escape

from stagescope_service.compare.report.as_json import PairReport
from stagescope_service.compare.report.figures import MAX_DETAILED, pictures
from stagescope_service.figure_style import COLOURS, plotly_script
from stagescope_wire import comparison_texts, nonfinite
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import printable

if TYPE_CHECKING:
    import jinja2

TEMPLATES: Final = Path(__file__).parents[2] / "templates"


class PageFigures:
    """Figures of a page; the script at its end draws them."""

    def __init__(self) -> None:
        self._by_id: dict[str, object] = {}

    def add(self, figure: go.Figure) -> Markup:
        """Add a figure; return an empty HTML element for it, below its title as wrapping text."""
        drawing = json.loads(str(figure.to_json()))
        return self._add(drawing["layout"].pop("title")["text"], drawing)

    def add_answer(self, answer: Mapping[str, object]) -> Markup:
        """Add a figure as `/figures/{name}` answers it; see `add`."""
        return self._add(escape(answer["title"]), answer["figure"])

    def _add(self, caption: str, drawing: object) -> Markup:
        element_id = f"figure-{len(self._by_id)}"
        self._by_id[element_id] = drawing
        return Markup(
            f'<figure><figcaption>{caption}</figcaption><div id="{element_id}"></div></figure>'
        )

    def as_script(self) -> Markup:
        """Return the figures as JSON inside HTML."""
        # A `</script>` in a text would end the element; JSON may escape any character.
        text = json.dumps(nonfinite.spell(self._by_id)).replace("<", "\\u003c")
        return Markup(f'<script type="application/json" id="figures">{text}</script>')

    def __len__(self) -> int:
        return len(self._by_id)


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of the HTML templates; values are escaped, control characters too."""
    import jinja2  # here: the service imports this module at its start, and shows few reports

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def as_page(title: str, body: Markup, figures: PageFigures) -> str:
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
    return environment().get_template("page.html").render(
        title=title, body=body, figures=figures, scripts=scripts, style=_text_of("page.css"),
        policy="default-src 'none'; style-src 'unsafe-inline' data:; img-src data: blob:; "
        f"script-src {allowed}",
    )  # fmt: skip


@functools.cache
def _scripts() -> tuple[Markup, Markup]:
    return Markup(plotly_script()), _text_of("page.js")


def _text_of(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


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
    report, figures = cast("JsonObject", comparison_texts.with_numbers(report)), PageFigures()
    changed = comparison_texts.deciding_changes(report)
    changes = [line.strip() for r in changed for line in comparison_texts.change_lines(r, _WIDE)]
    body = environment().get_template("comparison.html").render(
        report=report, title=comparison_texts.title_of(report), words=comparison_texts,
        colours=COLOURS, changes=changes, most=MAX_LISTED, shown=_SHOWN, figures=figures,
        pictures=pictures, undrawn_tensors=_undrawn_tensors,
    )  # fmt: skip
    return as_page(f"{report['verdict']}: comparison of dumps", Markup(body), figures)


def _undrawn_tensors(pair: PairReport) -> int:
    """Return how many tensors differ that have no figure."""
    tensors = [tensor for section in pair["sections"] for tensor in section["tensors"]]
    return sum(tensor["verdict"] == "different" for tensor in tensors) - MAX_DETAILED
