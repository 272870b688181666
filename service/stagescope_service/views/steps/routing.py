"""Whether rollout and trainer chose the same experts in a step, and what that explains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from stagescope_service.statistics.routing import TOKEN_COLUMNS, Int16, Routing
from stagescope_service.statistics.routing_checks import (
    Fault,
    best_other,
    explained,
    faults,
    unrecorded,
)
from stagescope_service.statistics.summary import Summary
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import Dependencies, RankQuery
from stagescope_service.views.reading.step_summaries import Slice
from stagescope_service.views.reading.target import Target
from stagescope_service.views.steps.numbers import heading_of, measure, numbers_context
from stagescope_wire.errors import NotMeasured
from stagescope_wire.tensors import ROLLOUT_ROUTES, ROUTING_COLUMNS, TRAINER_ROUTES

NAMES: Final = {"rollout": ROLLOUT_ROUTES[0], "trainer": TRAINER_ROUTES[0]}
"""Side -> the name under which its routes are recorded."""
_LINES_OF_WORST: Final = 16


def routing(deps: Dependencies, target: Target, page: Page, ranks: RankQuery) -> JsonObject:
    """Return the answer of `/steps/{step}/routing`.

    Raises:
        NotFound: nothing was measured there, or no routes were recorded.
    """
    heading = heading_of(deps, target)
    measured, step = measure(deps, target, Slice(**ranks))
    summary = measured.summary.summary
    found = recorded(summary, f"step {target.step_number} of {target.run}")
    return {
        **heading,
        **numbers_context(measured, step),
        **fields_of(summary, found),
        **page.cut(layer_rows(found)),
    }


def recorded(summary: Summary, of: str) -> Routing:
    """Return the routing of a summary.

    Raises:
        NotMeasured: there is none; names what to record.
    """
    if summary.routing is None:
        raise NotMeasured(
            f"{of} has no routes of experts",
            expected=f"{' and '.join(NAMES.values())}, [rows, tokens, layers, K], recorded beside "
            "the log-probs",
            advice="docs/routing.md says where engines and trainers have them; `stagescope "
            "findings` lists routes that were refused",
        )
    return summary.routing


def fields_of(summary: Summary, found: Routing) -> JsonObject:
    """Return the fields of the answer besides its rows."""
    answer = explained(summary)
    both = found.total("no_route")
    lacking = {side: found.total(f"no_{side}") + both for side in NAMES}
    problems = faults(found, len(summary.sequences))
    return {
        "text": _text(found, answer and answer.text, problems),
        "tokens": 0 if answer is None else answer.tokens,
        "hit": 0 if answer is None else answer.hit,
        **{
            name: None if answer is None else _known(getattr(answer, field))
            for name, field in _NUMBERS.items()
        },
        "lacking": lacking,
        "faults": [{"kind": f.kind, "text": f"{f.headline}: {f.text}."} for f in problems],
        "rounds": [
            {name: int(row[TOKEN_COLUMNS.index(column)]) for name, column in _ROUNDS.items()}
            for row in found.tokens
        ],
        "worst": list(_worst(summary, found)),
    }


_NUMBERS: Final = {
    "hit_share": "share", "mean_hit": "mean_hit", "mean_same": "mean_same", "carried": "carried",
    "excess": "excess",
}  # fmt: skip
"""Field of the answer -> of `Explained`."""
_ROUNDS: Final = {"round": "round", "tokens": "masked", "compared": "compared", "hit": "hit"}


_OF_OTHERS: Final = ("shifted", "swapped")
"""Faults whose routes are those of other tokens or layers."""


def _text(found: Routing, text: str | None, problems: Sequence[Fault]) -> str:
    side = unrecorded(found)
    if side is not None:
        return (
            f"The {side}'s routes are not recorded: record {NAMES[side]} in the same stage to "
            "compare them."
        )
    if wrong := [each.headline for each in problems if each.kind in _OF_OTHERS]:
        return f"{wrong[0]}. Until that is mended, they say nothing about the mismatch."
    return text or "No token has a route of both sides."


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def layer_rows(found: Routing) -> list[JsonObject]:
    """Return a row for each layer."""
    sums = found.by_layer()
    rounds = found.tokens[:, 0].tolist()
    by_round = agreement_by_round(found)
    rows: list[JsonObject] = []
    for layer in range(found.layers):
        own = {name: int(each[layer]) for name, each in sums.items()}
        tokens, other = own["tokens"], best_other(found, layer)
        other_same = 0 if other is None else int(found.same[layer, other])
        rows.append(
            {
                "layer": layer,
                "tokens": tokens,
                "agreement": _share(own["same"], tokens),
                "order_only": _share(own["same"] - own["ordered"], tokens),
                "slots": _share(own["slots"], own["choices"]),
                "rollout_unset": own["rollout_unset"],
                "trainer_unset": own["trainer_unset"],
                "earlier": _share(own["earlier"], own["pairs"]),
                "later": _share(own["later"], own["pairs"]),
                "best_other": other,
                "best_other_agreement": None if other is None else _share(other_same, tokens),
                "by_round": [by_round.get((layer, number)) for number in rounds],
            }
        )
    return rows


def agreement_by_round(found: Routing) -> dict[tuple[int, int], float]:
    """Return (layer, round) -> the share of tokens with the same experts, where any counts."""
    at = {name: i for i, name in enumerate(ROUTING_COLUMNS)}
    return {
        (int(row[0]), int(row[1])): int(row[at["same"]]) / int(row[at["tokens"]])
        for row in found.counts
        if row[at["tokens"]]
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _worst(summary: Summary, found: Routing) -> Iterator[JsonObject]:
    """Yield the worst tokens whose routes are kept."""
    tokens, sequences = summary.worst, summary.sequences
    shown = 0
    for index in range(len(tokens)):
        sequence, position = int(tokens.sequence[index]), int(tokens.position[index])
        routes = found.worst.of(sequence, position)
        if routes is None:
            continue
        chosen = [[_has_choice(experts) for experts in side] for side in routes]
        yield {
            "abs_diff": abs(float(tokens.p[index]) - float(tokens.q[index])),
            "sample_uid": sequences.samples[sequence] or None,
            "row": int(sequences.row[sequence]),
            "position": position,
            "round": int(tokens.round[index]),
            "differing": [
                {"layer": layer, "rollout": one.tolist(), "trainer": other.tolist()}
                for layer, (one, other) in enumerate(zip(*routes, strict=True))
                if chosen[0][layer] and chosen[1][layer]
                if not np.array_equal(np.sort(one), np.sort(other))
            ],
            "lacks": [side for side, layers in zip(NAMES, chosen, strict=True) if not any(layers)],
        }
        shown += 1
        if shown == _LINES_OF_WORST:
            return


def _has_choice(experts: Int16) -> bool:
    """Return whether these are experts of a layer: none is chosen twice, and none is below 0."""
    return bool((experts >= 0).all() and (len(experts) == 1 or (experts != experts[0]).any()))
