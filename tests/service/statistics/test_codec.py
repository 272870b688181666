from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from tests.support.batches import batch_of, random_streams

from stagescope_service.statistics import codec, publish, summarise
from stagescope_service.statistics.codec import summary_from_bytes, summary_to_bytes
from stagescope_wire.errors import InvalidInput

STREAMS = random_streams(np.random.default_rng(0), 5, 90)
SUMMARY = summarise(batch_of(*STREAMS, samples=list("edcba")))


def test_bytes_hold_everything() -> None:
    data = summary_to_bytes(SUMMARY)
    again = summary_from_bytes(data)
    assert summary_to_bytes(again) == data
    assert publish(again) == publish(SUMMARY)
    assert again.sequences.samples == tuple("edcba")
    assert len(data) < 40_000


Change = Callable[[dict[str, np.ndarray], dict[str, object]], object]


def tampered(change: Change) -> bytes:
    arrays, document = codec.flatten(SUMMARY)
    change(arrays, document)
    return codec.save("summary", codec.VERSION, arrays, document)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, d: a.pop("worst_where"),
        lambda a, d: a.update(rounds_cells=a["rounds_cells"][:, :-1]),
        lambda a, d: a.update(rounds_keys=a["rounds_keys"][::-1].copy()),
        lambda a, d: a.update(sequence_values=a["sequence_values"].astype(np.float32)),
        lambda a, d: a.update(worst_where=a["worst_where"] + 1000),
        lambda a, d: a.update(sequence_cover=a["sequence_cover"] - 1),
        lambda a, d: a.update(profile_keys=a["profile_keys"][::-1].copy()),
        lambda a, d: a.update(profile_keys=a["profile_keys"] + 1000),
        lambda a, d: a.update(profile_values=a["profile_values"][:-1]),
        lambda a, d: a.update(profile_values=-a["profile_values"]),
        lambda a, d: d.update(samples=["a"]),
        lambda a, d: d.update(sources=[]),
        lambda a, d: d.update(pair=["old"]),
        lambda a, d: d.update(settings={"unknown": 1}),
        lambda a, d: d.pop("unnamed_empty"),
        lambda a, d: d.update(version=99),
        lambda a, d: d.update(cell=4),
        lambda a, d: d.update(kind="whole"),
    ],
)
def test_nothing_that_does_not_fit_is_read(change: Change) -> None:
    with pytest.raises(InvalidInput):
        summary_from_bytes(tampered(change))


def test_bytes_that_decompress_to_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = summary_to_bytes(SUMMARY)
    monkeypatch.setattr(codec, "_MOST_BYTES", len(zlib.decompress(data)) - 1)
    with pytest.raises(InvalidInput, match="more than"):
        summary_from_bytes(data)
    with pytest.raises(InvalidInput, match="more than"):
        codec.rounds_from_bytes(data)


def test_other_bytes_are_refused() -> None:
    data = summary_to_bytes(SUMMARY)
    header = json.dumps({"__metadata__": {"stagescope": "[]"}}).encode()
    for bad in (b"", b"\x80\x04junk", data[: len(data) // 2], data[:-1], data + b"x",
                zlib.decompress(data),
                len(header).to_bytes(8, "little") + header):  # fmt: skip
        with pytest.raises(InvalidInput, match="not a summary"):
            summary_from_bytes(bad)


def test_importing_the_statistics_is_light() -> None:
    code = (
        "import sys, stagescope_service.statistics, stagescope_workers.debug_metrics;"
        "heavy = {'torch', 'ray', 'pandas', 'sqlalchemy', 'fastapi', 'safetensors'};"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
