"""prime-rl's traces with the trainer's annotations: both layouts, branches, nulls, lost lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.api import service
from tests.support.dump_files import all_problems, read_first, rows_in

from stagescope.session import attach
from stagescope_service.commands.importing import import_dump
from stagescope_service.compare.comparison import compare
from stagescope_service.compare.results import Verdict
from stagescope_service.dumps.discover import open_dump
from stagescope_wire.errors import InvalidTensor

Line = dict[str, Any]
TRACES = "monitors/file/traces"


def trace(number: int, *, step: int) -> Line:
    """A trace of two turns; every third forks after the first: two leaves, two branches."""
    rng = np.random.default_rng([step, number])
    nodes: list[Line] = []

    def message(parent: int | None, length: int, *, sampled: bool) -> int:
        # The model's message begins with a token of the template.
        mask = [sampled and at > 0 for at in range(length)]
        node: Line = {
            "message": {"role": "assistant" if sampled else "user"},
            "token_ids": [*map(int, rng.integers(10, 90, length))],
            "mask": mask,
        }
        if parent is not None:
            node["parent"] = parent
        if sampled:
            node |= {"sampled": True, "logprobs": (-rng.exponential(1.0, sum(mask))).tolist()}
        nodes.append(node)
        return len(nodes) - 1

    first = message(message(None, 4, sampled=False), 5, sampled=True)
    for _ in range(2 if number % 3 == 0 else 1):
        message(message(first, 3, sampled=False), 4, sampled=True)
    return {
        "id": f"t{step}x{number}",
        "nodes": nodes,
        "rewards": {"right": {"score": float(number), "weight": 0.5}, "unscored": None},
        "info": {"kind": "train"},
    }


def branches(made: Line) -> list[list[Line]]:
    """The messages of each branch."""
    nodes = made["nodes"]
    paths = {4: [[0, 1, 2, 3]], 6: [[0, 1, 2, 3], [0, 1, 4, 5]]}[len(nodes)]
    return [[nodes[at] for at in path] for path in paths]


def row(messages: list[Line], shift: float = 0.0) -> Line:
    """What a branch has: tokens, mask, both streams, entropies."""
    tokens = [token for each in messages for token in each["token_ids"]]
    mask = np.array([one for each in messages for one in each["mask"]])
    q = np.zeros(len(tokens))
    q[mask] = [value for each in messages for value in each.get("logprobs", ())]
    noise = np.random.default_rng(tokens).normal(0, 0.05, len(tokens))
    p = np.round(q + noise + shift, 4)
    return {"tokens": tokens, "mask": mask, "q": q, "p": p, "entropy": np.round(np.abs(noise), 4)}


def lines_of(steps: tuple[int, ...], *, full: bool, shift: float) -> dict[str, list[Line]]:
    """The lines of each stream; `full`: the trainer has values outside of the mask, too."""
    found: dict[str, list[Line]] = {"stream": [], "orch": [], "trainer": []}
    for step in steps:
        made = [trace(number, step=step) for number in range(4)]
        for pair in (made[:2], made[2:]):
            work = {"type": "train", "policy": {"start": step, "end": step}}
            found["stream"].append(
                {"id": f"e{step}", "env": {"id": "gsm8k"}, "run": {"work": work}, "traces": pair}
            )
        for each in made[:3]:  # the last one was not taken
            update = {"version": 1, "trace_id": each["id"]}
            advantages = {"advantages": [0.25] * len(row(branches(each)[0])["tokens"])}
            info = {"effective": True, "ship": {"step": step}}
            found["orch"].append({**update, "info": info, "branches": [{"index": 0, **advantages}]})
            for index, messages in enumerate(branches(each)):
                values = row(messages, shift)
                streams = {
                    name: [
                        float(value) if full or one else None
                        for value, one in zip(values[ours], values["mask"], strict=True)
                    ]
                    for name, ours in (("trainer_logprobs", "p"), ("entropies", "entropy"))
                }
                annotated = [{"index": index, **streams}]
                found["trainer"].append({**update, "info": {}, "branches": annotated})
    found["stream"].append({"id": "eval", "env": {"id": "aime"}, "traces": [trace(9, step=9)]})
    return found


def sealed(text: bytes) -> bytes:
    """A chunk as prime-rl seals it: independent frames, and a table of them to be skipped."""
    half = len(text) // 2
    frames = [pa.compress(part, codec="zstd", asbytes=True) for part in (text[:half], text[half:])]
    return b"".join([*frames, b"\x5e\x2a\x4d\x18", (9).to_bytes(4, "little"), bytes(9)])


def write(
    root: Path,
    *,
    steps: tuple[int, ...] = (1, 2),
    chunked: bool = True,
    full: bool = False,
    shift: float = 0.0,
) -> Path:
    for name, lines in lines_of(steps, full=full, shift=shift).items():
        stream = root / TRACES / ("" if name == "stream" else "annotations") / name
        stream.parent.mkdir(parents=True, exist_ok=True)
        texts = [json.dumps(line).encode() + b"\n" for line in lines]
        stream.with_name(f"{name}.index.jsonl").write_text('{"trace_id": "t", "offset": 0}\n')
        if not chunked:
            stream.with_name(f"{name}.jsonl").write_bytes(b"".join(texts))
            continue
        stream.mkdir()
        half = len(texts) // 2
        (stream / "00000.jsonl.zst").write_bytes(sealed(b"".join(texts[:half])))
        (stream / "00001.jsonl").write_bytes(b"".join(texts[half:]))
    return root


def edit(path: Path, line: int, change: Callable[[Any], object]) -> None:
    """Change the object of a line."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    change(lines[line])
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


