"""Checks of an engine that need no trainer: its temperature, and its tokenizer."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from stagescope_wire.canary import Check

_TOLERANCE: Final = 0.03
"""Relative error of a slope that is always accepted."""
_ERRORS: Final = 4.0
"""Standard errors of a slope that are accepted."""
_MAX_ERROR: Final = 0.1
"""Largest standard error of a slope that decides anything."""
_MIN_CONTRASTS: Final = 3
_GAIN: Final = 12.5
"""Nats of log-likelihood that a setting gains by chance less than once in 270 000 checks: those of
five standard errors."""
_ONE_SIDED: Final = 10.0
"""How many times the sum of positive differences exceeds that of negative ones, if tokens are cut.
"""
_OUTLIERS: Final = 0.05
"""Share of the tokens whose differences are noise, whatever their size."""
_LEAST_CUT: Final = 1e-3
"""Smallest mean difference of log-probs in nats that is a cut."""
_ALIKE: Final = 0.02
"""Largest spread of the kept probability that names a top_p."""
_EXCLUDED: Final = -9000.0
"""Log-probs below it are those of excluded tokens: vLLM sends -9999 for minus infinity."""
_LIKELIEST: Final = 20
"""Most likeliest tokens that are compared; vLLM returns no more by default."""


class Drawn(NamedTuple):
    """One decoded continuation of a prompt.

    Attributes:
        prompt: token ids.
        ids: the decoded tokens.
        decoded: their log-probs as decoding returned them.
        scored: the same by prefill, at temperature 1.
        likeliest: the log-probs of the likeliest tokens in the place of each; () if unknown.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    decoded: Sequence[float]
    scored: Sequence[float]
    likeliest: Sequence[Sequence[float]] = ()


class Slope(NamedTuple):
    """How decoded log-probs grow with prefilled ones: 1 / temperature, if they are processed."""

    value: float
    error: float
    contrasts: int


