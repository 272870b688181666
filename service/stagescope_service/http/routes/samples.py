"""Routes about single samples: a step's samples, the tokens of one, and what the loss did to them.

The list rests on the step summary, which every closed step has; tokens are read from what the ring
and the kept files still hold.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.convertors import Convertor, register_url_convertor

from stagescope_service.http.parameters import Deps, Rank, Role, StepTarget
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views.models import samples as models
from stagescope_service.views.samples import listing as view
from stagescope_service.views.samples.listing import SortBy, loss_of
from stagescope_service.views.samples.sample import tokens_of, tokens_of_row


class _AnyText(Convertor[str]):
    """A part of a path that may be any text: with slashes, as `path`, and with line ends."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any_text", _AnyText())

router = APIRouter(prefix="/steps/{step}", tags=["steps"])


@router.get("/samples", response_model=models.Samples)
def samples(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    sort: Annotated[SortBy, Query(description="Descending, but `sample_uid`.")] = "max_abs",
    role: Role = None,
    rank: Rank = None,
) -> Answer:
    """List the step's samples with their mismatch, the largest |p - q| first.

    The list has the samples that the step's numbers count. If tensors of the step still exist,
    `kept` is true and `/samples/{sample_uid}` shows the tokens. Otherwise `reason` says why not.
    Use `/row` for a row without `sample_uid`.
    """
    return Answer(view.samples(deps, target, page, sort, role, rank))


# --- the tokens of one sample ---------------------------------------------------------------
@router.get("/samples/{sample_uid:any_text}", response_model=models.Sample)
async def sample(
    deps: Deps,
    target: StepTarget,
    sample_uid: Annotated[str, Path(max_length=500, description="The sample's id.")],
) -> Answer:
    """Return the tokens of a sample: both streams, and what the loss did to each.

    Columns are aligned. They hold one value for each position from the first to the last known one,
    environment tokens included. As far as it is recorded, `masked_why` and `fate` say why a token
    has no gradient. Unrecorded fields, and how to record them, are in `unrecorded`.
    """
    found = await deps.computations.run(tokens_of, deps, target, sample_uid)
    return Answer({**target.heading(), **found})


@router.get("/row", response_model=models.Sample)
async def row(
    deps: Deps,
    target: StepTarget,
    row: Annotated[int, Query(ge=0, lt=10**9, description="The row in the rank's payload.")],
    role: Role = None,
    rank: Rank = None,
) -> Answer:
    """Return the tokens of a row that has no sample id, as `/samples/{sample_uid}` does.

    It reads the rank's first part in the stage that has both streams.
    """
    found = await deps.computations.run(tokens_of_row, deps, target, role, rank, row)
    return Answer({**target.heading(), **found})


# --- what the loss did to a step's tokens ---------------------------------------------------
@router.get("/loss", response_model=models.Loss)
async def loss(deps: Deps, target: StepTarget, page: PageOf) -> Answer:
    """Say how much of the step's mismatch sits in tokens that no gradient sees, and why.

    Rows are fates of the model's tokens, the trained ones first. Each token has the first fate that
    applies: `not finite`, `rejected`, `zero weight`, `zero advantage`, `clipped low`,
    `clipped high` or `trained`. The last one is `unknown` if no update of the step is known to have
    ended. Unrecorded fields exclude no token; `unrecorded` names them. The numbers come from what
    the ring and the kept files hold of the step: `tokens` of `tokens_counted`.
    """
    found = await deps.computations.run(loss_of, deps, target)
    notes = [*found.derived, *found.gaps]
    return Answer({**target.heading(), **found.fields, "notes": notes, **page.cut(found.rows)})


# --- parts of answers -----------------------------------------------------------------------