@pytest.mark.parametrize(("chunked", "full"), [(True, False), (False, True)])
def test_both_layouts(tmp_path: Path, chunked: bool, full: bool) -> None:
    dump = open_dump(write(tmp_path, chunked=chunked, full=full))
    assert (dump.kind, dump.problems) == ("prime_rl_traces", [])
    assert [entry.location.step for entry in dump.entries] == [1, 2]
    record = dump.read(dump.entries[1])
    made = [trace(number, step=2) for number in range(3)]
    expected = [row(messages) for each in made for messages in branches(each)]
    assert record.row_texts["trace_id"] == ("t2x0", "t2x0", "t2x1", "t2x2")
    assert record.row_texts["env_name"] == ("gsm8k",) * 4
    assert record.tensors["rewards"][2].tolist() == [0.0, 0.0, 0.5, 1.0]
    assert record.tensors["versions"][2].tolist() == [2, 2, 2, 2]
    for number, values in enumerate(expected):
        begin = 5  # after the question and the token of the template
        mask = values["mask"][begin:]
        assert rows_in(record, "responses")[number] == values["tokens"][begin:]
        assert rows_in(record, "response_mask")[number] == mask.tolist()
        for name, ours in (("rollout_log_probs", "q"), ("log_probs", "p"), ("entropy", "entropy")):
            held = np.array(rows_in(record, name)[number])
            assert np.array_equal(held[mask], values[ours][begin:][mask])
    assert open_dump(tmp_path, step=1).entries == dump.entries[:1]
    assert open_dump(tmp_path / TRACES / "annotations/trainer").entries if chunked else True


def test_what_is_null_in_one_stream_is_nan_and_in_both_is_not_trained(tmp_path: Path) -> None:
    def spoil(update: Line) -> None:
        [branch] = update["branches"]
        branch["trainer_logprobs"][5] = None
        branch["trainer_logprobs"][6] = branch["entropies"][6] = None

    path = write(tmp_path, steps=(1,), chunked=False) / TRACES / "annotations/trainer.jsonl"
    edit(path, 0, spoil)
    record = read_first(tmp_path)
    assert np.isnan(record.tensors["log_probs"][2][0])
    assert record.tensors["response_mask"][2][:2].tolist() == [1, 0]
    assert record.about["null_values"] == {"log_probs": 1}


