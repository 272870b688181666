"""Questions that read whole operator tables, answered in a process of their own.

Pairing a hundred thousand calls holds Python's lock for up to a second at a time, in which the API
could answer nobody else. Starting a process takes about one second, so small tables (`SMALL_ROWS`)
are compared where the question came in.

As a process, `python -m stagescope_service.compare.operators.apart` reads a question from its input
and writes the answer: JSON with Python's words for NaN and infinities.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from stagescope.wire import errors
from stagescope.wire.errors import NotReady, StagescopeError
from stagescope_service.compare.operators.differences import Thresholds
from stagescope_service.compare.operators.divergence import first_divergent
from stagescope_service.compare.operators.non_finite import first_non_finite

SMALL_ROWS: Final = 20_000
MOST_SECONDS: Final = 300.0

Fields = dict[str, Any]


def divergence(
    a: Path,
    b: Path,
    thresholds: Thresholds,
    *,
    rows: int,
    skip_sharded: bool,
    limit: int,
) -> Fields:
    """Return the fields of `first_divergent`.

    Args:
        a, b: operator tables.
        thresholds, skip_sharded, limit: as there.
        rows: of both tables together.
    """
    question = {
        "a": str(a),
        "b": str(b),
        "thresholds": dataclasses.asdict(thresholds),
        "skip_sharded": skip_sharded,
        "limit": limit,
    }
    return _answer("divergence", question, rows)


def non_finite(tables: Mapping[int, Path], *, rows: int) -> Fields:
    """Return `earliest`, `together` and `order_differs` of `first_non_finite`.

    Args:
        tables: rank -> its operator table.
        rows: of all tables together.
    """
    return _answer("non_finite", {"tables": [[r, str(path)] for r, path in tables.items()]}, rows)


def _divergence(question: Mapping[str, Any]) -> Fields:
    found = first_divergent(
        Path(question["a"]),
        Path(question["b"]),
        Thresholds(**question["thresholds"]),
        skip_sharded=question["skip_sharded"],
        limit=question["limit"],
    )
    return found.fields()


def _non_finite(question: Mapping[str, Any]) -> Fields:
    found = first_non_finite({rank: Path(path) for rank, path in question["tables"]})
    return {
        "earliest": found.earliest,
        "together": found.together,
        "order_differs": found.order_differs,
    }


_QUESTIONS: Final[Mapping[str, Callable[[Mapping[str, Any]], Fields]]] = {
    "divergence": _divergence,
    "non_finite": _non_finite,
}


def _answer(name: str, question: Mapping[str, Any], rows: int) -> Fields:
    if rows <= SMALL_ROWS:
        return _QUESTIONS[name](question)
    said = _ask(json.dumps([name, question]).encode())
    if "error" in said:
        kind = getattr(errors, said["error"]["kind"])
        raise kind(said["error"]["wrong"], expected=said["error"]["expected"])
    found: Fields = said["answer"]
    return found


def _ask(question: bytes) -> Fields:
    """Have a process of its own answer; it is ended with this call, whatever happens."""
    with subprocess.Popen(
        [sys.executable, "-m", "stagescope_service.compare.operators.apart"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        try:
            answer, _ = process.communicate(question, MOST_SECONDS)
        except subprocess.TimeoutExpired:
            raise NotReady(
                f"the comparison took over {MOST_SECONDS:.0f} s",
                advice="ask again when the machine has less to do, or about smaller dumps",
            ) from None
        finally:
            process.kill()  # nothing, where it has ended
    if process.returncode:
        raise StagescopeError(
            f"the comparison ended with code {process.returncode}",
            advice="it may have been killed for want of memory",
        )
    found: Fields = json.loads(answer)
    return found


def main() -> None:
    """Answer the question on standard input."""
    os.nice(10)
    name, question = json.loads(sys.stdin.buffer.read())
    try:
        said: Fields = {"answer": _QUESTIONS[name](question)}
    except StagescopeError as error:
        kind = type(error).__name__
        said = {"error": {"kind": kind, "wrong": error.wrong, "expected": error.expected}}
    sys.stdout.write(json.dumps(said, default=_plain))


def _plain(value: Any) -> Any:
    """Return a number of numpy's as one of Python's."""
    return value.item()


if __name__ == "__main__":
    main()
