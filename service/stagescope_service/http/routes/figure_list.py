"""The route that lists the figures with their parameters."""

from __future__ import annotations

import typing
from typing import Literal

from fastapi import APIRouter
from fastapi.routing import APIRoute

from stagescope_service.http.requests import Answer, is_repeatable, query_fields
from stagescope_service.http.routes import compared_figures, figures, run_figures
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models import figures as models

router = APIRouter(tags=["figures"])


@router.get("/figures", response_model=models.Figures)
async def list_figures() -> Answer:
    """List the figures with their parameters."""
    routes = [
        route for part in (run_figures, figures, compared_figures) for route in part.router.routes
        if isinstance(route, APIRoute) and route.path.startswith("/figures/")
    ]  # fmt: skip
    rows = [_row(route) for route in sorted(routes, key=lambda route: route.path)]
    return Answer({"rows": rows, "next": None})


def _row(route: APIRoute) -> JsonObject:
    parameters = []
    for field in query_fields(route.dependant):
        annotation = field.field_info.annotation
        parameters.append(
            {
                "name": field.alias,
                "description": field.field_info.description or "",
                "required": field.field_info.is_required(),
                "repeatable": is_repeatable(field),
                "values": _values(annotation),
            }
        )
    return {
        "name": route.path.removeprefix("/figures/"),
        "path": route.path,
        "description": route.description.partition("\n\n")[0],
        "parameters": parameters,
    }


def _values(annotation: object) -> list[str] | None:
    if typing.get_origin(annotation) is Literal:
        return [str(value) for value in typing.get_args(annotation)]
    for each in typing.get_args(annotation):
        if (values := _values(each)) is not None:
            return values
    return None
