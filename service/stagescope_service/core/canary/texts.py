"""The words of a canary's findings: what differs, what was expected, what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from stagescope_service.core.canary.causes import (
    ADAPTER_MISSING,
    BASE_WEIGHTS,
    CACHE_STALE,
    CHECK_FAILED,
    DECODING,
    NOT_FINITE,
    OLD_WEIGHTS,
    OTHER_WEIGHTS,
    TEMPERATURE,
    TOKENIZERS,
    TRUNCATED,
    UNSTABLE,
    Cause,
)
from stagescope_service.core.canary.verdicts import ENGINES, FIRST, HISTORY, ROUNDING
from stagescope_service.core.canary.verdicts import NOISE as OF_NOISE
from stagescope_service.core.canary.versions import ADAPTER, REPEATED, JudgedEngine, JudgedPair

ADVICE: Final[Mapping[str, str]] = {
    TOKENIZERS: "trainer and engine do not begin or split texts alike: give both the same files of "
    "the tokenizer, and pass token ids instead of text",
    NOT_FINITE: "log-probs became NaN or infinite: look for NaN in the weights of this sync",
    ADAPTER_MISSING: "requests for the adapter get the base model: load the adapter again after "
    "the sync, and check the name that requests give it",
    CACHE_STALE: "the prefix cache holds keys and values of earlier weights: reset it after every "
    "sync (vLLM: reset_prefix_cache)",
    TEMPERATURE: "the engine returns log-probs after another scaling than the trainer assumes: "
    "give both one temperature, and see whether the engine returns raw or processed log-probs",
    TRUNCATED: "the engine samples from fewer tokens than the trainer scores: give top_p, top_k "
    "and min_p in each request, since otherwise the model's generation_config.json decides",
    DECODING: "decoding and prefill of one engine disagree: compare their kernels and dtypes, and "
    "see whether the engine returns processed log-probs (top_k, top_p, penalties)",
    BASE_WEIGHTS: "the engine serves the first weights that were scored: after a wake-up or a "
    "reload it has loaded its base weights again. Sync the weights after it",
    OLD_WEIGHTS: "the sync of this version did not arrive in the engine: look at the log of the "
    "weight sync, and compare what it received",
    OTHER_WEIGHTS: "the engine does not have the trainer's weights, or not all of them: compare "
    "tensor by tensor what the sync sent with what the engine holds",
    UNSTABLE: "the engine gives the same tokens two results: weights that still load, or a device "
    "that computes wrongly",
    CHECK_FAILED: "correct what the check names",
}
"""Code of a cause -> what to do."""

_HEADLINES: Final[Mapping[str, str]] = {
    TOKENIZERS: "tokenises texts unlike the trainer",
    NOT_FINITE: "returns log-probs that are not finite",
    ADAPTER_MISSING: "answers with the base model instead of the adapter",
    CACHE_STALE: "reuses a prefix cache of earlier weights",
    TEMPERATURE: "samples at another temperature than the trainer assumes",
    TRUNCATED: "samples from fewer tokens than the trainer assumes",
    DECODING: "decodes with other log-probs than it scores with",
    BASE_WEIGHTS: "serves its base weights",
    OLD_WEIGHTS: "serves old weights",
    OTHER_WEIGHTS: "does not have the trainer's weights",
    UNSTABLE: "scores the same tokens twice differently",
    CHECK_FAILED: "fails a check of the canary",
}
"""Code of a cause -> the rest of a sentence whose subject is the engine."""
_BOUNDS: Final[Mapping[str, str]] = {
    HISTORY: "earlier versions", ENGINES: "the other engines", ROUNDING: "rounding",
    FIRST: "the run's first versions", OF_NOISE: "the engine's own noise",
}  # fmt: skip
_NAMED: Final = 8


class Words(NamedTuple):
    """The words of a finding: its message, its advice, and the doctor's first line."""

    message: str
    advice: str
    headline: str


def words_of(cause: Cause, judged: JudgedEngine, version: int) -> Words:
    """Return the words of a cause that was found in an engine instance.

    Args:
        cause: the cause.
        judged: the instance's pairs.
        version: the policy version.
    """
    said = [cause.detail] if cause.detail else []
    said += [_of_pair(judged.pairs[name]) for name in cause.pairs]
    who = f"engine {judged.source}" if judged.source else "the engine"
    if cause.served_version is not None:
        said.insert(0, f"{who} has the log-probs of version {cause.served_version}")
    elif cause.temperature is not None:
        said.insert(0, f"{who} scores as at temperature {cause.temperature:.3g}")
    else:
        said[0] = f"{who}, {said[0]}"
    headline = f"{who[0].upper()}{who[1:]} {_headline(cause)}"
    return Words(f"version {version}: {'; '.join(said)}", ADVICE[cause.code], headline)


def _headline(cause: Cause) -> str:
    if cause.short:
        return cause.short
    text = _HEADLINES[cause.code]
    if cause.served_version is not None:
        return f"{text}, those of version {cause.served_version}"
    if cause.is_growing:
        return f"{text}, and is further off with each version"
    if cause.code == TEMPERATURE and cause.temperature is not None:
        return f"samples at temperature {cause.temperature:.2g}, unlike the trainer"
    return text


def _of_pair(pair: JudgedPair) -> str:
    measure, judged = pair.measure, pair.judgement
    if judged.is_not_finite:
        return f"{pair.name}: {measure.not_finite} log-probs are not finite"
    text = f"{pair.name}: {_nat(measure.mean)} on average over {measure.tokens} tokens"
    if pair.name == REPEATED:
        text = (
            f"{pair.name}: {_nat(measure.mean)} of the difference from the trainer is that of an "
            f"earlier version, with a correlation of {measure.slope or 0.0:.2g}"
        )
    if pair.name == ADAPTER:
        return f"{text}, so the adapter changes nothing"
    if judged.sequences and (measure.mean or 0.0) <= judged.bound:
        odd = ", ".join(map(str, judged.sequences[:_NAMED]))
        text += f", and {_nat(_worst_mean(pair))} in sequence {odd} alone"
    if judged.usual is not None:
        text += f", usually {_nat(judged.usual)}"
    return f"{text} (bound {_nat(judged.bound)}, from {_BOUNDS[judged.bound_of]})"


def _worst_mean(pair: JudgedPair) -> float | None:
    means = [pair.measure.sequences[at]["mean"] for at in pair.judgement.sequences]
    return max((mean for mean in means if mean is not None), default=None)


def _nat(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.2g} nat"
