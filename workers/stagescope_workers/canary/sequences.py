"""Chooses the token sequences of a canary: the same in each process and after a restart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from stagescope_wire.canary import MAX_SEQUENCES
from stagescope_wire.engines.base import check_ids
from stagescope_wire.errors import InvalidInput

Row: TypeAlias = tuple[int, ...]

TEXT: Final = "Question: what is 12 + 30?\nAnswer: 12 + 30 = 42, since 2 + 0 = 2 and 1 + 3 = 4."
"""Tokenised on both sides; its tokens are the first sequence."""
BUDGET: Final = 2048
"""Most tokens of all sequences together."""
SCORED: Final = 256
"""Tokens at the end of a sequence whose log-probs are compared; this bounds the logits' memory."""
SHARED: Final = 256
"""Tokens that two sequences share, a multiple of the engines' usual cache blocks of 16 to 128."""
MIN_SHARED: Final = 32
"""Fewest equal tokens that count as a shared prefix."""
MAX_PROMPT: Final = 64
"""Most tokens of a sequence after which the engine decodes."""
_SHORT: Final = (8, 16, 32)
_SUFFIX: Final = 16
_SPREAD: Final = 128
_UNKNOWN_LENGTH: Final = 1 << 20
"""A tokenizer without a maximum length names a huge number."""


class Sequences(NamedTuple):
    """The sequences of a canary.

    Attributes:
        rows: token ids of each.
        note: what was cut to fit; "" if nothing was.
    """

    rows: tuple[Row, ...]
    note: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(map(len, self.rows))

    @property
    def prompts(self) -> tuple[Row, ...]:
        """Up to four short sequences, after which the engine decodes."""
        short = sorted((row for row in self.rows if len(row) <= MAX_PROMPT), key=len)
        return tuple(short[:4]) or (min(self.rows, key=len)[:MAX_PROMPT],)

    @property
    def sharing(self) -> tuple[Row, ...]:
        """The two sequences with the longest shared prefix; none if no two share enough."""
        pairs = [(a, b) for at, a in enumerate(self.rows) for b in self.rows[at + 1 :]]
        best = max(pairs, key=lambda pair: _shared(*pair), default=None)
        return best if best is not None and _shared(*best) >= MIN_SHARED else ()


def _shared(one: Row, other: Row) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def fixed(own: Sequence[Sequence[int]] | Sequences | None, tokenizer: Any) -> Sequences:
    """Return a user's own sequences, else those of a tokenizer.

    Raises:
        InvalidInput: there is neither, or the sequences cannot be used.
    """
    if isinstance(own, Sequences):
        return own
    if own is not None:
        return given(own)
    if tokenizer is None:
        raise InvalidInput(
            "a canary has neither sequences nor a tokenizer",
            expected="tokenizer=..., from which the sequences are chosen, or sequences=...",
        )
    return of_tokenizer(tokenizer)


def of_tokenizer(
    tokenizer: Any, *, max_length: int | None = None, budget: int = BUDGET
) -> Sequences:
    """Return the sequences for a tokenizer: `TEXT` by it, and tokens of its vocabulary.

    Args:
        tokenizer: of transformers, or alike.
        max_length: most tokens of a sequence; None: the tokenizer's.
        budget: most tokens of all sequences together.
    """
    special = set(getattr(tokenizer, "all_special_ids", None) or ())
    named = getattr(tokenizer, "model_max_length", None) or _UNKNOWN_LENGTH
    limits = [n for n in (max_length, named) if n is not None and n < _UNKNOWN_LENGTH]
    return choose(
        len(tokenizer),
        bos=getattr(tokenizer, "bos_token_id", None),
        avoid=special,
        text=tokenizer(TEXT)["input_ids"],
        max_length=min(limits, default=None),
        budget=budget,
    )


def choose(
    vocabulary: int,
    *,
    bos: int | None = None,
    avoid: Iterable[int] = (),
    text: Sequence[int] = (),
    max_length: int | None = None,
    budget: int = BUDGET,
) -> Sequences:
    """Return sequences of a vocabulary, by its size alone.

    Three are short, and two share a prefix. One has tokens from all of the vocabulary, so that a
    MoE often switches its experts. The last is as long as `max_length` and `budget` allow.

    Args:
        vocabulary: number of token ids.
        bos: the token that begins each sequence; None: none.
        avoid: ids that are not used, such as special tokens.
        text: ids that replace the second short sequence.
        max_length: most tokens of a sequence.
        budget: most tokens of all sequences together.

    Raises:
        InvalidInput: the vocabulary, the length or the budget is too small.
    """
    left_out = {*avoid, *([] if bos is None else [bos])}
    ids = [token for token in range(vocabulary) if token not in left_out]
    longest = max_length if max_length is not None else budget
    if len(ids) < 2 or longest < 2 * _SUFFIX or budget < sum(_SHORT):
        raise InvalidInput(
            f"a vocabulary of {vocabulary}, {longest} tokens a sequence, {budget} in all",
            expected=f"2 usable ids, {2 * _SUFFIX} tokens a sequence and {sum(_SHORT)} in all",
        )
    begin = [] if bos is None else [bos]
    prefix = _drawn("prefix", min(SHARED, longest // 2, budget // 8), ids)
    spread = [ids[at * len(ids) // _SPREAD] for at in range(_SPREAD)]
    rows = [
        [*begin, *_drawn("short", _SHORT[0], ids)],
        list(text) or [*begin, *_drawn("text", _SHORT[1], ids)],
        [*begin, *_drawn("medium", _SHORT[2], ids)],
        [*begin, *prefix, *_drawn("one end", _SUFFIX, ids)],
        [*begin, *prefix, *_drawn("another end", _SUFFIX, ids)],
        [*begin, *dict.fromkeys(spread)],
    ]
    rows = [row[:longest] for row in rows]
    rest = budget - sum(map(len, rows))
    length = min(longest, rest)
    if length > max(map(len, rows)):
        rows.append([*begin, *_drawn("longest", length - len(begin), ids)])
    note = ""
    if max_length is None:
        note = f"the longest has {max(map(len, rows))} tokens: the maximum length is not known"
    elif max(map(len, rows)) < max_length:
        note = (
            f"the longest has {max(map(len, rows))} of {max_length} tokens: all together have a "
            f"budget of {budget}"
        )
    return Sequences(tuple(map(tuple, rows)), note)


def given(rows: Iterable[Sequence[int]]) -> Sequences:
    """Return a user's own sequences.

    Raises:
        InvalidInput: too few or many, or one is not token ids.
    """
    checked = tuple(tuple(check_ids(row)) for row in rows)
    if not 1 <= len(checked) <= MAX_SEQUENCES or min(map(len, checked)) < 2:
        raise InvalidInput(
            f"{len(checked)} sequences", expected=f"1 to {MAX_SEQUENCES}, of at least two tokens"
        )
    return Sequences(checked)


def _drawn(name: str, count: int, ids: Sequence[int]) -> list[int]:
    """Return tokens that look random and depend only on the arguments."""
    found: list[int] = []
    block = 0
    while len(found) < count:
        digest = hashlib.sha256(f"{name} {block}".encode()).digest()
        numbers = (int.from_bytes(digest[at : at + 4], "big") for at in range(0, 32, 4))
        found += (ids[number % len(ids)] for number in numbers)
        block += 1
    return found[:count]
