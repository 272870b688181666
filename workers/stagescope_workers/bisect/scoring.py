"""Runs the arms of a ladder with a real engine and a real model."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np

from stagescope_wire.engines import Engine, Sampling
from stagescope_wire.errors import EngineError, StagescopeError
from stagescope_workers.bisect import arms
from stagescope_workers.bisect.arms import Cost, Scores, distance
from stagescope_workers.bisect.kept import Float64, Kept, decoded_positions
from stagescope_workers.bisect.variants import PLAIN, Variant

if TYPE_CHECKING:
    from stagescope_workers.bisect.transformers_model import TransformersModel

DTYPES: Final = ("bfloat16", "float16", "float32")
DECODED_TOKENS: Final = 256
"""Tokens that the engine decodes one by one: each is a request."""
_EAGER: Final = "eager"


@runtime_checkable
class DecodesGiven(Protocol):
    """An engine that returns the log-prob of a given next token."""

    def score_next(self, rows: Sequence[Sequence[int]], sampling: Sampling) -> list[float]:
        """Return the log-prob of each row's last token when it is decoded after the others."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides:
    """The engine and the models of a bisect.

    Attributes:
        engine: serves the rollouts; None: it is not tried.
        model: directory of the trainer's model; None: it is not tried.
        checkpoint: directory of the trainer's weights in that step, if it is given.
        adapter: the LoRA adapter that the engine serves; "": the model itself.
        dtype: the engine's, as transformers computes.
    """

    engine: Engine | None
    model: Path | None
    checkpoint: Path | None
    dtype: str
    adapter: str = ""

    def fingerprint(self, kept: Kept) -> str:
        """Return a checksum of the tokens, the engine and the models."""
        info = None if self.engine is None else self.engine.info
        parts = [kept.digest(), self.dtype, self.adapter]
        if info is not None:
            parts += map(str, (info.kind, info.place, info.model, info.version,
                               info.weight_version))  # fmt: skip
        for folder in (self.model, self.checkpoint):
            files = sorted(folder.glob("*.safetensors")) if folder is not None else []
            parts.append(str(folder and folder.resolve()))
            for file in files:
                stat = file.stat()
                parts.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Models:
    """Loads the models; only one is kept in memory.

    Args:
        on_progress: called with a description of each load.
    """

    def __init__(self, on_progress: Callable[[str], None] = lambda text: None) -> None:
        self._on_progress = on_progress
        self._key: tuple[Path, str, str | None] | None = None
        self._model: TransformersModel | None = None
        self.seconds = 0.0
        """What the last load took."""

    def get(self, path: Path, dtype: str, attention: str | None = None) -> TransformersModel:
        """Return a loaded model.

        Raises:
            MissingExtra, NotFound, InvalidInput, EngineError: it cannot be loaded.
        """
        from stagescope_workers.bisect.transformers_model import TransformersModel

        if self._model is None or self._key != (path, dtype, attention):
            self.close()
            self._on_progress(f"loading {path.name} in {dtype}")
            began = time.monotonic()
            self._model = TransformersModel(path, dtype, attention)
            self._key = (path, dtype, attention)
            self.seconds = time.monotonic() - began
        return self._model

    def close(self) -> None:
        """Release the model."""
        if self._model is not None:
            self._model.close()
        self._model, self._key = None, None


