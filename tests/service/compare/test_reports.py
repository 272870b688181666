from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tests.support.command_line import invoke
from tests.support.dump_files import nexrl_directory
from tests.support.memory_dumps import MemoryDump, batch, shifted, single, split

from stagescope.comparison_report import ComparisonReport
from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report import SCHEMA_FILE, as_json
from stagescope_service.compare.report.html import as_html
from stagescope_wire import nonfinite
from stagescope_wire.comparison_texts import as_lines

Report = dict[str, Any]
"""JSON of a report, or the content of a torch file."""
EVIL = "</script><img src=x onerror=alert(1)>"


def report_of(*sides: MemoryDump) -> Report:
    return as_json(compare(sides))


def different() -> Report:
    shares = [list(range(at, at + 4)) for at in range(0, 40, 4)]
    sides = (batch(40), shifted(batch(40), "entropy", 1))
    return report_of(*(split(samples, shares, microbatches=2) for samples in sides))


def non_finite() -> Report:
    values = np.array([math.nan, math.inf, 1.0])
    return report_of(
        dataclasses.replace(single("other", {"x": values}), name=EVIL),
        dataclasses.replace(single("other", {"x": -values}), about={EVIL: EVIL}),
    )


@pytest.mark.parametrize("make", [different, non_finite])
def test_the_report_is_strict_json_of_its_schema(make: Callable[[], Report]) -> None:
    text = nonfinite.dumps(make())
    content = json.loads(text, parse_constant=pytest.fail)
    jsonschema.validate(content, json.loads(SCHEMA_FILE.read_text()))


def test_the_mean_of_a_sample_is_of_its_finite_pairs() -> None:
    samples = batch(8)
    mask = samples[0].mask != 0
    first = np.where(mask, samples[0].values["entropy"] + np.float32(1), 0)
    first[np.argmax(mask)] = math.nan
    one = samples[0].with_values(entropy=first)
    (pair,) = report_of(split(samples), split([one, *samples[1:]]))["pairs"]
    tensors = [tensor for section in pair["sections"] for tensor in section["tensors"]]
    (sample,) = next(t for t in tensors if t["name"] == "entropy")["differing_samples"]
    assert sample["unequal"] == sample["pairs"] == mask.sum() > 1
    assert sample["mean_abs"] == pytest.approx(1.0, rel=1e-6)


def test_the_text_fits_80_columns_and_says_the_verdict_first() -> None:
    lines = [line.text for line in as_lines(different())]
    assert lines[0] == "✗ DIFFERENT"
    assert max(map(len, lines)) <= 80
    order = [
        next(at for at, line in enumerate(lines) if line.startswith(word))
        for word in ("First difference", "Likely causes", "Trajectories", "Forward data")
    ]
    assert order == sorted(order)
    locations = [
        line for line in lines if re.match(r" +✗ rank \d, microbatch \d: max \|d\| 1", line)
    ]
    assert len(locations) == 8
    assert "      ... 2 more (--all)" in lines
    assert any(line.startswith("      over 10: max 1.0") for line in lines)
    complete = [line.text for line in as_lines(different(), everything=True)]
    assert not any("more (--all)" in line for line in complete)
    assert sum("✗ rank" in line for line in complete) == 10


def test_the_client_shows_what_the_service_sent() -> None:
    sent = json.loads(nonfinite.dumps(non_finite()))
    compared = ComparisonReport(sent)
    assert compared.exit_status == 1
    found = compared["pairs"][0]["sections"][0]["tensors"][0]
    assert found["first"]["a"]["value"] == math.inf
    assert "A inf" in repr(compared)
    assert html.escape(EVIL) in compared._repr_html_()


def test_the_texts_of_the_page_are_escaped() -> None:
    page = as_html(non_finite())
    assert EVIL not in page
    assert "<img" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def edited(kind: str, name: str, data: Report) -> None:
    if kind == "forward_data":
        data["entropy"] = data["entropy"] + 0.01


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    nexrl_directory(tmp_path / "a")
    nexrl_directory(tmp_path / "same")
    nexrl_directory(tmp_path / "b", edit=edited)
    nexrl_directory(tmp_path / "remote", mode="remote_api")
    nexrl_directory(tmp_path / "weaver", mode="weaver")
    return tmp_path


