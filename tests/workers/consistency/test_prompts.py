from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagescope_wire.engines import Generation
from stagescope_wire.errors import Forbidden, InvalidInput
from stagescope_workers.consistency.prompts import (
    Item,
    Marking,
    compare_answers,
    data_url,
    read_items,
    token_ids,
)
from stagescope_workers.consistency.transformers_engine import load_tokenizer

PNG = b"\x89PNG\r\n\x1a\nrest"


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_jsonl_and_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    path = written(
        tmp_path,
        {"prompt": "a", "answer": 4, "id": "first"},
        {"messages": [{"role": "user", "content": "b"}]},
        {"ids": [1, 2], "image": None},
        {"prompt": "see", "image": "a.png"},
    )
    first, second, third, fourth = read_items(path)
    assert first == Item("first", prompt="a", answer="4")
    assert second.messages == ({"role": "user", "content": "b"},)
    assert third.ids == (1, 2)
    assert fourth.image == (tmp_path / "a.png").resolve()
    assert len(read_items(path, 2)) == 2
    text = tmp_path / "prompts.txt"
    text.write_text(" one\n\ntwo \n")
    assert [item.prompt for item in read_items(text)] == [" one", "two "]


@pytest.mark.parametrize(
    "row",
    [
        7, {}, {"prompt": ""}, {"prompt": 3}, {"prompt": "a", "ids": [1]}, {"ids": []},
        {"ids": [-1]}, {"ids": [True]}, {"messages": []}, {"messages": [{"role": "user"}]},
        {"prompt": "a", "image": "absent.png"},
    ],
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, row: object) -> None:
    with pytest.raises(InvalidInput, match="line 2"):
        read_items(written(tmp_path, {"prompt": "good"}, row))


def test_what_is_no_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("{" * 100_000)
    with pytest.raises(InvalidInput, match="not JSON"):
        read_items(path)
    path.write_text("\n\n")
    with pytest.raises(InvalidInput, match="no prompt"):
        read_items(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_items(path)


def test_an_image_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    below = tmp_path / "data"
    below.mkdir()
    for name in ("../secret.png", str(tmp_path / "secret.png")):
        with pytest.raises(Forbidden, match="is outside of"):
            read_items(written(below, {"prompt": "a", "image": name}))
    (below / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(Forbidden, match="is outside of"):
        read_items(written(below, {"prompt": "a", "image": "link.png"}))


def test_images_as_data_urls(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    assert data_url(path).startswith("data:image/png;base64,iVBORw0KGg")
    path.write_text("<svg onload=alert(1)>")
    with pytest.raises(InvalidInput, match="not an image"):
        data_url(path)


def test_tokens_as_they_stand_and_by_the_template(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    plain = token_ids(Item("0", prompt="the"), tokenizer, chat=False)
    assert tokenizer.decode(plain) == "<s>the"
    chat = token_ids(Item("0", prompt="the"), tokenizer, chat=True)
    assert tokenizer.decode(chat) == "<s>user: the\nassistant: "
    messages = ({"role": "user", "content": "the"},)
    assert token_ids(Item("0", messages=messages), tokenizer, chat=False) == chat
    assert token_ids(Item("0", ids=(5, 6)), tokenizer, chat=True) == [5, 6]
    tokenizer.chat_template = None
    with pytest.raises(InvalidInput, match="no chat template"):
        token_ids(Item("0", prompt="the"), tokenizer, chat=True)


@pytest.mark.parametrize(
    ("marking", "text", "right"),
    [
        (Marking("exact"), " 42\n", True),
        (Marking("exact"), "it is 42", False),
        (Marking("contains"), "it is 42.", True),
        (Marking("contains"), "it is 4 2", False),
        (Marking("regex", r"answer: (\d+)"), "answer: 7, no, answer: 42", True),
        (Marking("regex", r"answer: (\d+)"), "answer: 42, no, answer: 7", False),
        (Marking("regex", r"\d+"), "first 1, then 42", True),
        (Marking("regex", r"(\d+)"), "none", False),
    ],
)
def test_when_an_answer_is_right(marking: Marking, text: str, right: bool) -> None:
    assert marking.is_right(text, " 42 ") is right


@pytest.mark.parametrize(
    ("match", "pattern"), [("fuzzy", None), ("exact", "x"), ("regex", None), ("regex", "(")]
)
def test_a_marking_that_cannot_be(match: str, pattern: str | None) -> None:
    with pytest.raises(InvalidInput):
        Marking(match, pattern)


def test_both_sides_answers() -> None:
    items = [Item("a", prompt="x", answer="7"), Item("b", prompt="y", answer="8"),
             Item("c", prompt="z")]  # fmt: skip
    ours = [Generation("7", token_ids=(1, 2, 3)), Generation("9", token_ids=(1, 5)),
            Generation("same", token_ids=(4, 4, 4, 4))]  # fmt: skip
    theirs = [Generation("7", token_ids=(1, 2, 9, 9)), Generation("8", token_ids=(1, 5, 6)),
              Generation("same", token_ids=(4, 4, 4, 4))]  # fmt: skip
    found = compare_answers(items, ours, theirs, Marking("exact"))
    assert [row["first_difference"] for row in found.rows] == [2, 2, None]
    assert found.same == 1
    assert found.token_share == pytest.approx((2 + 2 + 4) / (4 + 3 + 4))
    assert (found.marked, found.accuracy) == (2, (0.5, 1.0))
    assert found.rows[2]["engine_right"] is None
    texts = compare_answers(items[2:], [Generation("abc")], [Generation("abd")], Marking())
    assert texts.rows[0]["first_difference"] == 2
    assert texts.accuracy is None
