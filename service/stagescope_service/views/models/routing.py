"""The answer about the agreement of routes in a step."""

from __future__ import annotations

from typing import Literal

from stagescope_service.fields import Number
from stagescope_service.views.models.common import Model, Page
from stagescope_service.views.models.numbers import Numbers


class RoutedLayer(Model):
    """The agreement of routes in one layer. Shares are 0 to 1, and null where no token counts."""

    layer: int
    """The layer, from 0, among those with routes."""
    tokens: int
    """Number of tokens whose experts both sides chose in this layer."""
    agreement: Number | None
    """Share of them with the same experts, in any order."""
    order_only: Number | None
    """Share of them with the same experts in another order."""
    slots: Number | None
    """Mean share of a token's experts that both sides chose."""
    rollout_unset: int
    """Number of tokens whose rollout route has no choice in this layer, such as zeros."""
    trainer_unset: int
    """Number of tokens whose trainer route has no choice in this layer."""
    earlier: Number | None
    """Share of neighbouring tokens whose rollout experts the trainer chose one token earlier."""
    later: Number | None
    """Share of neighbouring tokens whose rollout experts the trainer chose one token later."""
    best_other: int | None
    """The trainer's other layer that matches this layer of the rollout in most tokens."""
    best_other_agreement: Number | None
    """Share of the tokens in which it does."""
    by_round: list[Number | None]
    """Share of the tokens with the same experts in each of `rounds`."""


class RoutedRound(Model):
    """The tokens of one round."""

    round: int
    """Index of the round, from 0."""
    tokens: int
    """Number of tokens under the mask."""
    compared: int
    """Number of them with a route of both sides."""
    hit: int
    """Number of these with another expert in at least one layer."""


class RouteDifference(Model):
    """A layer in which the two sides chose other experts for a token."""

    layer: int
    """The layer, from 0."""
    rollout: list[int]
    """The ids of the rollout's experts."""
    trainer: list[int]
    """The ids of the trainer's experts."""


class RoutedToken(Model):
    """One of the worst tokens with its routes."""

    abs_diff: float | None
    """|p - q| in nats."""
    sample_uid: str | None
    """Its sample; null: the payload names no samples."""
    row: int
    """Index of its row in the payload, from 0."""
    position: int
    """Its position in its sample."""
    round: int
    """Index of its round, from 0."""
    differing: list[RouteDifference]
    """The layers in which both sides chose experts, and not the same ones."""
    lacks: list[Literal["rollout", "trainer"]]
    """The sides that chose no experts for it in any layer."""


class RouteFault(Model):
    """Something that is wrong with the routes."""

    kind: Literal["missing", "shifted", "swapped", "empty"]
    """`shifted`: they are of the token before or after. `missing`: tokens without a route. `empty`:
    a layer of zeros. `swapped`: a layer's routes are those of another layer."""
    text: str
    """It as a sentence, with its numbers."""


class Routing(Numbers, Page[RoutedLayer]):
    """Whether rollout and trainer chose the same experts, a row for each layer."""

    text: str
    """The answer as sentences: how much of the mismatch lies in tokens with another expert."""
    tokens: int
    """Number of tokens with both routes and finite log-probs."""
    hit: int
    """Number of them with another expert in at least one layer."""
    hit_share: Number | None
    """Share of them, 0 to 1."""
    mean_hit: Number | None
    """Mean |p - q| of these in nats."""
    mean_same: Number | None
    """Mean |p - q| of the others in nats."""
    carried: Number | None
    """Share of the sum of |p - q| that lies in tokens with another expert, 0 to 1."""
    excess: Number | None
    """Share of that sum beyond what these tokens would have with the others' mean: what the other
    experts explain."""
    lacking: dict[str, int]
    """Side -> number of tokens without its route: `rollout`, `trainer`."""
    faults: list[RouteFault]
    """What is wrong with the routes, the likeliest cause first."""
    rounds: list[RoutedRound]
    """The tokens by round."""
    worst: list[RoutedToken]
    """The worst tokens of each payload with their routes, |p - q| descending."""
