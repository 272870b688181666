"""One HTML file with figures that needs no network: what it may run is named by its checksum."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from stagescope import nonfinite

_HERE: Final = Path(__file__).parent
_Figure = Mapping[str, Any]


class Figures:
    """The figures of a page, which are drawn by the script at its end."""

    def __init__(self) -> None:
        self._drawn: dict[str, _Figure] = {}

    def add(self, figure: go.Figure) -> str:
        """Return the place of a figure, its title above it as text that wraps."""
        name = f"figure-{len(self._drawn)}"
        said = json.loads(str(figure.to_json()))
        caption = said["layout"].pop("title")["text"]
        self._drawn[name] = said
        return f'<figure><figcaption>{caption}</figcaption><div id="{name}"></div></figure>'

    def as_script(self) -> str:
        """Return the figures as JSON inside HTML."""
        # `</script>` would end it; JSON may spell any character.
        said = json.dumps(nonfinite.spell(self._drawn)).replace("<", "\\u003c")
        return f'<script type="application/json" id="figures">{said}</script>'

    def __len__(self) -> int:
        return len(self._drawn)


def as_page(title: str, body: str, figures: Figures) -> str:
    """Return a whole page.

    The browser fetches nothing, and runs nothing but the scripts of this package, whatever stands
    in `body` (Content-Security-Policy).

    Args:
        title: of the window; plain text.
        body: as HTML.
        figures: whose places are in `body`.
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
    # plotly 5 links a style sheet of its maps from the network, wherever it is loaded.
    drawing = re.sub(r"https://unpkg\.com/[^\"]*\.css", "data:text/css,", get_plotlyjs())
    return drawing, (_HERE / "page.js").read_text(encoding="utf-8")


@functools.cache
def _checksum(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
