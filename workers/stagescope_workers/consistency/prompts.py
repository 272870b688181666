"""Reads and tokenises prompts and data sets, and compares both sides' answers to them."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict

from stagescope_wire.engines import Generation
from stagescope_wire.errors import Forbidden, InvalidInput
from stagescope_wire.nonfinite import JsonObject

Tokenizer: TypeAlias = Any
"""A tokenizer of transformers, which types them as an untyped union of many kinds."""

MAX_BYTES: Final = 256 << 20
MAX_ROWS: Final = 100_000
MAX_IMAGE_BYTES: Final = 32 << 20

_FIELDS: Final = ("prompt", "messages", "ids", "answer", "image", "id")
_EXPECTED: Final = "a JSON object a line: prompt, messages or ids; answer, image, id"
_IMAGES: Final[Mapping[bytes, str]] = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}

BUILT_IN: Final = (
    "The capital of France is",
    "Question: What is 17 + 25? Answer:",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "List three reasons why the sky is blue:\n1.",
    "Translate to German: Good morning, how are you?\n",
    "{\"name\": \"Ada\", \"born\":",
    "Let x be a real number with x^2 = 2. Then x",
)  # fmt: skip
"""The prompts used without a file: prose, sums, code, JSON."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One prompt: a text, OpenAI's messages or token ids; and the right answer, if known."""

    name: str
    prompt: str | None = None
    messages: tuple[JsonObject, ...] | None = None
    ids: tuple[int, ...] | None = None
    answer: str | None = None
    image: Path | None = None


def built_in() -> list[Item]:
    """Return the prompts of this package."""
    return [Item(str(index), prompt=text) for index, text in enumerate(BUILT_IN)]


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """Read prompts: JSONL where the file name ends so, else a text with one prompt per line.

    Args:
        path: the file. Images are files below its directory.
        limit: the maximal number of prompts.

    Raises:
        InvalidInput: the file or one of its lines cannot be read.
        Forbidden: an image outside of the file's directory.
    """
    maximum = min(MAX_ROWS, limit or MAX_ROWS)
    is_json = path.suffix in (".jsonl", ".json", ".ndjson")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidInput(
                f"{str(path)!r} has {path.stat().st_size} bytes", expected=f"up to {MAX_BYTES}"
            )
        with path.open(encoding="utf-8") as file:
            items = list(_items(file, path, is_json, maximum))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{str(path)!r} cannot be read ({error})", expected="a text") from error
    if not items:
        raise InvalidInput(f"{str(path)!r} has no prompt", expected=_EXPECTED)
    return items


def _items(lines: Iterable[str], path: Path, is_json: bool, maximum: int) -> Iterator[Item]:
    found = 0
    for number, line in enumerate(lines, 1):
        if found == maximum:
            return
        text = line.rstrip("\r\n")
        if text.strip():
            yield _item(text, number, path) if is_json else Item(str(number), prompt=text)
            found += 1


def _item(text: str, number: int, path: Path) -> Item:
    where = f"line {number} of {str(path)!r}"
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON ({error})", expected=_EXPECTED) from error
    kinds = [name for name in ("prompt", "messages", "ids") if _has_value(fields, name)]
    if len(kinds) != 1:
        raise InvalidInput(f"{where} has {' and '.join(kinds) or 'no prompt'}", expected=_EXPECTED)
    prompt, messages, ids, answer, image, name = (fields.get(field) for field in _FIELDS)
    if prompt is not None and not (isinstance(prompt, str) and prompt):
        raise InvalidInput(f"{where}: prompt is not a text", expected=_EXPECTED)
    if messages is not None and not _are_messages(messages):
        raise InvalidInput(f"{where}: messages are invalid", expected="[{role, content}, ...]")
    if ids is not None and not (
        isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids)
    ):
        raise InvalidInput(f"{where}: ids are not token ids", expected="a list of ints from 0")
    return Item(
        name=str(number if name is None else name)[:200],
        prompt=prompt,
        messages=None if messages is None else tuple(messages),
        ids=None if ids is None else tuple(ids),
        answer=None if answer is None else str(answer),
        image=None if image is None else _image_path(image, path, where),
    )


def _has_value(fields: object, name: str) -> bool:
    return isinstance(fields, dict) and fields.get(name) is not None


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(each, dict)
            and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), str)
            for each in value
        )
    )


def _image_path(value: object, path: Path, where: str) -> Path:
    folder = path.parent.resolve()
    found = (folder / str(value)).resolve()
    if not found.is_relative_to(folder):
        raise Forbidden(
            f"{where}: the image {str(value)!r:.200} is outside of {str(folder)!r}",
            expected="a file below the data set's directory",
        )
    if not found.is_file():
        raise InvalidInput(f"{where}: there is no image {str(value)!r:.200}")
    return found


