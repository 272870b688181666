"""A character-level tokenizer: one token a character, so that every text is readable in a dump."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

PAD: Final = "_"
CALL: Final = "="
"""Ends a round: the text before it goes to the calculator."""
ANSWER: Final = "$"
"""Ends a sample: the number before it is the answer."""
RESULT: Final = ";"
"""Ends the calculator's result."""
WRONG: Final = "?"
"""The calculator's result for an expression that it cannot read."""

TOKENS: Final = (PAD, ANSWER, CALL, RESULT, WRONG, *"0123456789", *"+-*/()", *" >|[]")
"""Token id -> character; id 0 pads. Every character is its own token, also for the engine."""

PAD_ID: Final = 0
VOCABULARY_SIZE: Final = len(TOKENS)

_IDS: Final = {token: index for index, token in enumerate(TOKENS)}
CALL_ID: Final = _IDS[CALL]
ANSWER_ID: Final = _IDS[ANSWER]


def encode(text: str) -> list[int]:
    """Return the token ids of `text`.

    Raises:
        ValueError: a character that is not in `TOKENS`.
    """
    try:
        return [_IDS[character] for character in text]
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} is not one of {''.join(TOKENS)!r}") from None


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids; padding shows as `_`."""
    return "".join(TOKENS[index] for index in ids)


def write_tokenizer(path: Path) -> None:
    """Write it as a `tokenizer.json`, which the service needs to show the text of tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    characters = Tokenizer(models.WordLevel(dict(_IDS), unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.save(str(path))
