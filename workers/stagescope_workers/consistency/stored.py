"""Stored rollouts scored again: the trajectories of a kept step through engines that score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import stagescope
from stagescope.batch import Batch
from stagescope.batch.trajectories import Trajectory, trajectories
from stagescope.engines import Engine, EngineInfo, Sampling
from stagescope.targets import read_target
from stagescope.wire.errors import InvalidInput
from stagescope_workers.consistency.alignment import Check, check_shift
from stagescope_workers.consistency.comparison import Comparison, streams_of
from stagescope_workers.consistency.scored import Float64, Scored, numbers, worst_tokens

STORED: Final = "rollout_log_probs"


def read_batch(text: str) -> Batch:
    """Return a kept step: a file that `Batch.save` wrote, or RUN[@ATTEMPT]:STEP of the service.

    Raises:
        InvalidInput: neither.
        NotFound: nothing of that step is kept.
    """
    if Path(text).is_file():
        return Batch.load(text)
    place = read_target(text)
    if place.step is None:
        raise InvalidInput(f"{text!r:.200} is no file", expected="a file, or RUN[@ATTEMPT]:STEP")
    with stagescope.attach() as session:
        return session.step(place.step, run=place.run, attempt=place.attempt).batch()


def rescore(
    batch: Batch,
    engine: Engine,
    other: Engine | str,
    *,
    tokenizer: Any = None,
    limit: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Let two sides say the log-probs of stored tokens; nothing is sampled.

    Args:
        batch: with prompts, responses and response_mask.
        engine: scores them.
        other: scores them, too; or the name of the stored log-probs that stand for it.
        tokenizer: of the model, for the texts of tokens; None: the engine's own words, if any.
        limit: most trajectories.
        tell: called with what is being done.

    Raises:
        NotFound: prompts, responses or the stored log-probs were not kept.
        EngineError: an engine cannot score.
    """
    kept = list(trajectories(batch))[:limit]
    rows = [each.all_tokens() for each in kept]
    tell(f"{engine.info.kind} scores {sum(map(len, rows))} tokens")
    q = _responses(engine.score(rows), kept)
    if isinstance(other, str):
        info = EngineInfo("stored", batch.heading)
        p = [each.tensor(other).astype(np.float64) for each in kept]
    else:
        info = other.info
        tell(f"{info.kind} scores the same tokens")
        p = _responses(other.score(rows), kept)
    scored = [
        Scored(
            name=each.sample_id or str(each.row),
            prompt=tuple(rows[index][: -len(each.tensor("responses")) or None]),
            ids=tuple(each.tensor("responses").tolist()),
            q=q[index],
            p=p[index],
            mask=each.tensor("response_mask") != 0,
            group=each.group_id or None,
            reward=each.reward,
        )
        for index, each in enumerate(kept)
    ]
    sampling = _sampling(batch)
    masked = sum(len(row.ids) - int(row.counted.sum()) for row in scored)
    text = f"{len(scored)} stored answers as token ids; {masked} tokens that no model sampled"
    return Comparison(
        engine=engine.info,
        other=info,
        sampling=sampling,
        rows=tuple(scored),
        numbers=numbers(scored),
        worst=tuple(worst_tokens(scored, _texts(engine, tokenizer))),
        checks=(Check("sent", True, text), check_shift(scored)),
        left_out={},
        streams=streams_of(engine.info, info, sampling, scaled=False),
        stored=batch.heading,
    )


def _responses(scores: Sequence[Sequence[float]], kept: Sequence[Trajectory]) -> list[Float64]:
    found = []
    for values, each in zip(scores, kept, strict=True):
        width = len(each.tensor("responses"))
        found.append(np.array(values[len(values) - width :], np.float64))
    return found


def _texts(engine: Engine, tokenizer: Any) -> Callable[[int], str]:
    """Return what says a token's text."""
    words: Sequence[str] = getattr(engine, "vocabulary", ())
    if tokenizer is not None:
        return lambda token: str(tokenizer.decode([token]))
    return lambda token: words[token] if token < len(words) else ""


def _sampling(batch: Batch) -> Sampling:
    """Return how the tokens were drawn, as far as it was said; scores do not depend on it."""
    said = batch.meta.get("sampling")
    temperature = said.get("temperature") if isinstance(said, dict) else None
    if isinstance(temperature, int | float) and temperature >= 0:
        return Sampling(temperature=float(temperature))
    return Sampling(temperature=1.0)
