"""Asks an engine for the arms of a canary."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from stagescope_wire.canary import (
    AGAIN,
    BASE,
    CACHED,
    DECODED,
    DECODED_SCORED,
    FIXED,
    UNCACHED,
    Arm,
    Canary,
    Check,
)
from stagescope_wire.errors import StagescopeError
from stagescope_wire.nonfinite import Json
from stagescope_workers.canary.checks import (
    Drawn,
    check_sampling,
    check_temperature,
    check_tokens,
    slope,
)
from stagescope_workers.canary.sequences import SCORED, TEXT, Row, Sequences

Cache: TypeAlias = Literal["salted", "unsalted", "none"]
"""The prefix cache of an engine: with a salt in each request, without one, or no cache."""

_DECODED_TOKENS: Final = 32
"""After each prompt."""
_SEEDS: Final = (10, 20)
_SEEDS_OF_ONE: Final = (30, 40, 50, 60, 70)
"""Of single tokens after each prompt, which tell the temperature."""


class Decoded(NamedTuple):
    """Tokens that an engine decoded.

    Attributes:
        ids: the tokens.
        log_probs: theirs.
        likeliest: the log-probs of the likeliest tokens in the place of each; () if unknown.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    likeliest: tuple[tuple[float, ...], ...] = ()


class Rows(NamedTuple):
    """Rows of token ids for an engine, in one call.

    Attributes:
        rows: the token ids.
        model: the name of the model or adapter; None: the engine's own.
        salt: the name of the prefix cache; None: the one that the rollout's requests use.
    """

    rows: Sequence[Row]
    model: str | None = None
    salt: str | None = None


@runtime_checkable
class Scorer(Protocol):
    """What a canary needs of an engine; `engine_scorer` has one for `stagescope_wire.engines`."""

    @property
    def name(self) -> str:
        """The name of the engine instance."""
        ...

    @property
    def cache(self) -> Cache:
        """Its prefix cache."""
        ...

    @property
    def max_length(self) -> int | None:
        """Most tokens of a row and one more; None: unknown."""
        ...

    @property
    def processed(self) -> bool | None:
        """Whether decoded log-probs are after the temperature; None: unknown."""
        ...

    @property
    def settings(self) -> Mapping[str, Json]:
        """Its settings, for the event."""
        ...

    def decode(self, rows: Rows, n: int, *, seed: int, temperature: float) -> list[Decoded]:
        """Continue each row by up to `n` sampled tokens, row i with the seed `seed + i`.

        One seed for all rows would make them choose the same tokens.
        """
        ...

    def score(self, rows: Rows) -> list[tuple[float, ...]]:
        """Return log p(token t | tokens before t) of each row, NaN for the first, by prefill."""
        ...

    def tokenise(self, text: str) -> tuple[int, ...] | None:
        """Return the token ids of a text as the engine has them; None: it does not tell."""
        ...


class Question(NamedTuple):
    """The request to an engine after a sync.

    Attributes:
        sequences: the fixed sequences.
        temperature: of the rollout's sampling, as the trainer knows it.
        adapter: the name of the adapter that the rollout uses; None: none.
        base: the name of the base model, where there is an adapter; None: the engine's own.
        tokenizer: the trainer's; None: the tokens of a text are not compared.
    """

    sequences: Sequences
    temperature: float = 1.0
    adapter: str | None = None
    base: str | None = None
    tokenizer: Any = None


class Stop(NamedTuple):
    """Why the rest should not be asked.

    Attributes:
        why: for the event's problem.
        is_stale: whether the weights may have changed meanwhile, so that no arm counts.
    """

    why: str
    is_stale: bool


def ask(scorer: Scorer, question: Question, stop: Callable[[], Stop | None]) -> Canary:
    """Return the arms of an engine. What fails becomes the event's problem, and is not raised.

    Args:
        scorer: the engine.
        question: what is asked.
        stop: called before each call of the engine, and at the end.
    """
    return _Asking(scorer, question, stop).answer()


class _Stopped(Exception):
    """The rest is not asked."""


