"""Bundles: what is in one, what is not, how it is opened, and hostile ones."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.api import Rank, Service, service
from tests.support.browser import chromium
from tests.support.command_line import invoke
from tests.support.measure import payload
from tests.support.page import Visit
from tests.support.runs.shown import BROKEN, RUN, keep_tensors, shown
from tests.support.stores import eventually
from tokenizers import Tokenizer, models

import stagescope
from stagescope_service.http.opened_bundle import OpenedBundle, open_unpacked
from stagescope_service.redaction import Redactor
from stagescope_service.report.bundle import contents
from stagescope_service.report.bundle.archive import unpack
from stagescope_service.store import copying
from stagescope_service.store.contract import Put
from stagescope_service.store.tables import metadata
from stagescope_wire.errors import Forbidden, InvalidInput, StagescopeError, TooLarge

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STEPS = 34
ENVIRONMENT = {
    "HF_TOKEN": "hf_PlantedPlantedPlanted1",
    "NCCL_DEBUG": "INFO",
    "CUDA_HOME": "https://user:planted-password@mirror/cuda",
}
SECRETS = {
    "environment": "hf_PlantedPlantedPlanted1",
    "url": "planted-password",
    "setting": "planted-api-key-value",
    "argument": "planted-argument-value",
    "message": "sk-plantedplantedplanted1",
    "stack": "planted-bearer-token-1",
    "log": "AKIAPLANTEDPLANTED12",
    "sample": "ghp_plantedplantedplantedplanted",
    "error": "planted-error-secret",
}


def tokenizer_file(directory: Path) -> Path:
    """A tokenizer of ten words."""
    words = Tokenizer(models.WordLevel({f"word{at} ": at for at in range(10)}, unk_token="word0 "))
    directory.mkdir()
    words.save(str(directory / "tokenizer.json"))
    return directory


def plant(running: Service) -> None:
    """A run `r` with secrets wherever a training may put them, and logs beside it."""
    logs = running.settings.data_path / "plog"
    logs.mkdir(parents=True)
    (logs / "plog-1.log").write_text(f"[ERROR] HCCL failed, id {SECRETS['log']}\n")
    (logs / "outside").symlink_to("/etc/hostname")
    (running.settings.data_path / "fr_rank_0").write_bytes(b"\x80\x04\0binary")
    fingerprint = {
        "git": {"commit": "abc", "dirty": False},
        "argv": ["train.py", "--api-key", SECRETS["argument"], "--lr=1e-6"],
        "environment": {
            **ENVIRONMENT, "ASCEND_PROCESS_LOG_PATH": str(logs),
            "TORCH_FR_DUMP_TEMP_FILE": str(running.settings.data_path / "fr_rank_"),
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/etc/pass",
        },
    }  # fmt: skip
    settings = {
        "wandb_api_key": SECRETS["setting"], "eos_token": "<|im_end|>", "max_tokens": 512,
        "tokenizer": str(tokenizer_file(running.settings.data_path / "model")),
    }  # fmt: skip
    rank = Rank(running, world_size=1, fingerprint=fingerprint, settings=settings)
    handed = payload()
    handed["strings"]["sample_ids"] = [f"s{row}" for row in range(4)]
    shape = handed["tensors"]["response_mask"][1]
    ids = np.arange(int(np.prod(shape))).reshape(shape) % 10
    handed["tensors"]["responses"] = ("int64", shape, ids, None)
    handed["meta"]["note"] = f"token={SECRETS['sample']}"
    rank.stage("actor_compute_log_prob", 1, handed, scalars={"loss": 1.0})
    rank.begin("actor_update", 1)
    rank.end("actor_update", 1, status="failed", error_type="E",
             error_message=f"GET http://x?token={SECRETS['error']}")  # fmt: skip
    rank.begin("actor_update", 2)
    finding = {
        "finding_id": "f1", "run": "r", "attempt_id": 1, "step": 1, "severity": "error",
        "kind": "crash", "message": f"key {SECRETS['message']} was refused", "advice": "",
        "count": 1, "first_wall": 1.0, "last_wall": 2.0, "evidence": {"password": "x" * 9},
    }  # fmt: skip
    stack = {
        "incarnation": "r-a1-actor-0", "request_id": "q", "attempt_id": 1, "step": 1,
        "role": "actor", "rank": 0, "state": "answered", "wall": 1.0,
        "threads": [{"name": "MainThread", "ident": 1, "is_training": True,
                     "stack": f"headers = 'Bearer {SECRETS['stack']}'"}],
    }  # fmt: skip
    running.store.submit([Put("findings", finding), Put("stacks", stack)]).result(30)
    Rank(running, run="other", world_size=1).stage("actor_update", 7, scalars={"private": 2.0})


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as running:
        keep_tensors(running)
        plant(running)
        yield running


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as running:
        keep_tensors(running)
        shown(running, STEPS, rows=2, tokens=24)
        yield running


@pytest.fixture(scope="module")
def bundled(live: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(live, tmp_path_factory.mktemp("bundle") / "step.tar.gz", RUN, BROKEN)


def saved(running: Service, path: Path, run: str, step: int, **query: Any) -> Path:
    response = running.read.get(f"/runs/{run}/bundle", params={"step": step, **query}, timeout=120)
    assert response.status_code == 200, response.text
    path.write_bytes(response.content)
    return path


def manifest_of(path: Path) -> dict[str, Any]:
    with tarfile.open(path) as tar:
        file = tar.extractfile("stagescope-bundle/manifest.json")
        assert file is not None
        found: dict[str, object] = json.load(file)
        return found


# --- what is in it --------------------------------------------------------------------------
def test_the_manifest_lists_every_file_with_its_checksum(bundled: Path) -> None:
    manifest = manifest_of(bundled)
    assert (manifest["run"], manifest["attempt"], manifest["step"]) == (RUN, 2, BROKEN)
    listed = {each["path"]: each for each in manifest["files"]}
    with tarfile.open(bundled) as tar:
        members = {each.name.partition("/")[2]: each for each in tar.getmembers()}
        assert set(members) == {*listed, "manifest.json"}
        for name, each in listed.items():
            file = tar.extractfile(members[name])
            assert file is not None
            assert hashlib.sha256(file.read()).hexdigest() == each["sha256"]
            assert members[name].size == each["bytes"]
    kinds = {name.partition("/")[0] for name in listed}
    assert kinds == {
        "data", "findings.json", "fingerprint.json", "stacks.txt", "report-run.html",
        "report-run.md", "report-step.html", "report-step.md",
    }  # fmt: skip
    # The tensors of the step's 8 ranks in two stages.
    assert sum(name.startswith("data/payloads/") for name in listed) == 16
    assert {"what": "stacks", "reason": manifest["left_out"][-1]["reason"]} in manifest["left_out"]


def test_the_command_takes_a_word_for_the_step(live: Service, tmp_path: Path) -> None:
    environment = live.environment()
    path = tmp_path / "step.tar.gz"
    done = invoke("bundle", RUN, "measured", "-o", str(path), env=environment)
    assert done.exit_code == 0, done.output
    series = live.get("/series", run=RUN, metric="counts/tokens")
    values = series["series"][0]["values"]
    measured = [step for step, value in zip(series["steps"], values, strict=True) if value]
    assert manifest_of(path)["step"] == measured[-1]


def test_an_opened_bundle_answers_as_the_service_did(
    live: Service, bundled: Path, tmp_path: Path
) -> None:
    unpack(bundled, tmp_path)
    opened = open_unpacked(tmp_path, "the bundle")
    with contextlib.closing(opened.catalogue), serving(opened) as get:
        step = f"/steps/{BROKEN}"
        for path in (
            f"{step}/metrics", f"{step}/rounds", f"{step}/ranks", f"{step}/tokens",
            f"{step}/samples", f"{step}/loss", f"{step}/scalars", "/losses", "/findings",
            f"/runs/{RUN}/attempts", "/series?metric=reward", "/figures/overview",
            f"/figures/density?step={BROKEN}", f"{step}/samples/g33-0-0%2F1",
        ):  # fmt: skip
            given, found = live.read.get(path, params=None).json(), get(path)
            for answer in (given, found):
                answer.pop("also_live", None)
            assert found == given, path


@contextlib.contextmanager
def serving(opened: OpenedBundle) -> Iterator[Any]:
    """Serve an opened bundle; yields a function of a path."""
    import httpx

    from stagescope_service.http.app import make_app
    from stagescope_service.http.server import ApiServer

    app = make_app(
        catalogue=opened.catalogue, commands=opened.commands, settings=opened.settings,
        tokens=opened.tokens,
    )  # fmt: skip
    server = ApiServer(app, port=0)
    server.start()
    headers = {"authorization": f"Bearer {opened.tokens.operate}"}
    try:
        with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as client:
            yield lambda path: client.get(path).json()
    finally:
        server.stop()


def test_it_holds_rows_of_its_run_alone(planted: Service, tmp_path: Path) -> None:
    unpack(saved(planted, tmp_path / "b.tar.gz", "r", 1), tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / contents.CATALOGUE)) as found:
        assert found.execute("SELECT run FROM runs").fetchall() == [("r",)]
        assert found.execute("SELECT DISTINCT attempt_id FROM works").fetchall() == [(1,)]
        texts = {text for (text,) in found.execute("SELECT text FROM texts")}
        tables = {name for (name,) in found.execute("SELECT name FROM sqlite_master")}
    assert "loss" in texts
    assert "private" not in texts
    content = (tmp_path / contents.CATALOGUE).read_bytes()
    assert b"private" not in content
    assert b"other-a1-actor-0" not in content
    assert set(metadata.tables) <= tables


def test_it_has_the_tokenizer_that_its_tensors_need(planted: Service, tmp_path: Path) -> None:
    path = saved(planted, tmp_path / "bundle.tar.gz", "r", 1)
    root = tmp_path / "elsewhere"
    root.mkdir()
    unpack(path, root)
    sample = "/steps/1/samples/s0"
    expected = planted.get(sample)["texts"]
    assert expected[:2] == ["word0 ", "word1 "]
    opened = open_unpacked(root, "the bundle x.tar.gz")
    with contextlib.closing(opened.catalogue), serving(opened) as get:
        found = get(sample)
        assert (found["texts"], found["texts_reason"]) == (expected, None)
        assert get("/whoami")["bundle"] == "the bundle x.tar.gz"
    assert str(planted.settings.data_path / "model") not in (root / "tokenizer.json").read_text()


def test_every_table_is_taken_or_left_out_with_a_reason() -> None:
    conditions = copying._conditions("r", 1, 1, all_steps=True)
    assert {*conditions, *copying.LEFT_OUT} == set(metadata.tables)


def test_of_a_huge_run_the_step_alone_has_its_rows(
    live: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "MAX_WORKS", 10)
    monkeypatch.setattr(copying, "MAX_BLOB_BYTES", 10)
    monkeypatch.setattr(copying, "NEAR", 2)
    path = saved(live, tmp_path / "b.tar.gz", RUN, BROKEN)
    left_out = {each["what"]: each["reason"] for each in manifest_of(path)["left_out"]}
    assert any("other steps than 33" in what for what in left_out)
    assert any("more than 2 before or after" in what for what in left_out)
    unpack(path, tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / contents.CATALOGUE)) as found:
        steps = found.execute("SELECT DISTINCT step FROM works WHERE step IS NOT NULL").fetchall()
        query = "SELECT step FROM steps WHERE step_summary IS NOT NULL ORDER BY step"
        assert steps == [(BROKEN,)]
        assert [step for (step,) in found.execute(query)] == [31, 32, 33, 34]
        assert found.execute("SELECT count(*) FROM steps").fetchone()[0] > 30


def test_what_does_not_fit_is_named(live: Service, tmp_path: Path) -> None:
    path = saved(live, tmp_path / "b.tar.gz", RUN, BROKEN, tensors="false")
    manifest = manifest_of(path)
    assert not [each for each in manifest["files"] if "payloads" in each["path"]]
    assert {"what": "the tensors of the step", "reason": "they were not asked for"} in (
        manifest["left_out"]
    )
    deps, target = live.app.state.deps, live.app.state.deps.finder.step(RUN, 2, BROKEN)
    (tmp_path / "small").mkdir()
    made = contents.collect(
        deps, target, tmp_path / "small", limit=30_000, tensors=True, secrets=()
    )
    assert made.bytes <= 30_000
    assert any("do not fit into 30000" in each.reason for each in made.left_out)
    assert sum("tensors of" in each.what for each in made.left_out) > 8


# --- secrets --------------------------------------------------------------------------------
def test_no_secret_leaves(planted: Service, tmp_path: Path) -> None:
    path = saved(planted, tmp_path / "b.tar.gz", "r", 1)
    everything = gzip.decompress(path.read_bytes())
    for where, secret in {**SECRETS, "own": planted.tokens.operate}.items():
        assert secret.encode() not in everything, where
    assert b"xxxxxxxxx" not in everything  # evidence: {"password": ...}
    assert b"[redacted 1]" in everything
    manifest = manifest_of(path)
    assert manifest["redacted"] >= len(SECRETS) - 1
    # What is no secret stays: it is what somebody must look at.
    for text in (b"INFO", b"<|im_end|>", b"max_tokens", b"HCCL failed", b"--lr=1e-6", b"abc"):
        assert text in everything, text
    # The service itself still has all of it.
    assert SECRETS["setting"] in json.dumps(planted.get("/runs")["rows"])


def test_logs_are_taken_from_allowed_roots_alone(planted: Service, tmp_path: Path) -> None:
    manifest = manifest_of(saved(planted, tmp_path / "b.tar.gz", "r", 1))
    names = {each["path"]: each["what"] for each in manifest["files"]}
    assert names["logs/plog-1.log"] == "plog of Ascend"
    assert names["logs/fr_rank_0"] == "flight recorder"
    assert not [name for name in names if "outside" in name or "passwd" in name]
    left_out = " ".join(f"{each['what']} {each['reason']}" for each in manifest["left_out"])
    assert "/etc/pass" in left_out
    assert "outside the directories" in left_out


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("https://me:geheim@host/x", "https://[redacted 1]@host/x"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer [redacted 1]"),
        ('api_key="abcdef123"', 'api_key="[redacted 1]"'),
        ("--hf-token abcdefg", "--hf-token [redacted 1]"),
        ("token=151643", "token=151643"),  # a token of a vocabulary
        ("masked_tokens: 1024000", "masked_tokens: 1024000"),
        ("eos_token=<|im_end|>", "eos_token=<|im_end|>"),
        ("known-secret-1 twice known-secret-1", "[redacted 1] twice [redacted 1]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n", "[redacted 1]"),
        ("step 5, rank 3, k3_kl 0.5", "step 5, rank 3, k3_kl 0.5"),
    ],
)
def test_texts_are_redacted(given: str, found: str) -> None:
    assert Redactor(["known-secret-1", "short"]).text(given) == found


def test_json_is_redacted_by_the_names_of_its_fields() -> None:
    redactor = Redactor()
    given = {
        "password": "abc", "tokens": ["int64", [2, 3]], "tokens_hash": "f00", "token": 7,
        "deep": [{"AWS_SECRET_ACCESS_KEY": "k"}], "argv": ["--password", "hunter2", "--lr", "1"],
        "text": '{"api_key":"q"}',
    }  # fmt: skip
    assert redactor.value(given) == {
        "password": "[redacted 1]", "tokens": ["int64", [2, 3]], "tokens_hash": "f00", "token": 7,
        "deep": [{"AWS_SECRET_ACCESS_KEY": "[redacted 2]"}],
        "argv": ["--password", "[redacted 3]", "--lr", "1"],
        "text": '{"api_key":"[redacted 4]"}',
    }  # fmt: skip
    assert redactor.count == 4


Change = Callable[[tarfile.TarInfo, bytes], Iterator[tuple[tarfile.TarInfo, bytes]]]


# --- hostile archives -----------------------------------------------------------------------
def repacked(bundled: Path, path: Path, change: Change) -> Path:
    """The archive after `change(name, TarInfo, bytes)`, which returns what to add."""
    with (
        tarfile.open(bundled) as old,
        tarfile.open(path, "w:gz", compresslevel=1, format=tarfile.USTAR_FORMAT) as new,
    ):
        for member in old.getmembers():
            file = old.extractfile(member)
            assert file is not None
            for info, data in change(member, file.read()):
                info.size = len(data) if info.isreg() else 0
                new.addfile(info, io.BytesIO(data))
    return path


def added(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Change:
    """A change that puts a member before the second one."""

    def change(member: tarfile.TarInfo, data: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        yield member, data
        if member.name.endswith("manifest.json"):
            extra = tarfile.TarInfo(name)
            extra.type, extra.linkname = kind, link
            yield extra, b"x"

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (added("stagescope-bundle/../../evil"), "is called"),
        (added("/etc/evil"), "is called"),
        (added("stagescope-bundle/data/../../evil"), "is called"),
        (added("stagescope-bundle/a\\b"), "is called"),
        (added("stagescope-bundle/new.txt"), "not in its manifest"),
        (added("stagescope-bundle/data/catalogue.db", tarfile.SYMTYPE, "/etc/passwd"), "no plain"),
        (added("stagescope-bundle/data/catalogue.db", tarfile.LNKTYPE, "/etc/passwd"), "no plain"),
        (added("stagescope-bundle/x", tarfile.CHRTYPE), "no plain"),
        (added("stagescope-bundle/x", tarfile.DIRTYPE), "no plain"),
        (added("stagescope-bundle/x", tarfile.XHDTYPE), "no plain"),
        (added("stagescope-bundle/manifest.json"), "not in its manifest"),
    ],
)
def test_what_no_bundle_holds_is_refused(
    bundled: Path, tmp_path: Path, change: Change, message: str
) -> None:
    path = repacked(bundled, tmp_path / "evil.tar.gz", change)
    root = tmp_path / "inner" / "root"
    root.mkdir(parents=True)
    with pytest.raises(InvalidInput, match=message):
        unpack(path, root)
    assert not list(tmp_path.rglob("evil"))
    assert not [each for each in root.rglob("*") if each.is_symlink()]


def test_changed_bytes_are_noticed(bundled: Path, tmp_path: Path) -> None:
    def change(member: tarfile.TarInfo, data: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        is_report = member.name.endswith("report-run.md")
        yield member, data.replace(b"stagescope", b"stagescoqe") if is_report else data

    path = repacked(bundled, tmp_path / "changed.tar.gz", change)
    with pytest.raises(InvalidInput, match=r"report-run.md is damaged"):
        unpack(path, fresh(tmp_path))


def test_missing_files_are_noticed(bundled: Path, tmp_path: Path) -> None:
    def change(member: tarfile.TarInfo, data: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        if not member.name.endswith("stacks.txt"):
            yield member, data

    path = repacked(bundled, tmp_path / "less.tar.gz", change)
    with pytest.raises(InvalidInput, match=r"stacks.txt and 0 more files are missing"):
        unpack(path, fresh(tmp_path))


def fresh(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"files": [{"path": "data/catalogue.db", "bytes": 1 << 50, "sha256": "", "what": ""}]},
         TooLarge, "unpacks to"),
        ({"files": [{"path": "../x", "bytes": 1, "sha256": "", "what": ""}]}, InvalidInput,
         "is called"),
        ({"files": []}, InvalidInput, "no catalogue"),
        ({"schema": 99}, InvalidInput, "format 99"),
        ({"files": 7}, InvalidInput, "manifest cannot be read"),
    ],
)  # fmt: skip
def test_a_hostile_manifest_is_refused(
    bundled: Path, tmp_path: Path, fields: Any, kind: type[StagescopeError], message: str
) -> None:
    def change(member: tarfile.TarInfo, data: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        is_manifest = member.name.endswith("manifest.json")
        yield member, json.dumps({**json.loads(data), **fields}).encode() if is_manifest else data

    path = repacked(bundled, tmp_path / "evil.tar.gz", change)
    with pytest.raises(kind, match=message):
        unpack(path, fresh(tmp_path))


def test_a_bomb_takes_no_room(bundled: Path, tmp_path: Path) -> None:
    """Zeros that shrink a thousandfold, behind a size that the manifest does not have."""

    def change(member: tarfile.TarInfo, data: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        yield member, data + bytes(200 << 20) if member.name.endswith("stacks.txt") else data

    path = repacked(bundled, tmp_path / "bomb.tar.gz", change)
    root = fresh(tmp_path)
    with pytest.raises(InvalidInput, match=r"stacks.txt has 2097\d+ bytes"):
        unpack(path, root)
    assert sum(each.stat().st_size for each in root.rglob("*") if each.is_file()) < 50 << 20


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", gzip.compress(b"no tar" * 200)],
    ids=["empty", "text", "no tar"],  # the third has the time in it
)
def test_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(content)
    with pytest.raises(InvalidInput):
        unpack(path, fresh(tmp_path))


def test_a_truncated_archive_is_refused(bundled: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(bundled.read_bytes()[:-100_000])
    with pytest.raises(InvalidInput, match=r"cannot be unpacked|missing|too early"):
        unpack(path, fresh(tmp_path))


def test_a_catalogue_with_code_of_its_own_is_refused(bundled: Path, tmp_path: Path) -> None:
    root = fresh(tmp_path)
    unpack(bundled, root)
    with contextlib.closing(sqlite3.connect(root / contents.CATALOGUE)) as found:
        found.execute("CREATE TRIGGER t AFTER UPDATE ON runs BEGIN DELETE FROM steps; END")
    with pytest.raises(InvalidInput, match="not one of this version"):
        open_unpacked(root, "the bundle")


def test_paths_in_a_hostile_catalogue_lead_nowhere(bundled: Path, tmp_path: Path) -> None:
    root = fresh(tmp_path)
    unpack(bundled, root)
    with contextlib.closing(sqlite3.connect(root / contents.CATALOGUE)) as found:
        found.execute("UPDATE artifact_rows SET path = 'bundle:../../../../../etc/hostname'")
        found.commit()
    opened = open_unpacked(root, "the bundle")
    with contextlib.closing(opened.catalogue), serving(opened) as get:
        answer = get(f"/steps/{BROKEN}/loss")
    assert answer["code"] == "not_found"
    assert "no tensors of step 33" in answer["wrong"]


# --- attach ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The command is an entry point of the package, also where that is not installed anew."""
    root = tmp_path_factory.mktemp("points")
    info = root / "stagescope_attach-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stagescope-attach\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[stagescope.commands]\nattach = stagescope_service.commands.serving:attach\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(root)])}


