"""Hooks of the site's build, named in mkdocs.yml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File

ROOT: Final = Path(__file__).parents[2]
_OUTWARD: Final = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#\s]+)(?:#[^)\s]*)?\)")
"""A link to a file of the repository that is no page of the site."""
_WEIGHTS: Final = {
    "glossary|service-words|field-words": 4,
    "troubleshooting|manage-runs|cost|backup|trust|operations|page|attach|doctor": 2,
    "reference-.*|comparison.*|.*-tested|trainers-own-tests|whole-trainings|doctor-(?!explained).*|"
    "tree|extend|develop|architecture.*|bisect-arms|metric-precision|mismatch-parts": 0.2,
}
"""Pattern of pages -> their weight in the search: words first, what few people look up last."""
_CELL: Final = re.compile(r"<td[^>]*>.*?</td>")


_FIRST: Final = re.compile(r"(?m)^(?![#!|`>\[<\s-]).+")
"""The first line of a page that is a sentence."""


def on_files(files: Any, config: Any) -> Any:
    """Add deploy/README.md as a page of the site: it stands beside the files that it describes."""
    text = (ROOT / "deploy/README.md").read_text("utf-8").replace("](../docs/", "](")
    files.append(File.generated(config, "deploy.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that leave docs/ by the file's name: the site is read without the repository.

    A link to a file that does not exist stays, and the strict build fails at it.
    """
    for pages, weight in _WEIGHTS.items():
        if re.fullmatch(pages, page.file.name):
            page.meta["search"] = {"boost": weight}
    return _OUTWARD.sub(_named, markdown.replace("](../deploy/README.md", "](deploy.md"))


def _named(link: re.Match[str]) -> str:
    if not (ROOT / link["path"]).exists():
        return link[0]
    return f"{link['text']} (`{link['path']}` in the repository)"


def on_page_content(html: str, **_: Any) -> str:
    r"""Show `\|` in a table as a bar, as repositories do: a bare one ends the cell."""
    return _CELL.sub(lambda found: found[0].replace(r"\|", "|"), html)


def on_post_build(config: Any, **_: Any) -> None:
    """Remove what the site never loads: source maps, and the search in other languages."""
    folder = Path(config.site_dir)
    for path in (*folder.rglob("*.map"), *folder.glob("assets/javascripts/lunr/**/*.js")):
        path.unlink()
    for path in folder.glob("sitemap.xml*"):  # they need the site's address
        path.unlink()
    (folder / "llms.txt").write_text(_for_agents(config["docs_dir"]), "utf-8")


def _for_agents(docs: str) -> str:
    """Return llms.txt: what the project is, and every page with its first sentence."""
    lines = [
        "# stagescope", "",
        "> A debugging service for RL post-training of LLMs on Ray: what is wrong, since which "
        "step, on which rank, in which operator, and why.", "",
        "Coding agents ask it through `stagescope mcp`: see agents.html.", "", "## Pages", "",
    ]  # fmt: skip
    for path in sorted(Path(docs).glob("*.md")):
        text = path.read_text("utf-8")
        title = text.partition("\n")[0].lstrip("# ")
        sentence = _FIRST.search(text.partition("\n")[2])
        about = f": {sentence[0].partition('. ')[0].rstrip('.:')}." if sentence else ""
        lines.append(f"- [{title}]({path.stem}.html){about}")
    return "\n".join([*lines, ""])
