"""The tree of errors, and that each says what to do."""

from __future__ import annotations

import inspect
import pickle

import pytest

from stagescope.link_text import session_call
from stagescope_wire import errors
from stagescope_wire.errors import MissingExtra, StagescopeError
from stagescope_wire.links import Link

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, StagescopeError)
]


def test_all_of_them_are_public() -> None:
    assert sorted(each.__name__ for each in CLASSES) == sorted(errors.__all__)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_error_survives_pickling(kind: type[StagescopeError]) -> None:
    see = (Link("steps"), Link("captures", name="3f0c", shows="who has it"))
    words = {"expected": "that it holds", "advice": "mend it"}
    error = kind("it broke", **words, see=see, link_text=session_call)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (
        str(back)
        == str(error)
        == (
            "it broke; expected that it holds; mend it; "
            'see session.steps(), session.progress("3f0c") for who has it'
        )
    )
    assert (back.wrong, back.expected, back.advice) == ("it broke", "that it holds", "mend it")
    assert back.see == see
    assert 400 <= kind.status < 600


def test_a_message_of_one_part() -> None:
    assert str(StagescopeError("it broke")) == "it broke"
    assert str(StagescopeError("it broke", see=[Link("steps")])) == "it broke; see /steps"


def test_a_missing_extra_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="pandas"):
        raise MissingExtra("pandas is not installed")