def test_what_is_cut_off_or_lost_is_a_problem_and_the_rest_is_read(tmp_path: Path) -> None:
    root = write(tmp_path, chunked=False) / TRACES
    lines = (root / "stream.jsonl").read_text().splitlines(keepends=True)
    (root / "stream.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    orch = (root / "annotations/orch.jsonl").read_text().splitlines(keepends=True)
    (root / "annotations/orch.jsonl").write_text("".join(orch[1:]))
    dump = open_dump(tmp_path)
    said = sorted(problem.message for problem in dump.problems)
    assert len(said) == 3
    assert "no annotation says which step took trace t1x0" in said[-1]
    assert sum("cut off" in message or "no JSON" in message for message in said) == 1
    assert sum("t2x2" in message for message in said) == 1
    assert dump.read(dump.entries[0]).row_texts["trace_id"] == ("t1x1", "t1x2")


def rows_of_steps(root: Path) -> tuple[list[tuple[str, ...]], str]:
    """Return the traces of each step's rows, and all that is said to be wrong."""
    dump = open_dump(root)
    records = [dump.read(entry) for entry in dump.entries]
    said = [*dump.problems, *(each for record in records for each in record.problems)]
    return [each.row_texts["trace_id"] for each in records], "; ".join(x.message for x in said)


FIRST = ("t1x0", "t1x0", "t1x1", "t1x2")
SECOND = ("t2x0", "t2x0", "t2x1", "t2x2")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("stream", ["stream", "annotations/orch", "annotations/trainer"])
@pytest.mark.parametrize("odd", [b"null", b'{"id": "x', b"[1]", b'"\xff"', b"\0\0", b"{}", b""])
def test_a_line_that_cannot_be_read_costs_itself_alone(
    tmp_path: Path, stream: str, odd: bytes, chunked: bool
) -> None:
    root = write(tmp_path, chunked=chunked) / TRACES
    path = root / stream / "00000.jsonl.zst" if chunked else root / f"{stream}.jsonl"
    lines = pa.input_stream(path).read().splitlines(keepends=True)
    lines.insert(1, odd + b"\n")
    path.write_bytes(sealed(b"".join(lines)) if chunked else b"".join(lines))
    steps, said = rows_of_steps(tmp_path)
    assert steps == [FIRST, SECOND]
    is_an_episode = stream == "stream" and odd == b"{}"  # without traces
    assert ("line 2 " in said and path.name in said) == bool(odd and not is_an_episode)


TOKENS = {"token_ids": [1, 2], "mask": [0, 1]}


@pytest.mark.parametrize(
    "nodes",
    [
        "x",
        [1, 2],
        [{"token_ids": "x"}],
        [{"token_ids": [1, None], "mask": [0, 0]}],
        [{"token_ids": [1, 2], "mask": 3}],
        [{"token_ids": [1, 2], "mask": [0, 2], "logprobs": [-1.0]}],
        [{**TOKENS, "logprobs": "x"}],
        [{**TOKENS, "parent": "x"}],
    ],
)
def test_a_trace_of_another_form_is_named_and_the_others_are_read(
    tmp_path: Path, nodes: object
) -> None:
    root = write(tmp_path, chunked=False) / TRACES
    edit(root / "stream.jsonl", 0, lambda episode: episode["traces"][0].update(nodes=nodes))
    steps, said = rows_of_steps(tmp_path)
    assert steps == [FIRST[2:], SECOND]
    assert "trace t1x0 is left out" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"branches": "x"}, "trainer.jsonl: line 3 "),
        ({"branches": [1]}, "trainer.jsonl: line 3 "),
        ({"branches": [{"index": "x", "trainer_logprobs": [-1.0]}]}, "trainer.jsonl: line 3 "),
        ({"branches": [{"index": 0, "trainer_logprobs": {"a": 1}}]}, "trainer.jsonl: line 3 "),
        ({"branches": [{"index": 0, "trainer_logprobs": [-1.0] * 12, "entropies": 3}]},
         "trainer.jsonl: line 3 "),
        ({"branches": [{"index": 0, "trainer_logprobs": [-1.0] * 12, "entropies": [0.1]}]},
         "trace t1x1 is left out: entropies has fewer values"),
        ({"version": None}, "trainer.jsonl: line 3 "),
    ],
)  # fmt: skip
def test_an_update_of_another_form_is_named_and_the_others_are_read(
    tmp_path: Path, change: Line, words: str
) -> None:
    root = write(tmp_path, chunked=False) / TRACES
    edit(root / "annotations/trainer.jsonl", 2, lambda update: update.update(change))
    steps, said = rows_of_steps(tmp_path)
    assert steps == [("t1x0", "t1x0", "t1x2"), SECOND]
    assert words in said


