from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.support.command_line import invoke

from stagescope_service import serve
from stagescope_service.commands import serving, tokens
from stagescope_service.settings import Settings
from stagescope_wire.errors import InvalidPlan, StoreError


@pytest.mark.parametrize("command", ["serve", "stop"])
def test_a_wrong_setting_is_named_without_its_value(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))
    monkeypatch.setenv("STAGESCOPE_RING_BYTES", "secret-value")
    result = invoke(command)
    assert result.exit_code == 2
    assert "ring_bytes" in result.stderr.lower()
    assert "secret-value" not in result.output


def test_a_file_of_rules_with_a_host_that_may_not_be_called_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(
        "rules: [{name: r, metric: counts/tokens, when: {'>': 1},"
        " actions: {webhook: 'https://other/SECRET'}}]"
    )
    serve._check_triggers(Settings(home=tmp_path, triggers=file))
    with pytest.raises(InvalidPlan, match="the host other, which is not allowed") as refused:
        serve._check_triggers(Settings(home=tmp_path, triggers=file, webhook_hosts=("a", "b")))
    assert "STAGESCOPE_WEBHOOK_HOSTS: a, b" in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_serve_says_which_version_may_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", {"ray": "2.9.3", "torch": "1.0"}.__getitem__)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.1")
    # A setting that is refused: what follows would start a cluster.
    monkeypatch.setenv("STAGESCOPE_RING_BYTES", "many")
    said = invoke("serve").stderr.splitlines()
    assert [line for line in said if line.startswith("note: ")] == [
        "note: python 3.99.1 was not tried with stagescope: 3.10 to 3.11 were",
        "note: ray 2.9.3 is not supported, 2.44 and later are: pip install 'ray>=2.44'",
    ]


def test_serve_prints_what_ray_init_needs_to_join(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = serve.ServiceInfo(
        url="http://127.0.0.1:8700", token_file=tmp_path / "read.token",
        operate_token_file=tmp_path / "operate.token", address="10.0.0.4:6379",
        cluster="running", already_running=False, home=tmp_path,
    )  # fmt: skip
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    serving._announce(info, Settings(home=tmp_path))
    said = capsys.readouterr().out
    assert "RAY_AUTH_MODE=token RAY_ADDRESS=10.0.0.4:6379 python train.py" in said
    assert 'ray.init("10.0.0.4:6379") needs RAY_AUTH_MODE=token, too' in said
    monkeypatch.delenv("RAY_AUTH_MODE")  # a cluster without a token
    serving._announce(info, Settings(home=tmp_path))
    assert "RAY_AUTH_MODE" not in capsys.readouterr().out


def test_a_misspelt_variable_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))
    for name in ("RING_BYTE", "STUK_SECONDS", "TOKEN_FILE", "VERL", "OF_MY_OWN"):
        monkeypatch.setenv(f"STAGESCOPE_{name}", "off")
    # A setting that is refused: what follows would start a cluster.
    monkeypatch.setenv("STAGESCOPE_RING_BYTES", "many")
    said = invoke("serve").stderr.splitlines()
    assert [line for line in said if "did you mean" in line] == [
        "note: STAGESCOPE_RING_BYTE is not a setting, and ignored: did you mean "
        "STAGESCOPE_RING_BYTES?",
        "note: STAGESCOPE_STUK_SECONDS is not a setting, and ignored: did you mean "
        "STAGESCOPE_STUCK_SECONDS?",
    ]


@pytest.mark.parametrize("text", [None, "rules: [{name: x}]", "\xff"])
def test_rules_that_cannot_be_read_are_refused_at_start(
    text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "rules.yaml"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))
    monkeypatch.setenv("STAGESCOPE_TRIGGERS", str(file))
    result = invoke("serve", "--port", "0")
    assert result.exit_code == 2, result.output
    assert ("rules[0].metric" if text and "x" in text else "rules.yaml") in result.stderr


@pytest.mark.parametrize("as_variables", [True, False])
def test_tokens_that_are_variables_have_no_file_to_read(
    as_variables: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = tmp_path / "read.token", tmp_path / "operate.token"
    started = serve.ServiceInfo(
        "http://127.0.0.1:1", *files, "127.0.0.1:6379", "joined", already_running=False,
        home=tmp_path,
    )  # fmt: skip
    monkeypatch.setattr(serve, "start_service", lambda *args, **kwargs: started)
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))
    for grade in ("READ", "OPERATE"):
        if as_variables:
            monkeypatch.setenv(f"STAGESCOPE_{grade}_TOKEN", f"of-{grade}-0123456789abcdef")
    said = invoke("serve").stdout
    assert "0123456789abcdef" not in said
    if as_variables:
        assert not any(str(file) in said for file in files)
        assert "and STAGESCOPE_TOKEN=$STAGESCOPE_OPERATE_TOKEN" in said
        assert "Bearer $STAGESCOPE_READ_TOKEN" in said
    else:
        assert f"and STAGESCOPE_TOKEN_FILE={files[1]}" in said
        assert f"Bearer $(cat {files[0]})" in said


def test_a_port_that_is_none() -> None:
    result = invoke("serve", "--port", "70000")
    assert result.exit_code == 2
    assert "--port" in result.stderr


def test_tokens_are_added_listed_rotated_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(tokens.token, arguments, catch_exceptions=False)

    def stored() -> str:
        return (tmp_path / "tokens.json").read_text()

    made = run("add", "ada", "--role", "operate", "--per-minute", "60")
    text = made.stdout.strip()
    assert len(text) >= 40
    assert text not in stored()
    person = run("add", "eve", "--role", "admin", "--proxy-user", "eve@x.org", "--json")
    assert json.loads(person.stdout) == {"name": "eve", "token": None}
    listed = json.loads(run("list", "--json").stdout)["tokens"]
    assert [(row["name"], row["per_minute"]) for row in listed] == [("ada", 60), ("eve", None)]
    assert "eve@x.org" in run("list").stdout
    rotated = json.loads(run("rotate", "ada", "--json").stdout)["token"]
    assert rotated != text
    assert run("remove", "ada").stdout == "removed ada\n"
    run("remove", "eve", "--json")
    assert "none but" in run("list").stdout
    for arguments in (("add", "ada"), ("add", "ada", "--role", "root")):
        assert run(*arguments).exit_code == 2


def test_a_data_directory_that_cannot_be_written_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings(home=tmp_path / "home", data_dir=tmp_path / "file" / "data", port=0)
    with pytest.raises(StoreError, match="Not a directory") as caught:
        serve.start_service(settings, address="local")
    assert "--data-dir" in caught.value.advice
    assert not (tmp_path / "home" / "service.json").exists()
