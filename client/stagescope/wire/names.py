"""Which known name a recorded tensor's name is a misspelling of.

Any name may be recorded, and is kept; but statistics read the names of the schema alone, so that
`rollout_logprobs` would leave a step without numbers, and nobody would say why.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from stagescope.wire.schema import PAYLOAD_STRINGS, PAYLOAD_TENSORS, STREAM_TENSORS

KNOWN: Final = frozenset(
    {*STREAM_TENSORS.values(), "ref_log_prob", *PAYLOAD_TENSORS, *PAYLOAD_STRINGS}
)
_CLOSE: Final = 0.9
"""Similarity (`difflib.SequenceMatcher.ratio`) from which on a name is taken for a misspelling:
NeMo-RL's `prev_log_probs` is a name of its own (0.89 to `ref_log_probs`)."""
_CLOSE_WORD: Final = 0.85
"""The same of a word of a name: `jmp` is 0.86 to `jump`, `expert` 0.83 to `expect`."""
_CLOSE_FIELD: Final = 0.75
"""The same of a field: `stp` is 0.86 to `step`, `rnak` 0.75 to `rank`, `tp_rank` 0.73."""
_SHORT_WORD: Final = 3
"""Characters; shorter words that differ are others (`run-a`, `run-b`)."""
_SEPARATORS: Final = re.compile(r"[-_.]+")
_DIGITS: Final = re.compile(r"\d+")
_LOG_PROBS: Final = re.compile(r"log_?p(?:rob)?s?(?![a-z])")
_MEANT: Final = {f"{stream}_log_probs": name for stream, name in STREAM_TENSORS.items()}
"""What a stream's name with `_log_probs` means: `current_log_probs` is called `log_probs`."""


@functools.lru_cache(maxsize=4096)
def closest(name: str) -> str | None:
    """Return the known name that `name` seems to mean; None where it is known, or its own.

    A known name with another word before or behind it (`old_values`, `rewards_scaled`) is its own,
    as is one with a slash.
    """
    if name in KNOWN or "/" in name or not name:
        return None
    written = _LOG_PROBS.sub("log_probs", name.lower().replace("-", "_"))
    found = _MEANT.get(written) or (written if written in KNOWN else None)
    if found is None:
        match = difflib.get_close_matches(written, [*sorted(KNOWN), *_MEANT], n=1, cutoff=_CLOSE)
        found = _MEANT.get(match[0], match[0]) if match else None
        if found and (written.startswith(f"{found}_") or written.endswith(f"_{found}")):
            return None
    return found


def closest_stage(name: str, stages: Collection[str]) -> str | None:
    """Return the stage of `stages` that `name` seems to mean; None where it is one, or its own.

    A stage may have any name; what has the words of another in any order (`update_actor`), or
    differs from one by a letter or two, is taken for a misspelling.
    """
    if name in stages:
        return None
    written = name.lower().replace("-", "_")
    words = sorted(written.split("_"))
    same = [stage for stage in sorted(stages) if sorted(stage.lower().split("_")) == words]
    return next(iter(same or difflib.get_close_matches(written, sorted(stages), 1, _CLOSE)), None)


def closest_by_words(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` (runs, keys of settings) that `name` seems to mean.

    None where it is one, or its own. Compared word by word (`-`, `_` and `.` part them): letters
    that are left out, added, changed or swapped within a word are a misspelling. Another number
    (`lr1e5`, `seed-2`), another word or one more (`grpo-long`), and what stands before or behind
    a word (`nomask`, `captured`) make another name.

    Args:
        name: as it was written.
        names: that are known; of several that are alike the first answers.
    """
    return _closest_by_words(name, tuple(names))


@functools.lru_cache(maxsize=4096)
def _closest_by_words(name: str, known: tuple[str, ...]) -> str | None:
    if name in known:
        return None
    written, numbers = _words(name), _DIGITS.findall(name)
    for one in known:
        meant = _words(one)
        if _DIGITS.findall(one) != numbers:
            continue
        if "".join(written) == "".join(meant):
            return one
        if len(written) == len(meant) and all(map(_is_slip, written, meant)):
            return one
    return None


def misspelt_streams(names: Iterable[object]) -> Iterator[tuple[str, str]]:
    """Yield (name, what it seems to mean) of names of streams, or of their tensors."""
    said = [*map(str, names)]
    known = {*STREAM_TENSORS, *STREAM_TENSORS.values()}
    for name in said:
        if name in known:
            continue
        found = closest_by_words(name, sorted(STREAM_TENSORS)) or closest(name)
        if found in known and found not in said:
            yield name, found


def _words(name: str) -> list[str]:
    return _SEPARATORS.split(name.lower())


def _is_slip(word: str, meant: str) -> bool:
    """Whether a word is another one, or that with a slip of the pen."""
    if meant in (word, f"{word}s"):
        return True
    short, long = sorted((word, meant), key=len)
    if len(short) < _SHORT_WORD or long.startswith(short) or long.endswith(short):
        return False
    if difflib.SequenceMatcher(None, word, meant).ratio() >= _CLOSE_WORD:
        return True
    other = [at for at in range(len(short)) if word[at] != meant[at]]
    swapped = len(word) == len(meant) and len(other) == 2 and other[1] == other[0] + 1
    return swapped and sorted(word) == sorted(meant)


def closest_word(name: str, words: Iterable[str]) -> str | None:
    """Return the word of `words` (fields of a call, keys of settings) that `name` seems to mean.

    None where it is one, or its own: letters that are left out, added, changed or swapped are a
    misspelling, another word before or behind it (`tp_rank`, `max_capture_budget`) is not.
    """
    known = [*words]
    if name in known:
        return None
    written = name.lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(written, known, 1, _CLOSE_FIELD)), None)


def misspelt(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, known name that it seems to mean) of what was recorded together.

    A name beside which the known one was recorded as well is its own.
    """
    recorded = list(names)
    for name in recorded:
        found = closest(str(name))
        if found is not None and found not in recorded:
            yield str(name), found
