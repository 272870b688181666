from __future__ import annotations

import math

import pytest

from stagescope_wire import render
from stagescope_wire.render_html import html_table


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "", "-"), (math.nan, "", "nan"), (-math.inf, "B", "-inf"), (True, "", "yes"),
        (0.00371234567, "", "0.00371235"), (123456789, "", "123456789"),
        (301_000_000_000, "B", "301 GB"), (999_600, "B", "1 MB"), (0, "B", "0 B"),
        (0.0, "unix", "1970-01-01 00:00:00Z"), ([1, None, 3], "", "1, -, 3"), ([], "", "-"),
        ({"a": 1}, "", '{"a": 1}'), (dict.fromkeys("abcd", 1), "", "{4 fields}"),
        ([{"role": "actor", "rank": 1, "stage": "s", "status": "begun"}], "", "actor/1 s begun"),
        ("a\nb\x1b[2J", "", r"a\nb\x1b[2J"),
    ],
)  # fmt: skip
def test_values_are_formatted_for_readers(value: object, unit: str, text: str) -> None:
    assert render.format_value(value, unit) == text


@pytest.mark.parametrize("wall", [1e300, -1e300, 1e18, -1e11])
def test_a_wall_clock_beyond_the_calendar_is_a_number(wall: float) -> None:
    assert render.format_value(wall, "unix") == f"{wall:.6g}"


@pytest.mark.parametrize("width", range(24, 60))
def test_no_line_of_a_wrapped_text_begins_as_advice_does(width: int) -> None:
    text = "it said 'no room left -> stagescope doctor - or * this' and ended"
    first, *more = render.wrapped("  + ", text, width)
    assert not any(line.strip().startswith(("->", "- ", "*")) for line in more)
    assert " ".join([first[4:], *map(str.strip, more)]) == text


def test_a_table_fits_and_names_what_it_left_out() -> None:
    columns = {f"column_{n:02}": [n * 1.5, "x" * 60, None] for n in range(12)}
    for width in (40, 80, 120):
        lines = render.text_table(columns, units={}, width=width)
        assert max(map(len, lines)) <= width
        shown = lines[0].split()
        named = [name for name in columns if name in " ".join(lines[5:])]
        assert len(shown) + len(named) == 12
    assert "column_11" in "\n".join(lines)


def test_ids_and_times_are_not_shortened_and_empty_columns_are_dropped_first() -> None:
    columns: dict[str, list[object]] = {
        "capture_id": ["0123456789abcdef"], "empty": [None], "text": ["x" * 60], "wall": [0.0],
        "last": ["y" * 24],
    }  # fmt: skip
    lines = render.text_table(columns, units={"wall": "unix"}, width=96)
    assert "0123456789abcdef" in lines[2]
    assert "1970-01-01 00:00:00Z" in lines[2]
    assert "y" * 24 in lines[2]
    assert lines[3] == "more columns with --wide (in Python: select): empty"


def test_columns_line_up_with_wide_characters() -> None:
    lines = render.text_table({"text": ["中文", "ab"], "n": [1, 22]}, units={}, width=80)
    assert {render.width_of(line) for line in lines} == {len("text") + 2 + 2}


def test_numbers_are_right_aligned_and_text_left() -> None:
    lines = render.text_table({"rank": [1, 10], "word": ["a", "bcdef"]}, units={}, width=80)
    assert lines[2:] == ["   1  a", "  10  bcdef"]


def test_a_clipped_cell_ends_in_dots() -> None:
    assert render.clip("abcdefgh", 6) == "abcd.."
    assert render.clip("中文中文", 6) == "中文.."
    assert render.clip("abc", 3) == "abc"


def test_html_escapes_everything() -> None:
    bad = "<script>alert(1)</script>"
    columns = {bad: [bad, {"k": bad, "b": 1, "c": 2, "d": 3}]}
    text = html_table(columns, units={}, caption=bad, foot=[bad])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 5
    assert "<details>" in text


def test_html_has_no_colour_of_its_own() -> None:
    text = html_table({"a": [1]}, units={}, caption="c")
    assert "color:inherit" in text
    assert "background:transparent" in text
    assert "#" not in text.replace("&#", "")


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"), (1.0, "100 %"), (0.12345, "12.3 %"), (0.5, "50 %"), (0.0261, "2.61 %"),
        (0.0001, "0.01 %"), (5.294e-7, "0.000053 %"), (-2e-6, "-0.0002 %"),
        (1e-12, "below 0.000001 %"), (math.nan, "nan"), (1234.5, "123450 %"),
    ],
)  # fmt: skip
def test_a_share_is_never_written_in_powers_of_ten(share: float, text: str) -> None:
    assert render.format_share(share) == text
