"""An engine of `stagescope_wire.engines` as a canary asks it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

from stagescope_wire.engines import (
    Engine,
    Generation,
    OpenAIEngine,
    Sampling,
    connect,
    is_processed,
)
from stagescope_wire.engines.http import PARALLEL, engine_url
from stagescope_wire.engines.registry import engine_name
from stagescope_wire.errors import EngineError
from stagescope_wire.nonfinite import Json
from stagescope_workers.canary.after_syncs import NamedEngine
from stagescope_workers.canary.engine_arms import Cache, Decoded, Rows, Scorer

AnyEngine: TypeAlias = "Engine | Scorer | str"
"""An engine, an object with a scorer's methods, or the URL of an engine."""

_CALL_SECONDS: Final = 30.0
"""Deadline of one call of an engine that is named by its URL."""
_LIKELIEST: Final = 20
_PROMPT: Final = tuple(range(2, 10))
_WITH_SALTS: Final = ("vllm", "sglang")


def named(engine: AnyEngine) -> NamedEngine:
    """Return an engine with its name; a URL is opened for each version.

    Raises:
        InvalidInput: a URL that is none.
    """
    if isinstance(engine, str):
        url = engine_url(engine)
        return NamedEngine(engine_name(url), lambda: _opened(url))
    if isinstance(engine, Scorer):
        return NamedEngine(engine.name, lambda: contextlib.nullcontext(engine))
    place = engine.info.place
    name = engine_name(place) if "://" in place else place.rpartition("/")[2]
    return NamedEngine(name, lambda: contextlib.nullcontext(EngineScorer(engine, name)))


@contextlib.contextmanager
def _opened(url: str) -> Iterator[EngineScorer]:
    with contextlib.closing(connect(url, timeout=_CALL_SECONDS)) as engine:
        yield EngineScorer(engine, engine_name(url))


class EngineScorer:
    """The scorer of an engine.

    Args:
        engine: scores given tokens.
        name: of the instance.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name
        self.cache: Cache = "salted" if engine.info.kind in _WITH_SALTS else "none"
        self.processed = engine.info.processed
        if self.processed is None:
            self.processed = is_processed(engine)
        self._likeliest = _accepted_likeliest(engine)
        self.max_length = engine.info.max_length

    @property
    def settings(self) -> Mapping[str, Json]:
        """The engine's settings, as it reports them."""
        info = self._engine.info
        found = {
            "kind": info.kind,
            "engine_version": info.version,
            "model": info.model,
            "dtype": info.dtype,
            "quantisation": info.quantisation,
            "processed": self.processed,
            "weight_version": info.weight_version,
        }
        return {name: value for name, value in found.items() if value is not None}

    def decode(self, rows: Rows, n: int, *, seed: int, temperature: float) -> list[Decoded]:
        """Continue each row; see `Scorer.decode`."""
        engine = self._of(rows)

        def one(at: int) -> Decoded:
            sampling = Sampling(
                max_tokens=n,
                temperature=temperature,
                seed=seed + at,
                salt=rows.salt,
                likeliest=self._likeliest,
            )
            return _decoded(engine.generate([rows.rows[at]], sampling)[0], self.name)

        places = range(len(rows.rows))
        if len(places) < 2 or not isinstance(engine, OpenAIEngine):  # perhaps for one thread
            return [one(at) for at in places]
        with ThreadPoolExecutor(min(PARALLEL, len(places)), "stagescope-canary") as pool:
            return list(pool.map(one, places))

    def score(self, rows: Rows) -> list[tuple[float, ...]]:
        """Return the log-probs of given tokens; see `Scorer.score`.

        vLLM and SGLang read no prefix cache for them, so the salt is not needed.
        """
        return self._of(rows).score(rows.rows)

    def tokenise(self, text: str) -> tuple[int, ...] | None:
        """Return the engine's tokens of a text; see `Scorer.tokenise`."""
        if not isinstance(self._engine, OpenAIEngine):
            return None  # it may accept only token ids
        return self._engine.generate([text], Sampling(max_tokens=1))[0].prompt_ids

    def _of(self, rows: Rows) -> Engine:
        if rows.model is None:
            return self._engine
        if not isinstance(self._engine, OpenAIEngine):
            raise EngineError(
                f"{self.name} selects no model by name", expected="an engine over HTTP"
            )
        return self._engine.using(adapter=rows.model)


def _accepted_likeliest(engine: Engine) -> int:
    """Return how many likeliest tokens the engine returns; vLLM's --max-logprobs may refuse any."""
    try:
        engine.generate([_PROMPT], Sampling(max_tokens=1, likeliest=_LIKELIEST))
    except EngineError:
        return 0
    return _LIKELIEST


def _decoded(answer: Generation, name: str) -> Decoded:
    if answer.token_ids is None or answer.problem:
        raise EngineError(
            f"{name}: {answer.problem or 'it returned no token ids'}",
            expected="the ids of decoded tokens, with their log-probs",
        )
    return Decoded(answer.token_ids, answer.log_probs, answer.likeliest)