class _Asking:
    def __init__(self, scorer: Scorer, question: Question, stop: Callable[[], Stop | None]) -> None:
        self._scorer = scorer
        self._question = question
        self._stop = stop
        self._arms: dict[str, Arm] = {}
        self._checks: list[Check] = []
        self._tokens = 0
        self._notes: dict[str, Json] = {}

    def answer(self) -> Canary:
        began = time.monotonic()
        problem = ""
        try:
            self._ask_all()
        except _Stopped:
            pass  # `stop` says below why
        except Exception as error:
            text = str(error) if isinstance(error, StagescopeError) else repr(error)
            problem = f"the engine failed: {text:.500}"
        if (over := self._stop()) is not None:
            problem = over.why
            self._arms, self._checks = ({}, []) if over.is_stale else (self._arms, self._checks)
        question = self._question
        return Canary(
            side="engine",
            source=self._scorer.name,
            arms=self._arms,
            checks=tuple(self._checks),
            settings={
                "temperature": question.temperature,
                "tokens": self._tokens,
                "model": question.adapter,
                "note": question.sequences.note,
                **self._notes,
                **self._scorer.settings,
            },
            seconds=time.monotonic() - began,
            problem=problem,
        )

    def _ask_all(self) -> None:
        question, fixed = self._question, self._fixed()
        # First: a request with the rollout's own cache must find it as the sync left it.
        self._ask_cached()
        self._arms[FIXED] = _ends(fixed, self._score(fixed, question.adapter))
        self._arms[AGAIN] = _ends(fixed, self._score(fixed, question.adapter))
        if question.adapter is not None:
            self._arms[BASE] = _ends(fixed, self._score(fixed, question.base))
        drawn = self._draw(_SEEDS, _DECODED_TOKENS, 1.0)
        self._arms[DECODED] = _arm((each.prompt, each.ids, each.decoded) for each in drawn)
        self._arms[DECODED_SCORED] = _arm((each.prompt, each.ids, each.scored) for each in drawn)
        self._check(drawn)

    def _fixed(self) -> tuple[Row, ...]:
        """Return the sequences that the engine accepts."""
        rows, most = self._question.sequences.rows, self._scorer.max_length
        if most is None:
            return rows
        fit = tuple(row for row in rows if len(row) < most)
        if len(fit) < len(rows):
            lengths = ", ".join(str(len(row)) for row in rows if len(row) >= most)
            self._notes["left_out"] = f"sequences of {lengths} tokens: the engine has {most}"
        return fit

    def _ask_cached(self) -> None:
        scorer, question = self._scorer, self._question
        prompts = question.sequences.sharing
        if scorer.cache == "none" or not prompts:
            return
        calls = [(prompt, seed) for seed in _SEEDS for prompt in prompts]
        # One at a time: a request finds the blocks of those that ended before.
        cached = [self._decode([prompt], seed)[0] for prompt, seed in calls]
        uncached: list[Decoded] = []
        if scorer.cache == "salted":
            uncached = [self._decode([prompt], seed, salt=_salt())[0] for prompt, seed in calls]
        rows = [prompt for prompt, _ in calls]
        is_same = [each.ids for each in cached] == [each.ids for each in uncached]
        self._notes["uncached"] = "decoded" if is_same else "scored"
        if is_same:
            values = [each.log_probs for each in uncached]
        else:
            values = self._score_ends(rows, cached)
        both = list(zip(rows, cached, values, strict=True))
        self._arms[CACHED] = _arm((row, each.ids, each.log_probs) for row, each, _ in both)
        self._arms[UNCACHED] = _arm((row, each.ids, own) for row, each, own in both)

    def _draw(self, seeds: Sequence[int], n: int, temperature: float) -> list[Drawn]:
        """Decode after each prompt, once for each seed, and score the same tokens by prefill."""
        prompts = self._question.sequences.prompts
        rows: list[Row] = []
        decoded: list[Decoded] = []
        for seed in seeds:
            rows += prompts
            decoded += self._decode(prompts, seed, n, salt=_salt(), temperature=temperature)
        scored = self._score_ends(rows, decoded)
        return [
            Drawn(row, each.ids, each.log_probs, values, each.likeliest)
            for row, each, values in zip(rows, decoded, scored, strict=True)
        ]

    def _check(self, drawn: list[Drawn]) -> None:
        question, processed = self._question, self._scorer.processed
        single = [*drawn, *self._draw(_SEEDS_OF_ONE, 1, 1.0)]
        self._checks.append(check_sampling(single, processed=processed))
        if question.temperature != 1.0 and question.temperature > 0.0:
            own = slope(self._draw((*_SEEDS, *_SEEDS_OF_ONE), 1, question.temperature))
            self._checks.append(
                check_temperature(own, temperature=question.temperature, processed=processed)
            )
        if question.tokenizer is not None:
            ids = self._scorer.tokenise(TEXT)
            if ids is not None:
                self._checks.append(check_tokens(TEXT, question.tokenizer, ids))

    def _decode(
        self,
        rows: Sequence[Row],
        seed: int,
        n: int = _DECODED_TOKENS,
        *,
        salt: str | None = None,
        temperature: float = 1.0,
    ) -> list[Decoded]:
        self._go_on()
        asked = Rows(rows, self._question.adapter, salt)
        found = self._scorer.decode(asked, n, seed=seed, temperature=temperature)
        self._tokens += sum(map(len, rows)) + sum(len(each.ids) for each in found)
        return found

    def _score(self, rows: Sequence[Row], model: str | None) -> list[tuple[float, ...]]:
        self._go_on()
        self._tokens += sum(map(len, rows))
        return self._scorer.score(Rows(rows, model, _salt()))

    def _score_ends(
        self, prompts: Sequence[Row], decoded: Sequence[Decoded]
    ) -> list[tuple[float, ...]]:
        """Score decoded tokens by prefill."""
        rows = [(*row, *each.ids) for row, each in zip(prompts, decoded, strict=True)]
        found = self._score(rows, self._question.adapter)
        return [
            values[len(values) - len(each.ids) :]
            for values, each in zip(found, decoded, strict=True)
        ]

    def _go_on(self) -> None:
        if self._stop() is not None:
            raise _Stopped


def _salt() -> str:
    return f"stagescope-{secrets.token_hex(8)}"


def _ends(rows: Sequence[Row], values: Sequence[Sequence[float]]) -> Arm:
    """Return the arm of fixed sequences: the log-probs of their last tokens, without the first."""
    found = [tuple(row[1:][-SCORED:]) for row in values]
    return Arm(tuple(rows), tuple(found))


def _arm(parts: Any) -> Arm:
    """Return the arm of decoded tokens: (prompt, tokens, log-probs) of each row."""
    found = [((*row, *ids), tuple(values)) for row, ids, values in parts if ids]
    return Arm(tuple(row for row, _ in found), tuple(values for _, values in found))