def test_exit_statuses(dumps: Path) -> None:
    assert invoke("compare", f"{dumps}/a", f"{dumps}/same").exit_code == 0
    assert invoke("compare", f"{dumps}/a", f"{dumps}/b").exit_code == 1
    stepless = ("compare", f"{dumps}/a", f"{dumps}/b", "--tolerance", "entropy=0.1")
    assert invoke(*stepless).exit_code == 0
    for path in sorted((dumps / "same" / "forward_data").iterdir())[:3]:
        path.unlink()
    missing = invoke("compare", f"{dumps}/a", f"{dumps}/same")
    assert missing.exit_code == 2
    assert "step_000000_rank0_micro0.pt" in missing.stdout
    corrupt = dumps / "b" / "loss" / "step_000000_rank1_micro1.pt"
    corrupt.write_bytes(corrupt.read_bytes()[:300])
    result = invoke("compare", f"{dumps}/a", f"{dumps}/b", "--json")
    findings = json.loads(result.stdout)["pairs"][0]["findings"]
    assert [(f["kind"], f["items"]) for f in findings] == [("damaged", [str(corrupt)])]
    assert invoke("compare", f"{dumps}/a").exit_code == 2
    for word, refused in (("--step", "--step does not apply to"), ("--ray", "--ray is for")):
        more = [word, "5"] if word == "--step" else [word]
        result = invoke("compare", f"{dumps}/a", "run:5", *more)
        assert result.exit_code == 2
        assert refused in result.stderr
    assert invoke("compare", f"{dumps}/a", f"{dumps}/same", "--tolerance", "x").exit_code == 2
    assert invoke("compare", f"{dumps}/a", str(dumps / "none")).exit_code == 2


