"""List the sentences of documentation, docstrings and messages that are hard to read: `make prose`.

A row is a place to look at, not a verdict. With `--check` the exit status is 1 if there are more
rows, or more long sentences, than `LIMITS` allows.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PATHS: Final = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "deploy", "docs", "client",
    "service", "workers",
)  # fmt: skip
LIMITS: Final = {"documentation": (3.0, 4.0), "docstrings": (3.0, 4.0), "messages": (1.5, 2.0)}
"""Kind of text -> rows in 1000 words, per cent of sentences that are long."""
LONG: Final = 28
"""Words of a sentence; one with more is long."""

_WORD: Final = re.compile(r"[A-Za-z][A-Za-z'-]*")
_FLAGS: Final = {
    "headless": re.compile(
        r"^(?:Of (?!course)|What (?!is \w+\?|does|happens|to )|Whom|Whose|Whoever|From whom|"
        r"Of whom|By whom|So (?:is|are|it|that|do|does)\b|Nor\b|Likewise)"
    ),
    "archaic": re.compile(
        r"\b(?:anew|whom|wherefrom|whereof|thereof|therein|likewise|nought|begun again|"
        r"is there\b(?! a)|are there\b(?! a)|lest|ere|upon|hither|beforehand|in force|as yet|"
        r"withal|somebody|nobody|the other way round|is said\b|are said\b|be said\b|it is said|"
        r"what is asked|is asked\b(?! for)|is answered|are answered)\b",
        re.IGNORECASE,
    ),
    "inverted": re.compile(
        r"(?:, (?:so|nor) (?:is|are|does|do|has|have)\b|"
        r"\b(?:not|never) (?:is|are|does|do|has|have) \w+|: of \w+|; of \w+|\bof which\b|"
        r"\bof whom\b|\bby which\b|\bto which\b|\bfrom which\b|\bof what\b|\bthat of\b)"
    ),
}
_NO_PROSE: Final = re.compile(
    r"^(?:#|\||>>>|\$ |!\[|:|Args:|Returns:|Raises:|Yields:|\d+\. |[-*] )"
)
_ITEM: Final = re.compile(r"^(?:[-*]|\d+\.) (.*)")
_NO_MESSAGE: Final = re.compile(r"\bSELECT\b|\|\w+\||\(\?|^(?:[a-z_]+ ){12}|\n {2}")
_ENTRY: Final = re.compile(r"^\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*: (.*)")
"""The line of an argument or attribute."""


@dataclasses.dataclass
class Total:
    """The sentences of one kind of text."""

    words: int = 0
    sentences: int = 0
    long: int = 0
    rows: int = 0

    @property
    def rate(self) -> float:
        """Rows in 1000 words."""
        return 1000 * self.rows / max(self.words, 1)

    @property
    def share(self) -> float:
        """Per cent of sentences that are long."""
        return 100 * self.long / max(self.sentences, 1)


def sentences(text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) of a text; code blocks and headings are left out.

    Code is between fences, indented below a line that ends in `::`, or the paragraph below a `\\b`,
    which click shows as it is.
    """
    block: list[str] = []
    start, in_code = first_line, False
    below: int | None = None  # lines with more indent are code
    for number, line in enumerate(text.splitlines(), first_line):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if below is not None and (indent > below if below >= 0 else stripped):
            continue
        if stripped:
            below = -1 if stripped == "\b" else indent if stripped.endswith("::") else None
        elif below == -1:
            below = None
        if stripped.startswith("```"):
            in_code, stripped = not in_code, ""
        if in_code or not stripped or _NO_PROSE.match(stripped):
            yield from _split(" ".join(block), start)
            block = []
            item = None if in_code else _ITEM.match(stripped)
            if item:
                block, start = [item[1]], number
            elif not in_code and stripped.startswith("|"):
                for cell in stripped.strip("|").split("|"):
                    yield from _split(cell.strip(), number)
            continue
        entry = _ENTRY.match(stripped)
        if entry and "." not in stripped[: entry.start(1)]:
            yield from _split(" ".join(block), start)
            block, stripped = [], entry[1]
        if not block:
            start = number
        block.append(stripped)
    yield from _split(" ".join(block), start)


def _split(text: str, line: int) -> Iterator[tuple[int, str]]:
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    for sentence in re.split(r"(?<=[.!?])\s+(?=[*'\"]?[A-Z(]|code\b)", text):
        if len(_WORD.findall(sentence)) >= 4:
            yield line, sentence.strip()


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a file's docstrings, also of attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, value.value


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a file's other strings: errors, findings, help; no SQL, no patterns."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr | ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else "code" for part in node.values
            )
            yield node.lineno, "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield node.lineno, node.value


def texts_of(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (kind of text, first line, text) of a page or a module."""
    if path.suffix == ".md":
        yield "documentation", 1, path.read_text("utf-8")
        return
    for line, text in docstrings(path):
        yield "docstrings", line, text
    for line, text in messages(path):
        if not _NO_MESSAGE.search(text):
            yield "messages", line, text


def flags_of(sentence: str) -> list[str]:
    """Return why a sentence is hard to read."""
    found = [name for name, pattern in _FLAGS.items() if pattern.search(sentence)]
    words = len(_WORD.findall(sentence))
    return found + ([f"{words} words"] if words > LONG else [])


def examine(paths: list[Path]) -> tuple[dict[str, Total], list[str]]:
    """Return the totals by kind of text, and the rows, the hardest first."""
    totals = {kind: Total() for kind in LIMITS}
    rows: list[tuple[float, str]] = []
    for path in paths:
        for kind, first, text in texts_of(path):
            total = totals[kind]
            for line, sentence in sentences(text, first):
                words, why = len(_WORD.findall(sentence)), flags_of(sentence)
                total.words += words
                total.sentences += 1
                total.long += words > LONG
                total.rows += bool(why)
                if why:
                    row = f"{path}:{line}: {', '.join(why)}: {sentence[:180]}"
                    rows.append((len(why) + words / 40, row))
    return totals, [row for _, row in sorted(rows, reverse=True)]


def files(names: list[str]) -> list[Path]:
    """Return the pages and modules below some files and directories."""
    found: list[Path] = []
    for name in names:
        path = Path(name)
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [each for each in inside if each.suffix in (".md", ".py") and each.is_file()]
    return found


def main() -> int:
    """Print rows and totals; return 1 if `--check` finds more than the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=40, help="rows to print")
    parser.add_argument("--check", action="store_true", help="fail beyond the limits")
    parser.add_argument("paths", nargs="*")
    options = parser.parse_args()
    names = options.paths or [str(ROOT / name) for name in PATHS if (ROOT / name).exists()]
    totals, rows = examine(files(names))
    is_beyond = any(
        total.rate > LIMITS[kind][0] or total.share > LIMITS[kind][1]
        for kind, total in totals.items()
    )
    if not options.check or is_beyond:
        sys.stdout.write("".join(f"{row}\n" for row in rows[: options.most]))
    for kind, total in totals.items():
        sys.stdout.write(
            f"{kind}: {total.words} words, {total.rate:.1f} rows in 1000 (at most "
            f"{LIMITS[kind][0]:g}), {total.share:.1f} % over {LONG} words (at most "
            f"{LIMITS[kind][1]:g})\n"
        )
    return int(options.check and is_beyond)


if __name__ == "__main__":
    raise SystemExit(main())
