"""Policy versions that are texts, as engines tag their weights (`step-42`, `default`).

They travel as integers in the tensor `versions`, with their texts in the metadata under
`VERSION_NAMES`. If the texts differ in one number alone, the integers are these numbers: they are
ordered, and their distance from the trainer's version is known. A single text also gives its number
if every word in it means a version (`step-42`, but not `Qwen3`). Otherwise each integer is a hash
of its text, the same in every process. Such versions have the order in which they appear, and no
distance.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensorfile import WireTensor

VERSION_NAMES: Final = "version_names"
"""Key in the metadata of a payload: integer, as a text -> text of the version."""
MAX_NAMES: Final = 1000
_MAX_TEXT: Final = 100
_UNNUMBERED: Final = 1 << 62
_INTEGER: Final = re.compile(r"[+-]?\d{1,18}\Z")
_CODE: Final = re.compile(r"[+-]?\d{1,19}\Z")
_NUMBERED: Final = re.compile(r"(\D*)(\d{1,18})(\D*)\Z")
_TAG: Final = re.compile(
    r"(?:global|steps?|iter|iteration|version|ver|v|weights?|ckpt|checkpoint|[\W_])*\Z", re.I
)
"""Text around a number that shows that it is a version, if there is no other text."""


def is_numbered(version: int) -> bool:
    """Return whether an integer is a version's number, not a text's hash."""
    return version < _UNNUMBERED


def encode_versions(texts: Iterable[str]) -> tuple[list[int], dict[str, str]]:
    """Return the integer of each text, and the names of the integers; plain integers have none.

    Raises:
        InvalidTensor: more than `MAX_NAMES` different texts that are no integers.
    """
    listed = [*texts]
    distinct = dict.fromkeys(listed)
    if all(map(_INTEGER.match, distinct)):
        codes = {text: int(text) for text in distinct}
        return [codes[text] for text in listed], {}
    if len(distinct) > MAX_NAMES:
        raise InvalidTensor(
            f"versions has {len(distinct)} different texts", expected=f"at most {MAX_NAMES}"
        )
    numbered = {text: match for text in distinct if (match := _NUMBERED.match(text))}
    is_shown = len(distinct) > 1 or all(
        _TAG.match(around) for match in numbered.values() for around in (match[1], match[3])
    )
    if is_shown and differ_in_number(distinct):
        codes = {text: int(match[2]) for text, match in numbered.items()}
    else:
        codes = {text: _hash(text) for text in distinct}
    names = {str(code): _shown(text) for text, code in codes.items()}
    return [codes[text] for text in listed], names


def differ_in_number(texts: Iterable[str]) -> bool:
    """Return whether each text has one number, and all have the same around it."""
    around = {match and (match[1], match[3]) for match in map(_NUMBERED.match, texts)}
    return None not in around and len(around) <= 1


def text_versions(value: object) -> tuple[WireTensor, dict[str, str]] | None:
    """Return texts of each row or token as a tensor with its names; None if there is no text.

    Args:
        value: a list or array of texts, or a list of rows of them; integers may be among them.

    Raises:
        InvalidTensor: something else among the texts, or too many texts.
    """
    shape = None
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "OU":
            return None
        shape = value.shape
        value = value.reshape(-1).tolist()
    if not isinstance(value, list | tuple):
        return None
    rows = [_row(row) for row in value]
    is_ragged = any(row is not None for row in rows)
    items: list[object] = [item for row in rows for item in row or ()] if is_ragged else [*value]
    if not any(isinstance(item, str) for item in items):
        return None
    if is_ragged and None in rows:
        raise InvalidTensor("versions has rows and single texts", expected="one or the other")
    wrong = [item for item in items if not isinstance(item, str | int | np.integer)]
    if wrong:
        raise InvalidTensor(
            f"versions has {wrong[0]!r:.100} among its texts",
            expected="a text or an integer for each row or token",
        )
    codes, names = encode_versions(map(str, items))
    coded = np.array(codes, np.int64)
    if is_ragged:
        offsets = np.cumsum([0, *(len(row or ()) for row in rows)], dtype=np.int64)
        return ("int64", coded.shape, coded, offsets), names
    coded = coded if shape is None else coded.reshape(shape)
    return ("int64", coded.shape, coded, None), names


def _row(value: object) -> Sequence[object] | None:
    if isinstance(value, np.ndarray):
        listed: list[object] = value.tolist()
        return listed
    return value if isinstance(value, list | tuple) else None


def names_of(meta: Mapping[str, object] | None) -> dict[int, str]:
    """Return the names of versions in a payload's metadata, in the order of their appearance."""
    named = (meta or {}).get(VERSION_NAMES)
    found: dict[int, str] = {}
    for code, text in named.items() if isinstance(named, Mapping) else ():
        if _CODE.match(str(code)):
            found[int(code)] = str(text)
    return found


def merge_names(several: Iterable[Mapping[int, str]]) -> dict[int, str]:
    """Merge names of several payloads; a text whose number another one has is named by its hash."""
    merged: dict[int, str] = {}
    for names in several:
        for code, text in names.items():
            if merged.setdefault(code, text) != text:
                merged[_hash(text)] = text
    return merged


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return _UNNUMBERED | (int.from_bytes(digest, "big") & (_UNNUMBERED - 1))


def _shown(text: str) -> str:
    plain = "".join(c if c.isprintable() else "?" for c in text[: _MAX_TEXT + 1])
    return plain if len(plain) <= _MAX_TEXT else f"{plain[: _MAX_TEXT - 3]}..."