def slope(drawn: Iterable[Drawn]) -> Slope:
    """Return the slope between tokens that follow the same context.

    Within one context log q_T(a) - log q_T(b) = (log q_1(a) - log q_1(b)) / T, whatever the other
    tokens are: the normalising constant cancels. So tokens are compared with the mean of their own
    context, and the slope is the regression through the origin.

    Returns:
        NaN where fewer than three tokens have another token to compare with.
    """
    contexts: dict[tuple[int, ...], dict[int, tuple[float, float]]] = collections.defaultdict(dict)
    for each in drawn:
        row = each.prompt
        for token, q, s in zip(each.ids, each.decoded, each.scored, strict=True):
            if math.isfinite(q) and math.isfinite(s):
                contexts[row][token] = (q, s)
            row = (*row, token)
    xs: list[float] = []
    ys: list[float] = []
    contrasts = 0
    for found in contexts.values():
        mean_q = sum(q for q, _ in found.values()) / len(found)
        mean_s = sum(s for _, s in found.values()) / len(found)
        ys += (q - mean_q for q, _ in found.values())
        xs += (s - mean_s for _, s in found.values())
        contrasts += len(found) - 1
    spread = sum(x * x for x in xs)
    if contrasts < _MIN_CONTRASTS or not spread > 0.0:
        return Slope(math.nan, math.nan, contrasts)
    value = sum(x * y for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - value * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return Slope(value, math.sqrt(rest / (contrasts - 1) / spread), contrasts)


class Fit(NamedTuple):
    """A setting of the sampler that explains what was sampled.

    Attributes:
        gain: nats of log-likelihood that it gains; chance gains about 1. NaN: nothing is known.
        setting: the setting in a request, and its value.
        is_cut: whether it excludes tokens; else it is a temperature.
    """

    gain: float
    setting: str
    is_cut: bool


class _Place(NamedTuple):
    """A place where a token was sampled, in log-probs of the likeliest tokens, descending.

    Attributes:
        known: of the likeliest tokens.
        rest: the probability of all others.
        value: of the sampled token.
    """

    known: list[float]
    rest: float
    value: float

    @property
    def rank(self) -> int | None:
        """The rank of the sampled token, from 1; None: it is none of the likeliest."""
        if self.value < self.known[-1]:
            return None
        return sum(each > self.value for each in self.known) + 1

    def outcomes(self) -> list[tuple[float, float]]:
        """Return the log of the probability and the value of each likeliest token, and of all
        others as one: their value is the least likely's minus 1."""
        found = [(log, log) for log in self.known]
        return [*found, (math.log(self.rest), self.other)] if self.rest > 0.0 else found

    @property
    def other(self) -> float:
        """The value of all others."""
        return self.known[-1] - 1.0


def _places(drawn: Iterable[Drawn]) -> list[_Place]:
    found = []
    for each in drawn:
        for value, listed in zip(each.decoded, each.likeliest, strict=False):
            # The sampled token is listed too, after the likeliest, if it is none of these.
            known = [log for log in listed if math.isfinite(log)][:_LIKELIEST]
            if len(known) > 1 and math.isfinite(value):
                found.append(_Place(known, 1.0 - sum(map(math.exp, known)), value))
    return found


def fits(drawn: Iterable[Drawn]) -> list[Fit]:
    """Return the settings that explain which tokens were sampled, the best first.

    It needs log-probs that are not changed by the settings. Each setting has its likeliest value.

    Returns:
        Empty where no token has the log-probs of others.
    """
    places = _places(drawn)
    if not places:
        return []
    found = [_temperature(places), _top_k(places), _top_p(places)]
    return sorted(found, key=lambda fit: -fit.gain)


def sharpness(drawn: Iterable[Drawn]) -> float:
    """Return z of the sum of sampled log-probs, positive if they are likelier than they should be.

    The sum of values of `_Place.outcomes` minus their expectations is a martingale, whatever the
    model is: z is that sum over its standard deviation. NaN where nothing is known.
    """
    places = _places(drawn)
    mean, variance = _moments(places, 0.0)
    return (_total(places) - mean) / math.sqrt(variance) if variance > 0.0 else math.nan


def _total(places: Iterable[_Place]) -> float:
    return sum(each.other if each.rank is None else each.value for each in places)


def _temperature(places: Sequence[_Place]) -> Fit:
    """Fit p^(1 / T): the likeliest T makes the expectation of the sum of log-probs that sum."""
    total = _total(places)
    low, high = -1.0, 9.0  # temperatures from infinity to 0.1
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _moments(places, middle)[0] < total else (low, middle)
    whole = (sum(math.exp(log + low * value) for log, value in each.outcomes()) for each in places)
    gain = low * total - sum(map(math.log, whole))
    value = 1.0 / (1.0 + low) if low > -1.0 else math.inf
    return Fit(gain, f"temperature {value:.2g}", is_cut=False)


def _top_k(places: Sequence[_Place]) -> Fit:
    ranks = [each.rank or len(each.known) + 1 for each in places]
    most = max(ranks)
    kept = [sum(map(math.exp, each.known[:most])) for each in places]
    known = most <= min(len(each.known) for each in places)
    gain = -sum(math.log(min(share, 1.0)) for share in kept) if known else 0.0
    return Fit(gain, f"top_k {most}", is_cut=True)


def _top_p(places: Sequence[_Place]) -> Fit:
    before = [
        sum(math.exp(log) for log in each.known if log > each.value or each.rank is None)
        for each in places
    ]
    least = max(before)  # a token is kept if the likelier ones have less than top_p
    gain = 0.0
    for each in places:
        share = 0.0
        for log in each.known:
            share += math.exp(log)
            if share > least:
                gain -= math.log(min(share, 1.0))
                break
    return Fit(gain, f"top_p {least:.2g}", is_cut=True)


def _moments(places: Iterable[_Place], power: float) -> tuple[float, float]:
    """Return mean and variance of the sum of values, with each outcome times e^(power value)."""
    mean = variance = 0.0
    for place in places:
        weighed = [(math.exp(log + power * value), value) for log, value in place.outcomes()]
        whole = sum(weight for weight, _ in weighed)
        first = sum(weight * value for weight, value in weighed) / whole
        mean += first
        variance += sum(weight * (value - first) ** 2 for weight, value in weighed) / whole
    return mean, variance


def _cut(drawn: Sequence[Drawn]) -> tuple[str, float] | None:
    """Return the setting that excluded tokens, and the smallest kept probability, if log-probs
    after that show it: without the others, each token has more. None: they do not."""
    d = [q - s for each in drawn for q, s in zip(each.decoded, each.scored, strict=True)]
    d = sorted(each for each in d if math.isfinite(each))
    # Without the largest: with another expert, a few tokens get other log-probs.
    d = d[: len(d) - math.ceil(_OUTLIERS * len(d))]
    more, less = sum(x for x in d if x > 0.0), -sum(x for x in d if x < 0.0)
    if not d or more < _ONE_SIDED * less or (more - less) / len(d) < _LEAST_CUT:
        return None
    shares = sorted(math.exp(-each) for each in d)
    sizes = [sum(log > _EXCLUDED for log in listed) for each in drawn for listed in each.likeliest]
    most = max(sizes, default=_LIKELIEST)
    if most < _LIKELIEST and 2 * sizes.count(most) >= len(sizes):
        return f"top_k {most}", shares[0]
    if shares[len(shares) // 2] - shares[0] < _ALIKE:
        return f"top_p {shares[0]:.2g}", shares[0]
    return "top_p, top_k or min_p", shares[0]


def check_sampling(drawn: Sequence[Drawn], *, processed: bool | None) -> Check:
    """Check that the engine samples at temperature 1 and from all tokens, as it was asked.

    Args:
        drawn: tokens that were decoded so.
        processed: whether the engine's log-probs are after its settings; None: unknown.
    """
    found = slope(drawn)
    check = check_temperature(found, temperature=1.0, processed=processed)
    if check.ok is False:
        return check
    is_greedy = all(q > -_LEAST_CUT for each in drawn for q in each.decoded)
    cut = _cut(drawn) if _is_decided(found) or is_greedy else None
    if cut is not None:
        setting, share = cut
        text = (
            f"requested no cut, the engine's is as with {setting}: its decoded log-probs exceed "
            f"those of prefill, since the tokens that it keeps have {share:.2f} or more of the "
            "probability"
        )
        return Check("truncation", False, text, _not_requested(setting))
    best = next(iter(fits(drawn)), None) if not processed else None
    if best is None or best.gain < _GAIN:
        return check
    evidence = (
        f"it explains which {sum(len(each.ids) for each in drawn)} tokens were sampled, "
        f"{best.gain:.0f} nats better than their log-probs do"
    )
    if best.is_cut:
        text = f"requested no cut, the engine's is as with {best.setting}: {evidence}"
        return Check("truncation", False, text, _not_requested(best.setting))
    own = best.setting.removeprefix("temperature ")
    text = (
        f"requested 1, the engine's is about {own}: {evidence}. A top_p or top_k that was not "
        "requested may have a part in it"
    )
    short = f"samples at a temperature of about {own}, and 1 was requested"
    return Check("temperature", False, text, short)


def _not_requested(setting: str) -> str:
    if setting == "top_k 1":
        return "samples greedily, as with top_k 1, which was not requested"
    return f"samples with {setting}, which was not requested"


def _is_decided(found: Slope) -> bool:
    is_known = not math.isnan(found.value) and found.value > 0.0
    return is_known and found.error <= _MAX_ERROR


def check_temperature(found: Slope, *, temperature: float, processed: bool | None) -> Check:
    """Check that decoded log-probs are those of the temperature that was requested.

    Args:
        found: of tokens that were decoded at `temperature`.
        temperature: as requested.
        processed: whether the engine's log-probs are after the temperature; None: unknown.
    """
    name = "temperature"
    if not _is_decided(found):
        text = f"requested {temperature:g}; too few decoded tokens tell the engine's temperature"
        return Check(name, None, text)
    margin = max(_ERRORS * found.error, _TOLERANCE * found.value)
    evidence = (
        f"decoded log-probs grow by {found.value:.3f} for each nat of prefilled ones (standard "
        f"error {found.error:.3f}, {found.contrasts} pairs of tokens)"
    )
    if not processed and abs(found.value - 1.0) <= margin:
        also = "it is 1, or " if temperature == 1.0 else ""
        text = f"requested {temperature:g}; {also}the engine's log-probs are before the temperature"
        return Check(name, None, f"{text}: {evidence}")
    is_right = abs(found.value - 1.0 / temperature) <= margin
    own = f"{1.0 / found.value:.3g}"
    text = f"requested {temperature:g}, the engine's is {own}: {evidence}"
    short = "" if is_right else f"samples at temperature {own}, and {temperature:g} was requested"
    return Check(name, is_right, text, short)


def check_tokens(text: str, tokenizer: Any, engine_ids: Sequence[int]) -> Check:
    """Check that the engine's tokens of a text are the trainer's.

    Args:
        text: what was tokenised.
        tokenizer: the trainer's, from transformers.
        engine_ids: the engine's tokens of it.
    """
    own, theirs = list(tokenizer(text)["input_ids"]), list(engine_ids)
    bos = getattr(tokenizer, "bos_token_id", None)
    if own == theirs:
        first = "begin with BOS" if bos is not None and own[:1] == [bos] else "have no BOS"
        return Check("tokenizer", True, f"both sides have the same {len(own)} tokens, and {first}")
    if own[1:] == theirs[1:]:
        what = f"the first token is {theirs[0]} in the engine and {own[0]} in the trainer"
    elif own == theirs[1:]:
        what = f"the engine has {theirs[0]} in front of the trainer's tokens"
    elif theirs == own[1:]:
        what = f"the engine lacks {own[0]} in front, with which the trainer's tokens begin"
    else:
        both = zip(own, theirs, strict=False)
        at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(own), len(theirs)))
        what = (
            f"{len(theirs)} tokens in the engine and {len(own)} in the trainer, from token {at} on "
            f"others: {theirs[at : at + 4]} and {own[at : at + 4]}"
        )
    text = f"{what}; the trainer's BOS is {bos}"
    return Check("tokenizer", False, text, f"tokenises texts unlike the trainer: {what}")