@contextlib.contextmanager
def attached(path: Path, environment: dict[str, str]) -> Iterator[tuple[Any, list[str]]]:
    """Run `stagescope attach`; yields the process and the lines that it printed."""
    program = "from stagescope.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "attach", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("Ctrl-C"):
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            lines.append(line.strip())
        yield process, lines
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_command_serves_it_until_ctrl_c(
    bundled: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    environment = {**environment, "TMPDIR": str(tmp_path)}
    with attached(bundled, environment) as (process, lines):
        assert f"run {RUN}, attempt 2, step 33" in lines[0]
        url, token = (line.split()[1] for line in lines[1:3])
        assert url.startswith("http://127.0.0.1:")
        # The notebook's token may order, so that it is told why nothing can be.
        (operate,) = re.findall(r'token="(\S+)"', lines[3])
        assert lines[3].endswith(f'stagescope.attach("{url}", token="{operate}")')
        assert lines[4].split()[-1] == f"{url}/#/runs/{RUN}/steps/{BROKEN}?attempt=2"
        with stagescope.attach(url, token=operate) as session:
            assert session.step(BROKEN).metrics()["per_round/total_rounds"] == 4
            assert "read only" in " ".join(session.status().lines(width=1000))
            with pytest.raises(Forbidden, match=r"the bundle step.tar.gz, which is read only"):
                session.pin(BROKEN)
            with pytest.raises(Forbidden, match="read only"):
                session.capture(stages=["actor_update"], steps={"next": 1})
        with chromium() as browser:
            look_at_the_page(browser, url, token)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert list(tmp_path.iterdir()) == []


def look_at_the_page(browser: Browser, url: str, token: str) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        visit = Visit(context.new_page(), url)
        visit.page.on("pageerror", lambda error: visit.messages.append(str(error)))
        visit.page.on("console", lambda message: visit.messages.append(message.text))
        visit.page.goto(url)
        visit.page.wait_for_selector("#login")
        shown = visit.page.inner_text("main")
        assert "the bundle step.tar.gz, a read-only archive" in shown
        assert "stagescope attach" in shown  # which printed the token
        assert "read.token" not in shown
        visit.log_in(token)
        visit.settle()  # it opens on what the bundle is of
        assert visit.page.url.endswith(f"#/runs/{RUN}/steps/{BROKEN}?attempt=2")
        visit.go(f"#/runs/{RUN}/steps/{BROKEN}")
        assert "suspect" in visit.page.inner_text("main")
        header = visit.page.inner_text("#session")
        assert "read-only archive: the bundle step.tar.gz" in header
        assert "live" not in header
        assert "operate" not in header
        for address in ("", f"/runs/{RUN}", f"/runs/{RUN}/captures", f"/runs/{RUN}/triggers",
                        f"/runs/{RUN}/captures/new", f"/runs/{RUN}/hangs"):  # fmt: skip
            visit.go(f"#{address}")
            offered = visit.page.inner_text("main")
            assert not re.search("Arm a|Withdraw|Try the rules|Take stacks|operate.token", offered)
            assert not visit.page.is_visible("form.form")
        assert visit.messages == []
    finally:
        context.close()


def test_python_opens_it_too(
    bundled: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = threading.active_count()
    with stagescope.attach(str(bundled)) as session:
        assert [row["run"] for row in session.runs()] == [RUN]
        assert len(session.step(BROKEN).batch().parts) == 16
    eventually(lambda: list(tmp_path.iterdir()) == [])
    eventually(lambda: threading.active_count() <= before)


def test_python_says_why_it_cannot(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    path = tmp_path / "x.tar.gz"
    with pytest.raises(InvalidInput, match="there is no file"):
        stagescope.attach(path)
    path.write_bytes(b"no archive")
    with pytest.raises(InvalidInput, match=r"cannot be opened: .*cannot be unpacked"):
        stagescope.attach(path)


def test_hostile_names_of_the_training_stay_inside(planted: Service, tmp_path: Path) -> None:
    """Roles, stages and files may be called anything that is printable."""
    dumps = planted.settings.data_path / "evil" / ("x" * 200)
    dumps.mkdir(parents=True)
    (dumps / "dump.json").write_text('{"data": {}}')
    logs = planted.settings.data_path / "logs2"
    logs.mkdir()
    for name in ("..", "a b\n.log", "y" * 240 + ".log", "y" * 230 + "zzzz.log"):
        if name != "..":
            (logs / name).write_text("text")
    evil = "../../../evil"
    rank = Rank(planted, run="evil", role=evil, world_size=1,
                fingerprint={"environment": {"ASCEND_PROCESS_LOG_PATH": str(logs)}})  # fmt: skip
    rank.stage(evil, 1, payload(), scalars={"loss": 1.0})
    rank.say("dump", stage=evil, step=1, capture_id="c", state="complete", path=str(dumps.parent))
    path = saved(planted, tmp_path / "b.tar.gz", "evil", 1)
    root = fresh(tmp_path)
    manifest = unpack(path, root)
    names = [file.path for file in manifest.files]
    assert sum(name.startswith("dumps/") for name in names) == 1
    assert sum(name.startswith("logs/") for name in names) == 3
    assert sum("payloads" in name for name in names) == 1
    open_unpacked(root, "the bundle").catalogue.close()


def test_names_of_members_are_checked() -> None:
    for name in ("a/b.json", "data/payloads/00000-x-actor0.safetensors", "..a", "a..b/c"):
        contents.check_name(name)
    for name in (
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/../b",
        "./a",
        "a/..",
        "a b",
        "ä",
        "a\0",
        "x" * 81,
    ):
        with pytest.raises(InvalidInput):
            contents.check_name(name)
