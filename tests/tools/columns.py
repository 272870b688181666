"""Makes the columns of the client's tables of the API's document.

python -m tests.tools.columns
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.documented import document

FILE: Final = Path(__file__).parents[2] / "client/stagescope/columns.json"
SCHEMAS: Final[Mapping[str, str]] = {
    "rounds": "SliceRow", "ranks": "RankRow", "tokens": "TokenRow", "metric_names": "NumberName",
    "samples": "SampleRow", "routing": "RoutedLayer", "loss": "FateRow",
    "diagnosis": "Symptom", "stages": "StageRow",
    "scalars": "ScalarRow", "stuck": "StuckRow", "dumps": "DumpRow", "kept": "KeptFile",
    "operators": "OperatorRow", "non_finite": "FirstNonFinite", "weights": "Weight",
    "versions": "WeightVersion", "canary": "CanaryVersion", "canary_scores": "CanaryScore",
    "devices": "Device", "runs": "RunRow", "attempts": "AttemptRow",
    "steps": "StepRow", "findings": "FindingRow", "findings/groups": "FindingGroup",
    "losses": "LossRow", "losses/groups": "LossGroup", "firings": "Firing",
    "firings/groups": "FiringGroup",
}  # fmt: skip
"""Table -> the schema of its rows."""
RECORDS: Final[Mapping[str, str]] = {
    "begun_again": "BegunAgain", "missing": "Missing", "superseded": "Superseded",
    "odd_ranks": "RoleRank",
}  # fmt: skip
"""Column that holds records -> the schema of a record."""
_KINDS: Final = {"integer": "int", "number": "float", "boolean": "bool", "string": "text"}


def columns_text() -> str:
    """Return the content of the client's file, a table a line; a column keeps its place in it."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    parts = {}
    for part, names in (("tables", SCHEMAS), ("records", RECORDS)):
        columns = {each: _columns_of(names[each], known[part].get(each, ())) for each in names}
        parts[part] = ",\n".join(f'"{each}": {json.dumps(columns[each])}' for each in names)
    return "{" + ",\n".join(f'"{part}": {{\n{text}\n}}' for part, text in parts.items()) + "}\n"


def _columns_of(name: str, known: Iterable[str]) -> dict[str, str]:
    """Return the columns that every row of a schema has, and what each holds."""
    schema = document()["components"]["schemas"][name]
    names = set(schema["required"])
    order = dict.fromkeys((*(each for each in known if each in names), *schema["required"]))
    return {each: _kind_of(schema["properties"][each]) for each in order}


def _kind_of(about: Mapping[str, Any]) -> str:
    if "$ref" in about:
        return _kind_of(document()["components"]["schemas"][about["$ref"].rpartition("/")[2]])
    if "anyOf" in about:
        kinds = [_kind_of(each) for each in about["anyOf"] if each.get("type") != "null"]
        # Beside a number stand the names of those that are not finite.
        kind = "float" if "float" in kinds else kinds[0]
        optional = len(kinds) < len(about["anyOf"]) and kind in ("int", "bool")
        return kind + "?" * optional
    if about.get("type") == "array":
        return {"int": "ints", "text": "texts"}.get(_kind_of(about["items"]), "nested")
    return _KINDS.get(about.get("type", ""), "nested")


if __name__ == "__main__":
    FILE.write_text(columns_text(), encoding="utf-8")
