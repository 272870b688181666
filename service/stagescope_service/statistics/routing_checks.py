"""What the agreement of routes says: how much of the mismatch it explains, and what is wrong."""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

import numpy as np

from stagescope_service.statistics.routing import Routing
from stagescope_service.statistics.summary import Summary
from stagescope_wire.render import counted, numbers_text

Kind = Literal["missing", "shifted", "swapped", "empty"]
KINDS: Final[tuple[Kind, ...]] = ("shifted", "missing", "empty", "swapped")
"""The faults of routes, the likeliest cause of the others first."""

MIN_TOKENS: Final = 16
"""Minimum tokens of a layer for a fault of it."""
_MISSING: Final = 0.02
"""Minimum share of tokens without a route."""
_EMPTY: Final = 0.5
"""Minimum share of a layer's tokens without a choice."""
_LOW: Final = 0.5
_HIGH: Final = 0.7
"""Agreement below and above which routes are of another token or layer."""
_APART: Final = 0.05
"""Least difference between the agreement with the token before and after for a shift of some rows.
The two are equal where routes are of their own token, however much neighbours resemble each other.
"""


class Fault(NamedTuple):
    """What is wrong with the routes of a step.

    Attributes:
        kind: which of `KINDS`.
        headline: it as a sentence without a full stop.
        text: the numbers that show it.
        layers: the layers concerned; empty: all.
    """

    kind: Kind
    headline: str
    text: str
    layers: tuple[int, ...] = ()


class Explained(NamedTuple):
    """How tokens with another expert differ from the others. Means are of |d|, in nats.

    Attributes:
        tokens: tokens whose routes are compared and whose log-probs are finite.
        hit: those of them with another expert in a layer.
        mean_hit: of these.
        mean_same: of the others.
        carried: their share of the sum of |d| over all of the step's tokens.
        excess: the share of that sum beyond what they would have at the others' mean.
    """

    tokens: int
    hit: int
    mean_hit: float
    mean_same: float
    carried: float
    excess: float

    @property
    def share(self) -> float:
        """Share of the tokens with another expert."""
        return self.hit / self.tokens if self.tokens else math.nan

    @property
    def text(self) -> str:
        """The answer as sentences."""
        if not self.hit:
            return f"Rollout and trainer chose the same experts for all {self.tokens} tokens."
        hit = f"Tokens with another expert: {self.share:.1%} ({self.hit} of {self.tokens})"
        if self.hit == self.tokens:
            return f"{hit}; their mean |d| is {self.mean_hit:.3g}. No token has the same experts."
        return (
            f"{hit}; their mean |d| is {self.mean_hit:.3g}, others {self.mean_same:.3g}. They "
            f"carry {self.carried:.0%} of the mismatch. Other experts explain {self.excess:.0%} "
            "of the mismatch: what these tokens have above the others' mean."
        )


def explained(summary: Summary) -> Explained | None:
    """Return how much of a step's mismatch lies in tokens with other experts.

    None: no token has both routes and finite log-probs.
    """
    same, hit = summary.profiles.routed()
    if not same.tokens + hit.tokens:
        return None
    total = sum(each.d_abs_sum for each in summary.profiles.bins("position"))
    means = [b.d_abs_sum / b.tokens if b.tokens else math.nan for b in (same, hit)]
    carried = hit.d_abs_sum / total if total else math.nan
    usual = hit.tokens * means[0] if same.tokens and hit.tokens else 0.0
    excess = max(0.0, hit.d_abs_sum - usual) / total if total else math.nan
    if hit.tokens and not same.tokens:
        excess = math.nan
    return Explained(
        same.tokens + hit.tokens, hit.tokens, means[1], means[0], carried, excess
    )  # fmt: skip


def published_routing(summary: Summary) -> dict[str, float]:
    """Return the published numbers of a step's routes; {} without routes."""
    found, routing = explained(summary), summary.routing
    if routing is None:
        return {}
    if found is None:  # of one side alone
        return {"routing/agreement": math.nan}
    sums = {name: int(each.sum()) for name, each in routing.by_layer().items()}
    return {
        "routing/agreement": sums["same"] / sums["tokens"] if sums["tokens"] else math.nan,
        "routing/hit_share": found.share,
        "routing/excess_share": found.excess,
    }


def unrecorded(routing: Routing) -> str | None:
    """Return which side's routes no process recorded; None: both are recorded."""
    masked, both = routing.total("masked"), routing.total("no_route")
    unset = {name: int(routing.by_layer()[f"{name}_unset"].sum()) for name in _SIDES}
    for name in _SIDES:
        if routing.total(f"no_{name}") + both == masked and not unset[name]:
            return name
    return None


_SIDES: Final = ("rollout", "trainer")


def faults(routing: Routing, rows: int) -> list[Fault]:
    """Return what is wrong with routes, in the order of `KINDS`.

    Args:
        routing: of a step.
        rows: the step's rows with model tokens: each may lack the route of one token.
    """
    if unrecorded(routing) is not None:
        return []
    shifted = _shifted(routing)
    if shifted is not None:
        return [shifted]
    return [each for each in (_missing(routing, rows), _empty(routing), _swapped(routing)) if each]


