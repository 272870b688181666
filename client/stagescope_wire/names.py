"""Names of tensors, stages, runs, fields and settings: misspelt and normalised ones.

Any tensor name may be recorded and is kept. But statistics read only the names in `tensors`:
`rollout_logprobs` would silently leave a step without numbers.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from stagescope_wire.errors import InvalidInput, NotFound, UnknownName
from stagescope_wire.nonfinite import valid_text
from stagescope_wire.schema import check_run_name
from stagescope_wire.tensors import PAYLOAD_STRINGS, PAYLOAD_TENSORS, STREAM_TENSORS

_log = logging.getLogger("stagescope.names")

KNOWN: Final = frozenset(
    {*STREAM_TENSORS.values(), "ref_log_prob", *PAYLOAD_TENSORS, *PAYLOAD_STRINGS}
)
_MIN_SIMILARITY: Final = 0.9
"""Least similarity (`difflib.SequenceMatcher.ratio`) of a misspelling: NeMo-RL's `prev_log_probs`
is a different name (0.89 to `ref_log_probs`)."""
_MIN_WORD_SIMILARITY: Final = 0.85
"""The same for a word of a name: `jmp` has 0.86 to `jump`, `expert` 0.83 to `expect`."""
_MIN_FIELD_SIMILARITY: Final = 0.75
"""The same for a field: `stp` has 0.86 to `step`, `rnak` 0.75 to `rank`, `tp_rank` 0.73."""
_SHORT_WORD: Final = 3
"""Characters; shorter words that differ are different words (`run-a`, `run-b`)."""
_SEPARATORS: Final = re.compile(r"[-_.]+")
_DIGITS: Final = re.compile(r"\d+")
_LOG_PROBS: Final = re.compile(r"log_?p(?:rob)?s?(?![a-z])")
_TOKEN_IDS: Final = frozenset({"responses", "tokens", "prompts"})
_STREAM_ALIASES: Final = {f"{stream}_log_probs": name for stream, name in STREAM_TENSORS.items()}
"""Stream's name with `_log_probs` -> tensor name: `current_log_probs` -> `log_probs`."""

_OTHER_NAMES: Final = {
    "weight_version": "versions", "weight_versions": "versions", "policy_versions": "versions",
}  # fmt: skip
"""Names that engines and trainers use -> tensor name."""


@functools.lru_cache(maxsize=4096)
def closest(name: str) -> str | None:
    """Return the known tensor name that `name` seems to misspell, else None.

    A known name with a prefix or suffix word (`old_values`, `rewards_scaled`) is a different name,
    as is a name with a slash.
    """
    if name in KNOWN or "/" in name or not name:
        return None
    written = _LOG_PROBS.sub("log_probs", name.lower().replace("-", "_"))
    found = _STREAM_ALIASES.get(written) or _OTHER_NAMES.get(written)
    found = found or (written if written in KNOWN else None)
    if found is None:
        match = difflib.get_close_matches(
            written, [*sorted(KNOWN), *_STREAM_ALIASES], n=1, cutoff=_MIN_SIMILARITY
        )
        found = _STREAM_ALIASES.get(match[0], match[0]) if match else None
        if found and (written.startswith(f"{found}_") or written.endswith(f"_{found}")):
            return None
    return found


def closest_stage(name: str, stages: Collection[str]) -> str | None:
    """Return the stage of `stages` that `name` seems to misspell, else None.

    A stage may have any name. A misspelling has the same words in another order (`update_actor`)
    or differs by a letter or two.
    """
    if name in stages:
        return None
    written = name.lower().replace("-", "_")
    words = sorted(written.split("_"))
    same = [stage for stage in sorted(stages) if sorted(stage.lower().split("_")) == words]
    return next(
        iter(same or difflib.get_close_matches(written, sorted(stages), 1, _MIN_SIMILARITY)), None
    )


