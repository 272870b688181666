"""Comparisons of large operator tables, which run in a separate process.

Pairing a hundred thousand calls holds Python's lock for up to a second at a time. Meanwhile the API
could answer no other request. Starting a process takes about one second, so small tables
(`SMALL_ROWS`) are compared in the calling process.

`python -m stagescope_service.compare.operators.comparison_process` reads a request from its input
and writes the answer: JSON with Python's names for NaN and infinities.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from stagescope_service.compare.operators.differences import Thresholds
from stagescope_service.compare.operators.divergence import difference_curve, first_divergent
from stagescope_service.compare.operators.layouts import Ranks, RankTable, ShardRule, ranks_of
from stagescope_service.compare.operators.non_finite import first_non_finite
from stagescope_wire import errors
from stagescope_wire.errors import NotReady, StagescopeError
from stagescope_wire.nonfinite import Json

SMALL_ROWS: Final = 20_000
MAX_SECONDS: Final = 300.0

Fields = dict[str, Json]
"""Arguments or results as JSON values, which are checked only by the functions below."""


def divergence(
    a: Ranks,
    b: Ranks,
    thresholds: Thresholds,
    *,
    rows: int,
    rules: Sequence[ShardRule] = (),
    skip_sharded: bool,
    limit: int,
) -> Fields:
    """Return the fields of `first_divergent`.

    Args:
        a, b: the operator tables of each side's ranks.
        thresholds, rules, skip_sharded, limit: see `first_divergent`.
        rows: number of rows of all tables together.
    """
    return _answer(
        _divergence, rows, a=_side_fields(a), b=_side_fields(b),
        thresholds=dataclasses.asdict(thresholds), rules=[*map(dataclasses.asdict, rules)],
        skip_sharded=skip_sharded, limit=limit,
    )  # fmt: skip


def curve(a: Ranks, b: Ranks, thresholds: Thresholds, *, rows: int, points: int) -> Fields:
    """Return the columns of `difference_curve`; the arguments are as those of `divergence`."""
    fields = dataclasses.asdict(thresholds)
    return _answer(
        _curve, rows, a=_side_fields(a), b=_side_fields(b), thresholds=fields, points=points
    )


def non_finite(tables: Mapping[int, Path], *, rows: int) -> Fields:
    """Return the fields of `first_non_finite`.

    Args:
        tables: rank -> its operator table.
        rows: number of rows of all tables together.
    """
    return _answer(_non_finite, rows, tables=[[rank, str(path)] for rank, path in tables.items()])


def _divergence(
    a: Sequence[Fields], b: Sequence[Fields], thresholds: Fields, rules: Sequence[Fields],
    **options: Json,
) -> Fields:  # fmt: skip
    found = first_divergent(
        _side_of(a), _side_of(b), Thresholds(**thresholds),
        rules=[ShardRule(**rule) for rule in rules], **options,
    )  # fmt: skip
    return found.fields()


def _curve(a: Sequence[Fields], b: Sequence[Fields], thresholds: Fields, points: int) -> Fields:
    found = difference_curve(_side_of(a), _side_of(b), Thresholds(**thresholds), points=points)
    return {**found}


def _side_fields(side: Ranks) -> list[Fields]:
    return [
        {
            **dataclasses.asdict(table),
            "path": str(table.path),
            "tensors": None if table.tensors is None else str(table.tensors),
        }
        for table in ranks_of(side)
    ]


def _side_of(tables: Sequence[Fields]) -> list[RankTable]:
    return [
        RankTable(
            **{
                **fields,
                "path": Path(fields["path"]),
                "tensors": None if fields["tensors"] is None else Path(fields["tensors"]),
            }
        )
        for fields in tables
    ]


def _non_finite(tables: Sequence[tuple[int, str]]) -> Fields:
    return {**first_non_finite({rank: Path(path) for rank, path in tables})}


_FUNCTIONS: Final[Mapping[str, Callable[..., Fields]]] = {
    function.__name__: function for function in (_divergence, _curve, _non_finite)
}


def _answer(function: Callable[..., Fields], rows: int, **arguments: Json) -> Fields:
    if rows <= SMALL_ROWS:
        return function(**arguments)
    reply = _run_process(json.dumps([function.__name__, arguments]).encode())
    if "error" in reply:
        kind = getattr(errors, reply["error"]["kind"])
        raise kind(reply["error"]["wrong"], expected=reply["error"]["expected"])
    answer: Fields = reply["answer"]
    return answer


def _run_process(request: bytes) -> Fields:
    """Return the reply of a new process, which ends with this call in any case."""
    with subprocess.Popen(
        [sys.executable, "-m", "stagescope_service.compare.operators.comparison_process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(request, MAX_SECONDS)
        except subprocess.TimeoutExpired:
            raise NotReady(
                f"the comparison took over {MAX_SECONDS:.0f} s",
                advice="ask again when the machine is less busy, or compare smaller dumps",
            ) from None
        finally:
            process.kill()  # has no effect if it has ended
    if process.returncode:
        raise StagescopeError(
            f"the comparison ended with code {process.returncode}",
            advice="it may have been killed because memory was short",
        )
    reply: Fields = json.loads(output)
    return reply


def main() -> None:
    """Answer the request on standard input."""
    os.nice(10)
    name, arguments = json.loads(sys.stdin.buffer.read())
    try:
        reply: Fields = {"answer": _FUNCTIONS[name](**arguments)}
    except StagescopeError as error:
        kind = type(error).__name__
        reply = {"error": {"kind": kind, "wrong": error.wrong, "expected": error.expected}}
    sys.stdout.write(json.dumps(reply, default=np.generic.item))


if __name__ == "__main__":
    main()