def _missing(routing: Routing, rows: int) -> Fault | None:
    masked = routing.total("masked")
    lacks = {name: routing.total(f"no_{name}") + routing.total("no_route") for name in _SIDES}
    name, tokens = max(lacks.items(), key=lambda each: each[1])
    if tokens < max(_MISSING * masked, MIN_TOKENS, rows + 1):
        return None
    zeros = int(routing.by_layer()[f"{name}_unset"].min()) if routing.layers else 0
    form = f", {zeros} of them as rows of zeros or one other number" if zeros >= MIN_TOKENS else ""
    return Fault(
        "missing",
        f"The {name}'s routes are missing for {tokens / masked:.0%} of the tokens",
        f"{tokens} of {masked} tokens have no route of the {name}{form}",
    )


def _empty(routing: Routing) -> Fault | None:
    by_layer = routing.by_layer()
    found: dict[str, list[int]] = {}
    for name in _SIDES:
        unset = by_layer[f"{name}_unset"] - np.minimum(
            by_layer["rollout_unset"], by_layer["trainer_unset"]
        )
        # Tokens without any layer are missing ones: they count in every layer alike.
        unset -= int(unset.min())
        of = by_layer["tokens"] + unset
        is_empty = (unset >= MIN_TOKENS) & (unset >= _EMPTY * of)
        if is_empty.any():
            found[name] = np.flatnonzero(is_empty).tolist()
    if not found:
        return None
    name, layers = next(iter(found.items()))
    lacking = int(by_layer[f"{name}_unset"][layers[0]])
    return Fault(
        "empty",
        f"The {name}'s routes are zeros in {_layers(layers)}",
        f"layer {layers[0]} has no choice of the {name} for {lacking} tokens: its experts are "
        "zeros, or one other number",
        tuple(layers),
    )


def _shifted(routing: Routing) -> Fault | None:
    sums = {name: int(each.sum()) for name, each in routing.by_layer().items()}
    tokens, pairs = sums["tokens"], sums["pairs"]
    if min(tokens, pairs) < MIN_TOKENS * max(routing.layers, 1):
        return None
    own = sums["same"] / tokens
    other, name = sorted(("earlier", "later"), key=lambda each: sums[each])
    moved, rest = sums[name] / pairs, sums[other] / pairs
    is_whole = own < _LOW and moved > _HIGH
    if not is_whole and (moved - rest < _APART or 1.0 - own < _APART):
        return None
    late = "late" if name == "earlier" else "early"
    at = "t-1" if name == "earlier" else "t+1"
    text = (
        f"rollout[t] matches trainer[{at}] in {moved:.1%} of the layers of neighbouring tokens, "
        f"and trainer[t] in {own:.1%}"
    )
    if is_whole:
        return Fault("shifted", f"The rollout's routes are one token {late}", text)
    return Fault(
        "shifted",
        f"The rollout's routes are one token {late} in a part of the rows",
        f"{text}; `stagescope routing --rank N` shows whether it is one rank",
    )


def _swapped(routing: Routing) -> Fault | None:
    by_layer = routing.by_layer()
    tokens = by_layer["tokens"]
    other_of: dict[int, int] = {}
    shares: dict[int, tuple[float, float]] = {}
    for layer in np.flatnonzero(tokens >= MIN_TOKENS).tolist():
        other = best_other(routing, layer)
        if other is None:
            continue
        own, found = (int(routing.same[layer, j]) / int(tokens[layer]) for j in (layer, other))
        if own < _LOW and found > _HIGH:
            other_of[layer], shares[layer] = other, (own, found)
    if not other_of:
        return None
    layers = sorted(other_of)
    first, other = layers[0], other_of[layers[0]]
    own, found = shares[first]
    if len(layers) == 2 and other_of.get(other) == first:
        headline = f"The rollout's routes of layers {first} and {other} are swapped"
    else:
        headline = f"The rollout's routes of {_layers(layers)} are those of other layers"
    text = (
        f"rollout layer {first} matches trainer layer {other} in {found:.1%} of the tokens, and "
        f"trainer layer {first} in {own:.1%}"
    )
    return Fault("swapped", headline, text, tuple(layers))


def best_other(routing: Routing, layer: int) -> int | None:
    """Return the trainer's other layer that matches a rollout's layer in most tokens."""
    matches = routing.same[layer].copy()
    matches[layer] = 0
    return int(matches.argmax()) if matches.any() else None


def _layers(layers: list[int]) -> str:
    named = numbers_text(layers)
    return f"layer {named}" if len(layers) == 1 else f"layers {named}"


def agreement_text(routing: Routing) -> str:
    """Return how far routes agree over all layers, as a sentence without a full stop."""
    sums = {name: int(each.sum()) for name, each in routing.by_layer().items()}
    if not sums["tokens"]:
        return "no token has both routes"
    share = sums["same"] / sums["tokens"]
    return f"the experts agree in {share:.1%} of {counted(sums['tokens'], 'choice')}"
