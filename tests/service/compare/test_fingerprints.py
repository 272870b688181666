from __future__ import annotations

from collections.abc import Mapping

import pytest

from stagescope_service.compare.fingerprints import (
    AttemptFingerprint,
    FingerprintDifference,
    fingerprint_differences,
    not_compared,
)

Json = object
CONFIG: dict[str, Json] = {"algorithm": {"lr": 1e-6, "clip": 0.2}}
FINGERPRINT: dict[str, Json] = {
    "git": {"commit": "abc", "dirty": False},
    "config": CONFIG,
    "packages": {"torch": "2.13.0"},
    "drivers": {"cann": "8.1"},
    "environment": {"HCCL_BUFFSIZE": "120", "RAY_JOB_ID": "01000000"},
    "python": "3.11.2",
    "argv": ["train.py"],
}


def process(rank: int, **layout: Json) -> dict[str, Json]:
    return {"role": "actor", "rank": rank, "world_size": 2, "host": "n1", **layout}


USUAL = AttemptFingerprint(FINGERPRINT, [process(0), process(1)])


def differences(
    b: AttemptFingerprint, a: AttemptFingerprint = USUAL
) -> list[FingerprintDifference]:
    return fingerprint_differences(a, b)


def test_the_same_processes_differ_in_nothing_and_the_newest_of_a_rank_counts() -> None:
    again = [process(0, host="gone"), process(1), process(0)]
    assert differences(AttemptFingerprint(dict(FINGERPRINT), again)) == []


def test_differences_that_decide_numbers_come_first_and_startup_last() -> None:
    other = {
        **FINGERPRINT,
        "git": {"commit": "abc", "dirty": True},
        "config": {"algorithm": {"lr": 2e-6, "clip": 0.2}},
        "packages": {"torch": "2.13.0", "verl": "0.9.1"},
        "environment": {"RAY_JOB_ID": "02000000"},
        "argv": ["train.py", "--resume"],
    }
    found = differences(AttemptFingerprint(other, [process(0), process(1, host="n2")]))
    assert [tuple(each) for each in found] == [
        ("git", "dirty", False, True, "numbers"),
        ("config", "algorithm.lr", 1e-6, 2e-6, "numbers"),
        ("packages", "verl", None, "0.9.1", "numbers"),
        ("environment", "HCCL_BUFFSIZE", "120", None, "numbers"),
        ("place", "actor/1.host", "n1", "n2", "place"),
        ("python", "argv", ["train.py"], ["train.py", "--resume"], "start"),
        ("environment", "RAY_JOB_ID", "01000000", "02000000", "start"),
    ]


def test_a_rank_on_one_side_only_is_listed_by_its_columns() -> None:
    found = differences(AttemptFingerprint(FINGERPRINT, [process(0)]))
    assert [(each.area, each.name, each.a, each.b) for each in found] == [
        ("layout", "actor/1.world_size", 2, None),
        ("place", "actor/1.host", "n1", None),
    ]


def test_a_side_without_a_fingerprint_lacks_everything() -> None:
    found = differences(USUAL._replace(fingerprint=None))
    assert {each.b for each in found} == {None}
    assert ("packages", "torch") in {(each.area, each.name) for each in found}


def test_keep_settings_and_ray_worker_arguments_decide_no_numbers() -> None:
    argv = ["/usr/lib/ray/_private/workers/default_worker.py", "--node-ip-address=10.0.0.1"]
    other = {**FINGERPRINT, "config": {**CONFIG, "keep": {"what": ["is_loss"]}}, "argv": argv}
    keep, driver_argv = differences(USUAL._replace(fingerprint=other))
    assert (keep.area, keep.name, keep.weight) == ("config", "keep.what", "start")
    assert (driver_argv.name, driver_argv.b) == ("argv", None)


def weights(one: Mapping[str, Json], other: Mapping[str, Json]) -> dict[str, str]:
    found = fingerprint_differences(
        AttemptFingerprint(one, [process(0)]), AttemptFingerprint(other, [process(0)])
    )
    return {f"{each.area} {each.name}": each.weight for each in found}