def test_the_command_writes_json_and_html(dumps: Path) -> None:
    files = ("--html", str(dumps / "r.html"), "--output", str(dumps / "r.json"))
    result = invoke("compare", f"{dumps}/a", f"{dumps}/b", *files)
    assert json.loads((dumps / "r.json").read_text())["pairs"][0]["first"]["name"] == "entropy"
    assert "\x1b" not in result.stdout
    assert (dumps / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads(invoke("compare", "--schema").stdout)["title"] == "stagescope compare"


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_the_exit_status_is_right_if_output_is_not_read(
    dumps: Path, words: tuple[str, ...]
) -> None:
    read, write = os.pipe()
    os.close(read)  # nothing reads the first line
    program = "import sys; from stagescope.cli import main; sys.exit(main())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, "compare", f"{dumps}/a", f"{dumps}/same", *words],
            stdout=write, stderr=subprocess.PIPE, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    finally:
        os.close(write)
    stderr = [line for line in done.stderr.splitlines() if not line.startswith("compiling")]
    assert (done.returncode, stderr) == (0, [])


def test_a_misspelt_path_is_called_none(dumps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGESCOPE_HOME", str(dumps / "home"))
    monkeypatch.delenv("STAGESCOPE_URL", raising=False)
    result = invoke("compare", f"{dumps}/a", "misspelt")
    assert result.exit_code == 2
    content = " ".join(result.stderr.split())
    assert "nothing here has the path 'misspelt'" in content
    assert "no service is known here" in content


def test_compare_dumps_takes_nexrls_flags_and_writes_its_keys(dumps: Path) -> None:
    report = dumps / "report.json"
    result = invoke(
        "compare-dumps", "--self_hosted_dir", f"{dumps}/a", "--remote_api_dir", f"{dumps}/remote",
        "--weaver_dir", f"{dumps}/weaver", "--step", "0", "--num_ranks", "8", "--num_micros", "2",
        "--output", str(report), "--html", str(dumps / "report.html"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    remark = "8 ranks asked for, 2 found: all of them were compared"
    assert remark in " ".join(result.stdout.split())
    assert remark in (dumps / "report.html").read_text()
    content = json.loads(report.read_text())
    jsonschema.validate(content, json.loads(SCHEMA_FILE.read_text()))
    assert (content["step"], content["num_ranks"], content["num_micros"]) == (0, 2, 2)
    assert content["remarks"] == [remark]
    sections = {section["section"]: section for section in content["sections"]}
    trajectories = sections["trajectories"]
    rows = trajectories["trajectory_comparisons"]
    counts = [trajectories[f"{side}_num_trajectories"] for side in ("sh", "ra")]
    assert (trajectories["status"], *counts, len(rows)) == ("compared", 16, 16, 16)
    assert rows[0]["tokens_match"] is rows[0]["loss_mask_match"] is True
    assert rows[0]["sh_reward"] == rows[0]["ra_reward"]
    assert rows[0]["sh_tokens_len"] == rows[0]["ra_tokens_len"] > 0
    forward = sections["forward_data_all"]["comparisons"]
    assert {(each["rank"], each["micro"]) for each in forward} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    tensors = {each["name"]: each for each in forward[0]["comparisons"]}
    assert {"log_probs", "entropy", "response_mask"} <= tensors.keys()
    assert (tensors["entropy"]["is_close"], tensors["entropy"]["t1_shape"]) == (True, [4, 16])
    losses = sections["loss_data_all"]["comparisons"][0]["comparisons"]
    assert {each["name"] for each in losses} >= {"loss", "pg_loss", "entropy_loss"}
    assert all(each["diff"] == 0 for each in losses if each["status"] == "compared")
    intermediates = sections["is_loss_debug_all"]["comparisons"][0]["comparisons"]
    by_name = {each["name"]: each["status"] for each in intermediates}
    assert (by_name["log_probs"], by_name["advantages"]) == ("compared", "not_compared")
    datums = sections["datums_analysis"]
    assert (datums["status"], datums["num_datums"]) == ("analyzed", 16)
    assert datums["first_datum_keys"] == ["input_tokens", "loss_fn_inputs"]
    keys = {"target_tokens", "logprobs", "advantages", "loss_mask"}
    assert set(datums["loss_fn_inputs_keys"]) == keys
    assert datums["input_tokens_len"] > 1


def test_compare_dumps_counts_trajectories_that_one_side_lacks(dumps: Path) -> None:
    def shortened(kind: str, name: str, data: Report) -> None:
        if kind == "prepared_trajectories":
            data |= {each: data[each][1:] for each in ("trajectories", "advantages")}

    other = nexrl_directory(dumps / "short", mode="remote_api", edit=shortened)
    report = dumps / "report.json"
    invoke("compare-dumps", "--self_hosted_dir", f"{dumps}/a", "--remote_api_dir", str(other),
           "--output", str(report))  # fmt: skip
    found = json.loads(report.read_text())["sections"][0]
    assert (found["status"], found["sh_num_trajectories"]) == ("count_mismatch", 16)
    assert found["ra_num_trajectories"] == 15


def spoiled(kind: str, name: str, data: Report) -> None:
    if kind == "forward_data" and name.endswith("rank0_micro0"):
        data["log_probs"] = data["log_probs"] + 0.5 * (data["response_mask"] == 0)
        data["entropy"] = data["entropy"].clone()
        data["entropy"][0, 0] = math.nan
    if kind == "forward_data" and name.endswith("rank1_micro1"):
        for other in ("log_probs", "entropy", "response_mask"):
            data[other] = torch.nn.functional.pad(data[other], (0, 9))


def test_under_nexrls_keys_stand_nexrls_definitions(tmp_path: Path) -> None:
    a = nexrl_directory(tmp_path / "a")
    b = nexrl_directory(tmp_path / "b", mode="weaver", edit=spoiled)
    report = tmp_path / "report.json"
    invoke("compare-dumps", "--self_hosted_dir", str(a), "--weaver_dir", str(b),
           "--output", str(report))  # fmt: skip
    sections = {each["section"]: each for each in json.loads(report.read_text())["sections"]}
    found = {
        (each["rank"], each["micro"]): {one["name"]: one for one in each["comparisons"]}
        for each in sections["forward_data_all"]["comparisons"]
    }
    sides = [
        torch.load(side / "forward_data" / "step_000000_rank0_micro0.pt", weights_only=True)
        for side in (a, b)
    ]
    one, other = (side["log_probs"].double() for side in sides)
    content = found[0, 0]["log_probs"]
    # What is under the mask is equal; its script looks at padding and at other rounds, too.
    assert (content["is_close"], content["verdict"]) == (False, "same")
    for prefix, values in (("t1", one), ("t2", other)):
        for name in ("mean", "std", "min", "max"):
            assert content[f"{prefix}_{name}"] == pytest.approx(float(getattr(values, name)()))
    assert content["max_diff"] == pytest.approx(float((one - other).abs().max()))
    assert content["mean_diff"] == pytest.approx(float((one - other).abs().mean()))
    both = torch.stack([one.flatten(), other.flatten()])
    assert content["correlation"] == pytest.approx(float(torch.corrcoef(both)[0, 1]))
    content = found[0, 0]["entropy"]
    assert (content["is_close"], content["t2_mean"], content["max_diff"]) == (False, "nan", "nan")
    assert content["t1_mean"] == pytest.approx(float(sides[0]["entropy"].double().mean()))
    content = found[1, 1]["log_probs"]
    assert (content["status"], content["verdict"]) == ("shape_mismatch", "same")
    assert (content["t1_shape"], content["t2_shape"]) == ([4, 16], [4, 25])


def test_a_short_text_leaves_out_findings_and_says_how_many() -> None:
    report = different()
    finding = {"kind": "remark", "side": 0, "items": ["x", "y"], "verdict": "same"}
    report["pairs"][0]["findings"] = [{**finding, "message": f"remark {n}"} for n in range(9)]
    short = [line.text for line in as_lines(report, width=80, full=False)]
    assert sum("remark" in line for line in short) == 5
    assert "  ... 4 more (--full)" in short
    assert "      x" not in short
    full = [line.text for line in as_lines(report, width=80)]
    assert sum("remark" in line for line in full) == 9
    assert "      x" in full
