"""What pydantic refuses is said in our own words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from stagescope_service.commands.serving import ServeOptions, settings_of
from stagescope_service.refusals import expected_of
from stagescope_wire.errors import InvalidInput


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("an odd number")
    return value


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, "x", "an integer"),
        (int, 1.5, "an integer"),
        (float, "x", "a number"),
        (bool, "maybe", "true or false"),
        (list[int], 3, "a list"),
        (dict[str, int], 3, "an object"),
        (Annotated[int, Field(ge=3)], 2, "at least 3"),
        (Annotated[int, Field(lt=3)], 4, "less than 3"),
        (Annotated[str, Field(max_length=2)], "abc", "at most 2 characters"),
        (Annotated[str, Field(pattern="^a$")], "b", "a text of the form ^a$"),
        (Annotated[float, Field(allow_inf_nan=False)], float("nan"), "a finite number"),
        (Literal["a", "b"], "c", "'a' or 'b'"),
        (Annotated[int, AfterValidator(_odd)], 2, "an odd number"),
    ],
)
def test_each_kind_of_wrong_value_names_what_was_expected(
    kind: Any, value: object, expected: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(kind).validate_python(value)
    assert expected_of(raised.value.errors()[0]) == expected


def test_a_wrong_setting_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGESCOPE_PORT", "secret-text")
    with pytest.raises(InvalidInput) as raised:
        settings_of(ServeOptions())
    assert raised.value.wrong == "a setting is wrong: port"
    assert raised.value.expected == "port: an integer"
    assert "secret-text" not in str(raised.value)