def token_ids(item: Item, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
    """Return the tokens of a prompt, as the tokenizer of the model makes them.

    Args:
        item: the prompt.
        tokenizer: a tokenizer of transformers.
        chat: render a text as a user's message by the model's template, as messages always are.

    Raises:
        InvalidInput: the tokenizer has no template.
    """
    if item.ids is not None:
        return list(item.ids)
    if item.messages is None and not chat:
        return list(tokenizer(item.prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput(
            "the model's tokenizer has no chat template",
            expected="prompts as texts, without --chat",
        )
    messages = item.messages or ({"role": "user", "content": item.prompt},)
    rendered = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(rendered)


def data_url(path: Path) -> str:
    """Return an image file as a `data:` URL.

    Raises:
        InvalidInput: too large, or not an image of a known kind.
    """
    content = path.read_bytes() if path.stat().st_size <= MAX_IMAGE_BYTES else b""
    kind = next((kind for magic, kind in _IMAGES.items() if content.startswith(magic)), None)
    if kind is None:
        raise InvalidInput(
            f"{str(path)!r} is not an image that can be sent",
            expected=f"PNG, JPEG, GIF or WebP of up to {MAX_IMAGE_BYTES >> 20} MiB",
        )
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


MATCHES: Final = ("exact", "contains", "regex")


@dataclasses.dataclass(frozen=True)
class Marking:
    """When an answer is right.

    Attributes:
        match: "exact": the full answer, without spaces at its ends. "contains": a part of it.
            "regex": the last match of `pattern` in it (or of the pattern's first group).
        pattern: a regular expression, for "regex".
    """

    match: str = "contains"
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.match not in MATCHES or (self.match == "regex") != (self.pattern is not None):
            raise InvalidInput(
                f"match is {self.match!r:.50} and pattern {self.pattern!r:.50}",
                expected=f"one of {', '.join(MATCHES)}, and a pattern for regex alone",
            )
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise InvalidInput(f"pattern {self.pattern!r:.100}: {error}") from error

    def is_right(self, text: str, answer: str) -> bool:
        """Return whether `text` gives `answer`."""
        expected = answer.strip()
        if self.match == "exact":
            return text.strip() == expected
        if self.match == "contains":
            return expected in text
        found = list(re.finditer(self.pattern or "", text))
        if not found:
            return False
        last = found[-1]
        return (last[1] if last.re.groups else last[0] or "").strip() == expected


class AnswerRow(TypedDict):
    """Both sides' answers to one prompt."""

    sample: str
    answer: str | None
    engine: str
    other: str
    first_difference: int | None
    """The first token that differs; None where none does."""
    engine_right: bool | None
    """None where the right answer is unknown."""
    other_right: bool | None


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerAgreement:
    """Two sides' answers to the same prompts.

    Attributes:
        answers: the number of prompts.
        same: the number of answers that are the same, token by token.
        token_share: tokens up to the first that differs, over those of the longer answer.
        marked: the number of prompts with a right answer.
        engine_right, other_right: how many of those each side got right.
        rows: the answers to each prompt.
    """

    answers: int
    same: int
    token_share: float
    marked: int
    engine_right: int
    other_right: int
    rows: tuple[AnswerRow, ...]

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """The shares of right answers, the engine's first; None where nothing was marked."""
        if not self.marked:
            return None
        return self.engine_right / self.marked, self.other_right / self.marked


def compare_answers(
    items: Sequence[Item],
    engine: Sequence[Generation],
    other: Sequence[Generation],
    marking: Marking,
) -> AnswerAgreement:
    """Compare both sides' answers with each other, and with the right ones."""
    rows: list[AnswerRow] = []
    shared = longest = 0
    for item, one, two in zip(items, engine, other, strict=True):
        one_units, two_units = _units(one, two)
        first = _first_difference(one_units, two_units)
        length = max(len(one_units), len(two_units))
        shared += length if first is None else first
        longest += length
        right = [
            None if item.answer is None else marking.is_right(each.text, item.answer)
            for each in (one, two)
        ]
        rows.append(
            {
                "sample": item.name, "answer": item.answer, "engine": one.text, "other": two.text,
                "first_difference": first, "engine_right": right[0], "other_right": right[1],
            }
        )  # fmt: skip
    marked = [row for row in rows if row["answer"] is not None]
    return AnswerAgreement(
        answers=len(rows),
        same=sum(row["first_difference"] is None for row in rows),
        token_share=shared / longest if longest else 1.0,
        marked=len(marked),
        engine_right=sum(bool(row["engine_right"]) for row in marked),
        other_right=sum(bool(row["other_right"]) for row in marked),
        rows=tuple(rows),
    )


def _units(one: Generation, two: Generation) -> tuple[Sequence[object], Sequence[object]]:
    """Return token ids where both sides have them, else the characters of the texts."""
    if one.token_ids is not None and two.token_ids is not None:
        return one.token_ids, two.token_ids
    return one.text, two.text


def _first_difference(one: Sequence[object], two: Sequence[object]) -> int | None:
    for index, (first, second) in enumerate(zip(one, two, strict=False)):
        if first != second:
            return index
    return None if len(one) == len(two) else min(len(one), len(two))
