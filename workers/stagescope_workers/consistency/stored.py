"""Scores stored rollouts again: the trajectories of a kept step."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import Final

import numpy as np

import stagescope
from stagescope_wire.batch import Batch
from stagescope_wire.batch.converters import trajectories
from stagescope_wire.engines import Engine, EngineInfo, Sampling
from stagescope_wire.errors import InvalidInput
from stagescope_wire.schema import read_target
from stagescope_workers.consistency.comparison import EngineComparison, stream_provenance
from stagescope_workers.consistency.prompts import Tokenizer
from stagescope_workers.consistency.scored import (
    Check,
    Float64,
    Scored,
    check_shift,
    numbers,
    worst_tokens,
)

STORED: Final = "rollout_log_probs"


def read_batch(text: str, url: str | None = None) -> Batch:
    """Return a kept step: a file that `Batch.save` wrote, or RUN[@ATTEMPT]:STEP of the service.

    `url` is of another service than the one that `attach()` finds.

    Raises:
        InvalidInput: it is neither.
        NotFound: nothing of that step is kept.
    """
    if Path(text).is_file():
        return Batch.load(text)
    target = read_target(text)
    if target.step is None:
        raise InvalidInput(f"{text!r:.200} is not a file", expected="a file, or RUN[@ATTEMPT]:STEP")
    with stagescope.attach(url) as session:
        return session.step(target.step, run=target.run, attempt=target.attempt).batch()


def rescore(
    batch: Batch,
    engine: Engine,
    other: Engine | str,
    *,
    tokenizer: Tokenizer | None = None,
    limit: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> EngineComparison:
    """Compare two sides' log-probs of stored tokens; nothing is sampled.

    Args:
        batch: with prompts, responses and response_mask.
        engine: scores them.
        other: an engine that scores them too, or the name of stored log-probs to use instead.
        tokenizer: the model's, for the texts of tokens; None: the engine's vocabulary, if any.
        limit: the maximal number of trajectories.
        on_progress: called with a description of each activity.

    Raises:
        NotFound: prompts, responses or the stored log-probs were not kept.
        EngineError: an engine cannot score.
    """
    kept = list(trajectories(batch))[:limit]
    rows = [each.all_tokens() for each in kept]
    responses = [each.tensor("responses") for each in kept]
    on_progress(f"{engine.info.kind} scores {sum(map(len, rows))} tokens")
    q = _ends(engine.score(rows), responses)
    if isinstance(other, str):
        info = EngineInfo("stored", batch.heading)
        p = [each.tensor(other).astype(np.float64) for each in kept]
    else:
        info = other.info
        on_progress(f"{info.kind} scores the same tokens")
        p = _ends(other.score(rows), responses)
    scored = [
        Scored(
            name=each.sample_id or str(each.row),
            prompt=tuple(row[: len(row) - len(ids)]),
            ids=tuple(ids.tolist()),
            q=row_q,
            p=row_p,
            mask=each.tensor("response_mask") != 0,
            group=each.group_id or None,
            reward=each.reward,
        )
        for each, row, ids, row_q, row_p in zip(kept, rows, responses, q, p, strict=True)
    ]
    sampling = _sampling(batch)
    masked = sum(len(row.ids) - int(row.counted.sum()) for row in scored)
    text = f"{len(scored)} stored answers as token ids; {masked} tokens that no model sampled"
    return EngineComparison(
        engine=engine.info,
        other=info,
        sampling=sampling,
        rows=tuple(scored),
        numbers=numbers(scored),
        worst=tuple(worst_tokens(scored, _texts(engine, tokenizer))),
        checks=(Check("sent", True, text), check_shift(scored)),
        left_out={},
        streams=stream_provenance(engine.info, info, sampling, scaled=False),
        stored=batch.heading,
    )


def _ends(scores: Sequence[Sequence[float]], responses: Sequence[Sized]) -> list[Float64]:
    """Return the scores of the responses, which end the rows."""
    return [
        np.array(values[len(values) - len(response) :], np.float64)
        for values, response in zip(scores, responses, strict=True)
    ]


def _texts(engine: Engine, tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return a function that decodes a token id."""
    vocabulary: Sequence[str] = getattr(engine, "vocabulary", ())
    if tokenizer is not None:
        return lambda token: str(tokenizer.decode([token]))
    return lambda token: vocabulary[token] if token < len(vocabulary) else ""


def _sampling(batch: Batch) -> Sampling:
    """Return how the tokens were sampled, as far as recorded; scores do not depend on it."""
    recorded = batch.meta.get("sampling")
    temperature = recorded.get("temperature") if isinstance(recorded, dict) else None
    if isinstance(temperature, int | float) and temperature >= 0:
        return Sampling(temperature=float(temperature))
    return Sampling(temperature=1.0)