class Scorer:
    """Scores the kept tokens in each arm.

    Args:
        kept: the tokens.
        sides: engine and models.
        chosen: the arms to run; None: all.
        on_progress: called with a description of each activity.
    """

    def __init__(
        self,
        kept: Kept,
        sides: Sides,
        chosen: Sequence[str] | None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.kept = kept
        self.sides = sides
        self.models = Models(on_progress)
        self._chosen = chosen
        self._on_progress = on_progress
        self._places = decoded_positions(kept, DECODED_TOKENS)

    # --- what it costs ----------------------------------------------------------------------

    def costs(self) -> list[Cost]:
        """Return what each arm costs, from one small probe of each side.

        Raises:
            StagescopeError: a side cannot be reached or loaded.
        """
        left_out = {name: self.left_out(name) for name in arms.NAMES}
        whole = sum(len(row.ids) for row in self.kept.rows)
        shortest = min(self.kept.rows, key=lambda row: len(row.ids)).ids
        prefixes = [self._prefix(place) for place in self._places]
        rates: dict[str, float] = {}
        if any(not left_out[name] for name in arms.ENGINE_ARMS):
            rates["request"], rates["token"] = self._probe_engine(shortest)
        loading = 0.0
        if any(not left_out[name] for name in arms.LOCAL_ARMS):
            loading, rates["local"] = self._probe_model(shortest)
        found = []
        for name in arms.NAMES[1:]:
            if left_out[name]:
                found.append(Cost(name, 0, 0, None, left_out[name]))
            elif name in (arms.DECODED, arms.UNCACHED):
                tokens, requests = 2 * sum(map(len, prefixes)), 2 * len(prefixes)
                seconds = requests * rates["request"]
                found.append(Cost(name, tokens, requests, seconds))
            elif name in arms.ENGINE_ARMS:
                requests = 2 * len(self.kept.rows)
                seconds = requests * rates["request"] + 2 * whole * rates["token"]
                found.append(Cost(name, 2 * whole, requests, seconds))
            else:
                loads = name in (arms.TRANSFORMERS, arms.FLOAT32, arms.EAGER, arms.CHECKPOINT)
                found.append(Cost(name, whole, 0, whole * rates["local"] + loads * loading))
        return found

    def _probe_engine(self, row: Sequence[int]) -> tuple[float, float]:
        """Return seconds a request and seconds a token; a prefix cache is not touched."""
        self._on_progress("probing the engine with one sequence")
        engine = self._engine()
        began = time.monotonic()
        if engine.info.kind == "vllm" and isinstance(engine, DecodesGiven):
            engine.score_next([row], self._sampling(cached=False))
        else:
            engine.score([row])
        seconds = time.monotonic() - began
        return seconds / 2, seconds / 2 / len(row)

    def _probe_model(self, row: Sequence[int]) -> tuple[float, float]:
        """Return seconds of a load and seconds a token."""
        assert self.sides.model is not None
        model = self.models.get(self.sides.model, self.sides.dtype)
        model.score_as(row)
        began = time.monotonic()
        model.score_as(row)
        return self.models.seconds, (time.monotonic() - began) / len(row)

    # --- which arms run ---------------------------------------------------------------------

    def left_out(self, name: str) -> str:
        """Return why an arm is not run; "" if it is."""
        sides = self.sides
        if name == arms.RECORDED:
            return ""
        if self._chosen is not None and name not in self._chosen:
            return "not in --arms"
        if name in arms.ENGINE_ARMS:
            return self._engine_left_out(name)
        if sides.model is None:
            return "no --model is given"
        if name == arms.CHECKPOINT and sides.checkpoint is None:
            return "no --checkpoint is given"
        if name in (arms.HEAD, arms.FLOAT32) and sides.dtype == "float32":
            return "the engine computes in float32"
        if name == arms.ROUTING and all(row.routes is None for row in self.kept.rows):
            return "no routed_experts were kept with the step"
        return ""

    def _engine_left_out(self, name: str) -> str:
        engine = self.sides.engine
        if engine is None:
            return "no --engine is given"
        if name in (arms.DECODED, arms.UNCACHED):
            if engine.info.kind == "vllm" and isinstance(engine, DecodesGiven):
                return ""
            return f"{engine.info.kind} does not return the log-prob of a given next token"
        if engine.info.scores is False:
            return f"{engine.info.kind} returns no log-probs of given tokens"
        return ""

    # --- scoring ----------------------------------------------------------------------------

    def score(self, name: str) -> Scores:
        """Return an arm's scores; an arm that fails has the error as its reason."""
        if reason := self.left_out(name):
            return Scores(arm=name, status="left out", reason=reason)
        self._on_progress(f"{name}: {arms.ARMS[name].swap}")
        began = time.monotonic()
        try:
            values, again = _SCORERS[name](self, name)
        except StagescopeError as error:
            return Scores(arm=name, status="failed", reason=error.wrong)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            # transformers: out of memory, or a model that takes no position ids.
            text = " ".join(str(error).split())[:300]
            return Scores(arm=name, status="failed", reason=f"{type(error).__name__}: {text}")
        floor = distance(values, again)
        return Scores(
            arm=name,
            values=values,
            floor=floor.mean,
            floor_tokens=floor.tokens,
            seconds=time.monotonic() - began,
        )

    def _recorded(self, _: str) -> tuple[Float64, Float64]:
        return self.kept.q, self.kept.q

    def _decoded(self, name: str) -> tuple[Float64, Float64]:
        rows = [self._prefix(place) for place in self._places]
        engine = self._engine()
        assert isinstance(engine, DecodesGiven)
        both = []
        for _ in range(2):
            scores = engine.score_next(rows, self._sampling(cached=name == arms.DECODED))
            values = [np.full(len(row.q), np.nan) for row in self.kept.rows]
            for (index, at), score in zip(self._places, scores, strict=True):
                values[index][at] = score
            both.append(self.kept.flat(values))
        return both[0], both[1]

    def _prefill(self, name: str) -> tuple[Float64, Float64]:
        rows = [row.ids for row in self.kept.rows]
        engine = self._engine()
        if name == arms.PREFILL:
            both = [engine.score(rows) for _ in range(2)]
        else:
            both = [[engine.score([row])[0] for row in rows] for _ in range(2)]
        return self.kept.ends(both[0]), self.kept.ends(both[1])

    def _local(self, name: str) -> tuple[Float64, Float64]:
        model = self.model_of(name)
        variant = variant_of(name)
        rows = self.kept.rows
        routed = name == arms.ROUTING
        scores = [model.score_as(row.ids, variant, row.routes if routed else None) for row in rows]
        values = self.kept.ends(scores)
        # The same code on the same numbers: one row tells whether it is deterministic.
        shortest = min(range(len(rows)), key=lambda index: len(rows[index].ids))
        row = rows[shortest]
        own = model.score_as(row.ids, variant, row.routes if routed else None)
        again = [np.full(len(row.q), np.nan) for row in rows]
        again[shortest] = np.array(own[row.start :])
        return values, self.kept.flat(again)

    def model_of(self, name: str) -> TransformersModel:
        """Return the model with which an arm is scored."""
        sides = self.sides
        path = sides.model
        if name == arms.CHECKPOINT or (name == arms.ROUTING and sides.checkpoint is not None):
            path = sides.checkpoint
        assert path is not None
        if name in (arms.TRANSFORMERS, arms.HEAD):
            return self.models.get(path, sides.dtype)
        return self.models.get(path, "float32", None if name == arms.FLOAT32 else _EAGER)

    def _sampling(self, *, cached: bool) -> Sampling:
        salt = None if cached else secrets.token_hex(16)
        return dataclasses.replace(self.kept.sampling, salt=salt)

    def _prefix(self, place: tuple[int, int]) -> tuple[int, ...]:
        """Return the tokens of a row up to a place in its response."""
        row = self.kept.rows[place[0]]
        return row.ids[: row.start + place[1] + 1]

    def _engine(self) -> Engine:
        if self.sides.engine is None:
            raise EngineError("no engine is given", expected="--engine")
        return self.sides.engine


def variant_of(name: str) -> Variant:
    """Return how an arm's model scores."""
    return Variant(head="float32") if name == arms.HEAD else PLAIN


_SCORERS: Final[Mapping[str, Callable[[Scorer, str], tuple[Float64, Float64]]]] = {
    arms.RECORDED: Scorer._recorded,
    arms.DECODED: Scorer._decoded,
    arms.UNCACHED: Scorer._decoded,
    arms.PREFILL: Scorer._prefill,
    arms.SINGLE: Scorer._prefill,
    **dict.fromkeys(arms.LOCAL_ARMS, Scorer._local),
}
"""Arm -> function that scores the tokens twice."""