@pytest.mark.parametrize(
    ("rewards", "words"),
    [("x", "a text"), ([1, 2], "a list"), ({"right": {"score": "y"}}, "a text"), ({}, "")],
)
def test_a_reward_that_is_no_number_costs_nothing_else(
    tmp_path: Path, rewards: object, words: str
) -> None:
    root = write(tmp_path, steps=(1,), chunked=False) / TRACES
    edit(root / "stream.jsonl", 0, lambda episode: episode["traces"][1].update(rewards=rewards))
    record = read_first(tmp_path)
    np.testing.assert_array_equal(record.tensors["rewards"][2], [0, 0, np.nan, 1])
    said = all_problems(record)
    assert f"trace t1x1 has no reward: it is {words}" in said if words else not said


@pytest.mark.parametrize(
    ("change", "first", "words"),
    [
        ({"run": "x"}, FIRST, ""),
        ({"run": {"work": "x"}}, FIRST, ""),
        ({"env": "x"}, FIRST, ""),
        ({"traces": "x"}, FIRST[3:], "line 1 has traces that are no objects"),
        ({"traces": [3]}, FIRST[3:], "line 1 has traces that are no objects"),
    ],
)
def test_an_episode_may_have_any_form(
    tmp_path: Path, change: Line, first: tuple[str, ...], words: str
) -> None:
    root = write(tmp_path, chunked=False) / TRACES
    edit(root / "stream.jsonl", 0, lambda episode: episode.update(change))
    steps, said = rows_of_steps(tmp_path)
    assert steps == [first, SECOND]
    assert words in said if words else not said


def test_another_version_and_two_runs_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "one", chunked=False) / TRACES / "annotations/trainer.jsonl"
    write(tmp_path / "two")
    with pytest.raises(InvalidTensor, match="traces of 2 runs"):
        open_dump(tmp_path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(InvalidTensor, match="version 2"):
        open_dump(tmp_path / "one")


def test_an_import_has_the_right_numbers_and_sides_compare(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", shift=0.1)
    with (
        service(tmp_path / "home") as live,
        attach(live.server.url, token=live.tokens.operate) as session,
    ):
        report = import_dump(session, open_dump(one), "prime")
        assert (report["problems"], report["refused"], report["payloads"]) == ([], [], 2)
        answer = live.get("/steps/2/metrics", run="prime")
        rows = [
            row(messages) for number in range(3) for messages in branches(trace(number, step=2))
        ]
        p, q = (np.concatenate([each[name][each["mask"]] for each in rows]) for name in ("p", "q"))
        assert answer["coverage"]["tokens"] == len(p)
        assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
        assert answer["metrics"]["per_round/total_rounds"] == 2
    assert compare([open_dump(one), open_dump(one)]).verdict is Verdict.SAME
    assert compare([open_dump(one), open_dump(two)]).verdict is Verdict.DIFFERENT
    shutil.rmtree(two / TRACES / "stream")
    assert open_dump(two).entries == []
