"""Answers about single samples of a step: the list, the tokens of one, and the loss's view."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.fields import Number, Rank, Role
from stagescope_service.views.models.common import Model, Page, StepHeading
from stagescope_service.views.models.numbers import Streams

FateName = Annotated[
    Literal[
        "environment", "not finite", "rejected", "zero weight", "zero advantage", "clipped low",
        "clipped high", "unknown", "trained",
    ],
    Field(
        description="What the loss did. With `environment` the mask is 0. With `not finite` a "
        "log-prob is NaN or infinite, which can make the whole loss NaN. With `trained` no record "
        "says otherwise. `unknown` is `trained` without a known end of any update "
        "of the step."
    ),
]  # fmt: skip


class Unrecorded(Model):
    """Something that is not known of the loss."""

    name: Annotated[str, Field(examples=["clipped"])]
    """`in_loss`, `weight`, `advantage`, `clipped` or `update`."""
    record: str
    """Information that is missing without it, and how to record it."""


class SampleRow(Model):
    """A sample, or a row without an id, as the step's numbers count it."""

    sample_uid: str | None
    """The sample's id; null: the row has none."""
    group_id: str | None
    """The group (of one prompt) that it belongs to; null: not reported."""
    role: Role | None
    """The role that handed it over; null: its process is not known."""
    rank: Rank | None
    """The rank that handed it over; null: its process is not known."""
    row: int
    """The row of its first fragment in the rank's payload, from 0."""
    fragments: int
    """Number of pieces (microbatches, context-parallel parts) that its tokens came in."""
    rounds: int | None
    """Number of its rounds; null: not reported."""
    tokens: int
    """Number of its tokens that count."""
    mean_abs: Number
    """Mean of |p - q| in nats."""
    max_abs: Number
    """Maximum of |p - q| in nats."""
    nonfinite: int
    """Number of its tokens with a value that is not finite."""
    reward: Number | None
    """Its reward, in units of its own; null: not reported."""
    kept: bool
    """Whether tensors of the step are still there, so that its tokens can be shown."""
    reason: str | None
    """Why they are not there; null: they are."""


class Samples(StepHeading, Streams, Page[SampleRow]):
    """The samples of a step."""


class Sample(StepHeading, Streams):
    """The tokens of one sample, as aligned columns; d = p - q."""

    sample_uid: str | None
    """The sample's id; null: the row has none."""
    group_id: str | None
    """The group that it belongs to; null: not reported."""
    prompt_ids: list[int] | None
    """Token ids of the prompt; null: no `prompts` were recorded."""
    prompt_text: str | None
    """The prompt as text, with its special tokens; null: none was recorded, or see
    `texts_reason`."""
    positions: list[int]
    """Each token's position in its sample, from 0."""
    mask: list[int]
    """For each position the number 1 (model token) or 0 (environment or padding)."""
    token_ids: list[int] | None
    """Token ids; null: not recorded, or not as wide as the mask."""
    texts: list[str] | None
    """Texts of the ids, spaces included; null: see `texts_reason`."""
    texts_reason: str | None
    """Why there are no texts; null: there are."""
    round: list[int | None]
    """Each model token's round, from 0; null: no model token."""
    turn: list[int] | None
    """Index of the true turn of each position; null: not recorded."""
    p: list[Number | None]
    """The trainer's log-probs in nats; null: no model token."""
    q: list[Number | None]
    """The rollout's log-probs in nats; null: no model token."""
    p_stream: Annotated[str, Field(examples=["old_log_probs"])]
    """The tensor that p is of."""
    d: list[Number | None]
    """p - q in nats; null: no model token."""
    advantage: list[Number] | None
    """Advantages, in units of the reward; null: not recorded."""
    weight_raw: list[Number | None]
    """Importance ratio before it is cut: exp(d), or of the sequence; null: no model token."""
    weight: list[Number | None] | None
    """Importance ratio that the loss applies; null: none, or not known. Null for a token: no model
    token."""
    clipped: list[Literal["low", "high"] | None] | None
    """The bound at which the loss cuts the ratio in every pass; null: not recorded."""
    clipped_passes: list[list[Literal["low", "high"] | None]] | None
    """The bound at which each pass of the update cuts the ratio, in their order; null: not
    recorded."""
    update_ratios: list[list[Number | None]] | None
    """The ratio that each pass of the update clips, exp(log_probs - old_log_probs), in their order;
    null: not recorded. Null for a token: no model token."""
    rejected: list[bool] | None
    """Whether the trainer left a model token out of the update; null: not recorded."""
    masked_why: list[str | None]
    """Why a token is not the model's; null: it is."""
    fate: list[FateName]
    """Fate of each token in the loss."""
    loss_note: str | None
    """Unrecorded fields of the loss, and how to record them, as text; null: there are none."""
    unrecorded: list[Unrecorded]
    """Unrecorded fields of the loss, which therefore exclude nothing from `trained`."""
    notes: list[str]
    """How columns were derived, and what is missing or disagrees in what is kept."""


class FateRow(Model):
    """The tokens of one fate."""

    fate: FateName
    gradient: bool | None
    """Whether these tokens have a gradient, as far as recorded; null: not known (`unknown`,
    `not finite`)."""
    tokens: int
    """Number of model tokens."""
    share_of_tokens: Number
    """Share of all model tokens."""
    sum_abs: Number
    """Sum of |p - q| in nats over the tokens whose p and q are finite."""
    mean_abs: Number
    """Mean of |p - q| in nats over these."""
    share_of_mismatch: Number
    """Share of the sum of |p - q|; NaN where that is 0."""


class Loss(StepHeading, Streams, Page[FateRow]):
    """How the mismatch of a step is distributed over what the loss did to its tokens."""

    tokens: int
    """Number of model tokens that are kept: what the rows rest on."""
    tokens_counted: int
    """Number of tokens under the mask that the step's numbers rest on."""
    clipped_in: Annotated[list[int] | None, Field(examples=[[980, 14, 6]])]
    """Model tokens that 0, 1, ... of the update's passes clip; null: not recorded."""
    unrecorded: list[Unrecorded]
    """Unrecorded fields of the loss, which therefore exclude nothing from `trained`."""
    note: str
    """How much of the mismatch sits in tokens that no gradient sees, as a sentence."""
    notes: list[str]
    """How rows were derived, and what is missing or disagrees in what is kept."""
