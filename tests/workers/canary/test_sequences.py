"""The sequences of a canary: the same everywhere, and what they are for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.engines.tiny_llama import BOS, EOS, tiny_tokenizer

from stagescope_wire.canary import MAX_SEQUENCES
from stagescope_wire.errors import InvalidInput
from stagescope_workers.canary.sequences import TEXT, choose, given, of_tokenizer


def test_another_process_chooses_the_same() -> None:
    program = (
        "from stagescope_workers.canary.sequences import choose\n"
        "print(choose(1000, bos=1, avoid=[2], max_length=700))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert other.stdout.strip() == repr(choose(1000, bos=1, avoid=[2], max_length=700))


def test_they_are_short_share_a_prefix_spread_and_reach_the_maximum_length() -> None:
    found = choose(50_000, bos=1, avoid=[0, 2], max_length=1500)
    assert len(found.rows) <= MAX_SEQUENCES
    assert {row[0] for row in found.rows} == {1}
    assert not {0, 2} & {token for row in found.rows for token in row}
    assert sum(len(row) <= 64 for row in found.rows) == len(found.prompts) == 3
    one, other = found.sharing
    assert one[:257] == other[:257]
    assert one[257:] != other[257:]
    assert any(len(set(row)) == len(row) == 129 and max(row) > 49_000 for row in found.rows)
    assert max(map(len, found.rows)) == 2048 - sum(map(len, found.rows[:-1])) < 1500
    assert found.note == (
        f"the longest has {len(found.rows[-1])} of 1500 tokens: all together have a budget of 2048"
    )
    whole = choose(50_000, max_length=600)
    assert (max(map(len, whole.rows)), whole.note) == (600, "")


def test_a_tokenizer_gives_a_text_its_bos_and_no_special_token() -> None:
    tokenizer = tiny_tokenizer()
    found = of_tokenizer(tokenizer, max_length=512)
    assert tuple(tokenizer(TEXT)["input_ids"]) in found.rows
    assert all(row[0] == BOS and not {BOS, EOS} & set(row[1:]) for row in found.rows)


@pytest.mark.parametrize("length", [32, 33, 100, 512])
def test_no_row_is_longer_than_the_engine_accepts(length: int) -> None:
    rows = choose(500, bos=0, max_length=length).rows
    assert max(map(len, rows)) == length


def test_own_sequences_are_checked() -> None:
    rows = [[1, 2, 3], [*range(100), 1], [*range(100), 2]]
    found = given(rows)
    assert found.sharing == (tuple(rows[1]), tuple(rows[2]))
    assert found.prompts == ((1, 2, 3),)
    assert given([[1, 2], [3, 4]]).sharing == ()
    for wrong in ([], [[1]], [[1, -2]], [[1, 2]] * 9):
        with pytest.raises(InvalidInput):
            given(wrong)