def test_a_value_that_one_side_does_not_know_is_no_change() -> None:
    unknown = {**FINGERPRINT, "git": {"commit": "abc", "dirty": None}, "platform": "Linux"}
    assert weights(unknown, FINGERPRINT) == {
        "git dirty": "unknown", "python platform": "unknown",
    }  # fmt: skip
    bare = {name: FINGERPRINT[name] for name in ("config", "packages", "python")}
    assert set(weights(bare, FINGERPRINT).values()) == {"unknown"}
    # What a list of packages lacks is not installed; what it names without a version is not known.
    one = {**FINGERPRINT, "packages": {"torch": "2.13.0", "verl": None}}
    other = {**FINGERPRINT, "packages": {"verl": "0.9.1"}}
    assert weights(one, other) == {"packages torch": "numbers", "packages verl": "unknown"}
    imported = {"config": {"imported": "/dumps", "kind": "nexrl"}}
    assert set(weights(FINGERPRINT, imported).values()) == {"unknown"}


def test_a_layout_that_one_side_lacks_is_unknown() -> None:
    with_layout = AttemptFingerprint(FINGERPRINT, [process(0, tp_size=2), process(1)])
    (found,) = differences(USUAL, with_layout)
    assert (found.name, found.a, found.b, found.weight) == ("actor/0.tp_size", 2, None, "unknown")


def test_the_drivers_command_line_may_decide_numbers() -> None:
    one, other = ({**FINGERPRINT, "entrypoint": f"train.py lr={lr}"} for lr in ("1e-6", "2e-6"))
    assert weights(one, other) == {"python entrypoint": "numbers"}


@pytest.mark.parametrize(
    ("before", "after", "weight"),
    [
        (["--lr", "1e-5"], ["--lr", "1e-6"], "numbers"),
        (["actor.lr=1e-5"], ["actor.lr=1e-6"], "numbers"),
        (["--log-prob-min", "1"], ["--log-prob-min", "2"], "numbers"),
        (["--rapid-export", "1"], ["--rapid-export", "2"], "numbers"),
        (["--log_dir=/a"], ["--log_dir=/b"], "start"),
        ([], ["--resume", "--checkpoint-dir", "/b"], "start"),
        (["--resume_from=/a/1"], ["--resume_from=/a/2"], "start"),
        (["--pid-file", "/1"], ["--pid-file", "/2", "--lr", "2"], "numbers"),
    ],
)
def test_options_of_the_command_line_may_change_numbers(
    before: list[str], after: list[str], weight: str
) -> None:
    one, other = (
        AttemptFingerprint({"argv": ["train.py", *options]}, []) for options in (before, after)
    )
    (found,) = fingerprint_differences(one, other)
    assert (found.name, found.weight) == ("argv", weight)


def test_an_edited_script_is_a_difference_and_what_is_not_known_is_said() -> None:
    def side(code: dict[str, Json] | None, **others: Json) -> AttemptFingerprint:
        said = {} if code is None else {"code": code}
        return AttemptFingerprint({**FINGERPRINT, **said, **others}, [])

    one = side({"train.py": "aa", "helper": "bb", "lazy": "cc"}, git=None)
    other = side({"train.py": "ab", "helper": "bb"}, git=None)
    assert [tuple(each) for each in differences(other, one)] == [
        ("code", "train.py", "aa", "ab", "numbers")
    ]
    assert not_compared(one, other) == [
        "no side was started in a git repository: only loaded Python files are compared",
        "only side a had loaded lazy when it started",
    ]
    # A version before recorded no hashes.
    assert differences(side(None), side({"train.py": "aa"})) == []
    [text] = not_compared(side({"train.py": "aa"}), side(None))
    assert text.startswith("side b does not have hashes of its script")
    [text] = not_compared(side(None), side(None))
    assert text.startswith("no side has hashes of its script")
    dirty = side({"train.py": "aa"}, git={"commit": "abc", "dirty": True})
    [text] = not_compared(dirty, dirty)
    assert text.startswith("both sides have uncommitted changes")
    assert not_compared(AttemptFingerprint(None, []), AttemptFingerprint(None, []))[-1].startswith(
        "no side has hashes"
    )