def closest_by_words(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` (runs, keys of settings) that `name` seems to misspell.

    None if `name` is known or a different name. Names are compared word by word (separated by `-`,
    `_` and `.`): a misspelling omits, adds, changes or swaps letters within a word. Another number
    (`lr1e5`, `seed-2`), another or an additional word (`grpo-long`), and a prefix or suffix of a
    word (`nomask`, `captured`) make a different name.

    Args:
        name: the name to check.
        names: the known names; the first similar one is returned.
    """
    return _closest_by_words(name, tuple(names))


@functools.lru_cache(maxsize=4096)
def _closest_by_words(name: str, known: tuple[str, ...]) -> str | None:
    if name in known:
        return None
    written, numbers = _words(name), _DIGITS.findall(name)
    for one in known:
        intended = _words(one)
        if _DIGITS.findall(one) != numbers:
            continue
        if "".join(written) == "".join(intended):
            return one
        if len(written) == len(intended) and all(map(_is_typo, written, intended)):
            return one
    return None


def misspelt_streams(names: Iterable[object]) -> Iterator[tuple[str, str]]:
    """Yield (name, known name) of misspelt names of streams or of their tensors."""
    known = {*STREAM_TENSORS, *STREAM_TENSORS.values()}
    for name in map(str, names):
        if name in known:
            continue
        found = closest_by_words(name, sorted(STREAM_TENSORS)) or closest(name)
        if found in known:
            yield name, found


def _words(name: str) -> list[str]:
    return _SEPARATORS.split(name.lower())


def _is_typo(word: str, intended: str) -> bool:
    """Return whether `word` equals `intended`, its plural, or a misspelling of it."""
    if intended in (word, f"{word}s"):
        return True
    short, long = sorted((word, intended), key=len)
    if len(short) < _SHORT_WORD or long.startswith(short) or long.endswith(short):
        return False
    if difflib.SequenceMatcher(None, word, intended).ratio() >= _MIN_WORD_SIMILARITY:
        return True
    wrong = [index for index in range(len(short)) if word[index] != intended[index]]
    swapped = len(word) == len(intended) and len(wrong) == 2 and wrong[1] == wrong[0] + 1
    return swapped and sorted(word) == sorted(intended)


def closest_field(name: str, words: Iterable[str]) -> str | None:
    """Return the field of `words` that `name` seems to misspell, else None.

    A misspelling omits, adds, changes or swaps letters; a name with a prefix or suffix word
    (`tp_rank`, `max_capture_budget`) is a different name.
    """
    known = [*words]
    if name in known:
        return None
    written = name.lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(written, known, 1, _MIN_FIELD_SIMILARITY)), None)


def misspelt(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, known name) of misspelt names among those that were recorded together.

    If the known name was recorded as well, see `misspelt_beside`.
    """
    recorded = list(names)
    for name in recorded:
        found = closest(str(name))
        if found is not None and found not in recorded:
            yield str(name), found


def misspelt_beside(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, known name) of names recorded beside the known one that they look like.

    Statistics read the known one alone. Texts (`response`) beside their token ids are no mistake.
    """
    recorded = list(names)
    for name in recorded:
        found = closest(str(name))
        if found is not None and found in recorded and found not in _TOKEN_IDS:
            yield str(name), found


def safe_name(name: str) -> str:
    """Return `name` as one path component of `[A-Za-z0-9._-]`, at most 150 characters long."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:150]
    # A component of dots alone would lead out of its directory.
    return cleaned if cleaned.strip(".") else "_" * max(len(cleaned), 1)


_NOT_IN_RUN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_RUN_NAME: Final = 100
_CHECKSUM: Final = 8
MAX_DISPLAY_NAME: Final = 300
"""Characters of a display name; a longer one is cut."""
_JOINERS: Final = "\u200c\u200d"
"""Characters that are not printable, and part of words and emoji."""
_warned_runs: set[str] = set()


def normal_run_name(given: object) -> str:
    """Return a text as a valid name of a run.

    A valid name stays as it is. In any other text `-` replaces what is not valid, and a checksum of
    the text follows: two texts never share a name. `qwen3/grpo` is `qwen3-grpo-9bf7109e`.

    Args:
        given: the text.

    Raises:
        InvalidInput: it is no text.
    """
    try:
        return check_run_name(given)
    except InvalidInput:
        if not isinstance(given, str):
            raise
    valid = _NOT_IN_RUN_NAMES.sub("-", given).strip(".-") or "run"
    checksum = hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[:_CHECKSUM]
    return f"{valid[: _MAX_RUN_NAME - _CHECKSUM - 1]}-{checksum}"


def requested_run(given: object) -> str:
    """Return `normal_run_name` of the run that somebody asks about.

    Raises:
        InvalidInput: it is no text.
        NotFound: it is blank: an unset variable would mean another run.
    """
    if isinstance(given, str) and not given.strip():
        raise NotFound(
            "the name of the run is empty",
            expected="the name of a run; without one, the run whose training stage began last",
            advice="is a variable of your shell unset?",
        )
    return normal_run_name(given)


def display_name(given: str) -> str | None:
    """Return a run's name as it was given, for people to read; None if that is blank.

    It has one line of at most `MAX_DISPLAY_NAME` characters, without control characters.
    """
    shown = "".join(
        char if char.isprintable() or char in _JOINERS else " "
        for char in given[: 2 * MAX_DISPLAY_NAME]
    )
    return " ".join(shown.split())[:MAX_DISPLAY_NAME] or None


def run_name(given: object) -> str:
    """Return `normal_run_name` of a text; a process logs once for each name that it changes."""
    name = normal_run_name(given)
    if name != given and name not in _warned_runs:
        _warned_runs.add(name)
        _log.warning(
            "the name of the run is %.200r: people see it so, and it is stored as %s, because a "
            "stored name is 1 to 100 of A-Z a-z 0-9 . _ -. Questions accept both",
            given,
            name,
        )
    return name


MAX_ID: Final = 500
"""Characters of a stored id: it fits into an index of each database."""
_DIGEST: Final = 16


def storable_text(text: str, most: int = 4000) -> str:
    """Return a text that each database stores, at most `most` characters long.

    Lone surrogates are written as escapes, NULs as question marks.
    """
    text = text[:most]
    if text.isprintable():
        return text
    return valid_text(text).replace("\0", "?")[:most]


def storable_id(value: object) -> str:
    """Return an id as a text that each database stores and indexes; other ids stay other ids.

    Lone surrogates and NULs are written as escapes. An id of more than `MAX_ID` characters is its
    beginning and a hash.
    """
    text = str(value)
    if len(text) <= MAX_ID and text.isprintable():
        return text
    clean = valid_text(text).replace("\0", "\\x00")
    if len(clean) <= MAX_ID:
        return clean
    digest = hashlib.blake2b(clean.encode(), digest_size=_DIGEST).hexdigest()
    return f"{clean[: MAX_ID - len(digest) - 1]}~{digest}"


_NAMES_LISTED: Final = 8
"""Rows in the text representation; HTML shows five times as many."""


def unknown_name(name: str, names: Sequence[str], *, what: str = "column") -> UnknownName:
    """Return the error of a name that does not exist; it suggests similar names."""
    similar = similar_names(name, names)
    return UnknownName(
        f"there is no {what} {name!r}",
        expected="" if similar else f"one of {_first(names)}",
        advice=f"did you mean {' or '.join(similar)}?" if similar else "",
    )


def _first(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_LISTED
    listed = ", ".join(names[:_NAMES_LISTED])
    return f"{listed} and {more} more" if more > 0 else listed


def similar_names(name: str, names: Sequence[str], most: int = 3) -> list[str]:
    """Return up to `most` of `names` that are similar to `name`.

    Names with the same last segment come first, then names that contain it, then close matches.
    """
    lowered = str(name).lower()
    last = lowered.rpartition("/")[2]
    parts = [other for other in names if other.lower().rpartition("/")[2] == last]
    parts += [other for other in names if lowered in other.lower() and other not in parts]
    matches = difflib.get_close_matches(lowered, names, n=most)
    by_last = {other.rpartition("/")[2]: other for other in reversed(names)}
    last_matches = [by_last[end] for end in difflib.get_close_matches(last, [*by_last], n=most)]
    return [*dict.fromkeys([*parts[:most], *matches, *last_matches])][:most]


_NATS: Final = (
    "rollout_corr/kl", "rollout_corr/k3_kl", "logprob", "per_round/max_diff_value",
    "rounding/abs_diff_floor",
)  # fmt: skip


_TOKENS: Final = ("counts/tokens", "counts/masked_tokens", "nonfinite/", "calibration/tokens")


_COUNTS: Final = {"counts/sequences": "sequences", "counts/empty_rows": "rows"}


def unit_of_metric(name: str) -> str:
    """Return a metric's unit: `nat`, `tokens`, `sequences`, `rows`, or "" for a pure number."""
    if name.startswith(_TOKENS) or name.endswith(("_count", "token_count")):
        return "tokens"
    if name in _COUNTS:
        return _COUNTS[name]
    if name.startswith(_NATS) or "log_ppl" in name or name.endswith("_abs_diff_mean"):
        return "nat"
    return "nat" if name == "train_rollout_logprob_abs_diff" else ""


BISECT: Final = "bisect"
"""The settings in which a bisection reports its result.

They hold run, attempt (or None) and step of the tokens, the kind of the cause, text and advice.
The kinds "none" and "healthy" name no cause. `ranks` are those of the tokens as [role, rank], none
if the tokens are of all ranks. The name of the bisection's run begins with `bisect-RUN-`."""
EXPERIMENT: Final = f"{BISECT}-"
"""Begin of the name of a run that is an experiment: an arm of a bisection is a step of it. It is no
training, so it fires no triggers, and trainings are listed before it."""


def is_experiment(run: str) -> bool:
    """Return whether a run is an experiment, by its name."""
    return run.startswith(EXPERIMENT)
