from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from tests.support.answering import Answering, unused_port

import stagescope
from stagescope_wire import discovery
from stagescope_wire.errors import InvalidInput, Unauthorized, Unreachable


def write_service_file(url: str, **extra: object) -> Path:
    home = Path(os.environ["STAGESCOPE_HOME"])
    home.mkdir(exist_ok=True)
    (home / "read.token").write_text("r" * 20 + "\n")
    (home / "operate.token").write_text("o" * 20)
    written = {
        "url": url,
        "read_token_file": str(home / "read.token"),
        "operate_token_file": str(home / "operate.token"),
        **extra,
    }
    path = home / "service.json"
    path.write_text(json.dumps(written))
    return path


def test_an_unknown_service_lists_what_was_tried() -> None:
    with pytest.raises(Unreachable) as caught:
        discovery.find()
    text = str(caught.value)
    assert "no URL was given" in text
    assert "STAGESCOPE_URL is not set" in text
    assert str(discovery.service_file()) in text
    assert "stagescope serve" in text


def test_the_file_that_serve_wrote() -> None:
    path = write_service_file("http://127.0.0.1:8700")
    location = discovery.find()
    assert (location.url, location.found) == ("http://127.0.0.1:8700", str(path))
    assert (location.read_token, location.operate_token) == ("r" * 20, "o" * 20)
    assert "rrrr" not in repr(location)


def test_arguments_win_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_service_file("http://127.0.0.1:8700")
    monkeypatch.setenv("STAGESCOPE_URL", "http://head:8700/")
    monkeypatch.setenv("STAGESCOPE_TOKEN", "from-environment")
    location = discovery.find()
    assert (location.url, location.read_token) == ("http://head:8700", "from-environment")
    given = discovery.find("http://other:1", "given")
    assert (given.url, given.read_token, given.operate_token) == (
        "http://other:1",
        "given",
        "given",
    )


@pytest.mark.parametrize(
    "url", ["http://head:8700", "https://127.0.0.1:8700", "http://127.0.0.1:8701", "http://evil"]
)
def test_the_files_tokens_go_to_its_own_url_only(url: str) -> None:
    write_service_file("http://127.0.0.1:8700")
    location = discovery.find(url)
    assert location.read_token is None
    assert location.operate_token is None
    assert location.other_url == "http://127.0.0.1:8700"
    assert discovery.find().other_url == ""


def test_a_wrong_port_is_told_where_the_service_of_this_home_is() -> None:
    write_service_file("http://127.0.0.1:8700")
    wrong = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(Unreachable, match=r"service of this home is at http://127\.0\.0\.1:8700"):
        stagescope.attach(wrong)


def test_a_loopback_url_of_another_host_is_no_service_here() -> None:
    write_service_file("http://127.0.0.1:8700", host="head")
    with pytest.raises(Unreachable, match="of the host head"):
        discovery.find()
    write_service_file("http://10.0.0.4:8700", host="head")
    assert discovery.find().operate_token == "o" * 20
    write_service_file("http://127.0.0.1:8700", host=socket.gethostname())
    assert discovery.find().operate_token == "o" * 20


def test_a_token_by_the_path_of_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STAGESCOPE_TOKEN_FILE", str(tmp_path / "token"))
    assert "token" in discovery.find("http://head:8700").note  # it cannot be read
    (tmp_path / "token").write_text("t" * 20)
    assert discovery.find("http://head:8700").operate_token == "t" * 20


def test_white_space_around_a_token_is_none_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, token = "http://head:8700", "t" * 20
    assert discovery.find(url, f" {token}\n").operate_token == token
    (tmp_path / "token").write_text(f"\n{token}\r\n ")
    monkeypatch.setenv("STAGESCOPE_TOKEN_FILE", str(tmp_path / "token"))
    assert discovery.find(url, " \n").operate_token == token
    monkeypatch.setenv("STAGESCOPE_TOKEN", "\tu \r\n")
    assert discovery.find(url).operate_token == "u"


@pytest.mark.parametrize("text", ["wé", "a b", "a\nb", "a\0b", "\udcff", "a\x7f"])
def test_a_text_that_cannot_be_a_token_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    secret = f"hidden{text}hidden"
    with pytest.raises(Unauthorized, match="the token given") as given:
        discovery.find("http://head:8700", secret)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(Unauthorized, match="is empty"):
        discovery.read_token(tmp_path / "token")
    (tmp_path / "token").write_text(secret, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(Unauthorized, match="the token file") as of_file:
        discovery.read_token(tmp_path / "token")
    assert "hidden" not in str(given.value) + str(of_file.value)
    if "\0" not in text:
        monkeypatch.setenv("STAGESCOPE_TOKEN", secret)
        with pytest.raises(Unauthorized, match="STAGESCOPE_TOKEN") as named:
            discovery.find("http://head:8700")
        assert "hidden" not in str(named.value)


def test_no_other_token_takes_the_place_of_one_that_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_service_file("http://127.0.0.1:8700")
    named = tmp_path / "token"
    monkeypatch.setenv("STAGESCOPE_TOKEN_FILE", str(named))
    with pytest.raises(Unauthorized, match=r"cannot be read.*unset STAGESCOPE_TOKEN_FILE"):
        discovery.find()
    named.mkdir()
    with pytest.raises(Unauthorized, match="directory"):
        discovery.find()
    assert discovery.locate().url == "http://127.0.0.1:8700"
    assert discovery.find(token="given").operate_token == "given"


@pytest.mark.parametrize(
    "url",
    ["http://me:hidden@head:8700", "me:hidden@head:8700", "http://me:a@hidden@h", "//u:/hidden@h"],
)
def test_a_password_in_a_url_is_not_repeated(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        discovery.find(url)
    assert "hidden" not in str(caught.value)
    assert "hidden" not in discovery.without_password(url)


def test_one_service_by_two_loopback_names() -> None:
    write_service_file("http://127.0.0.1:8700")
    assert discovery.find("http://localhost:8700/").read_token == "r" * 20


def test_a_missing_read_token_is_replaced_by_the_other() -> None:
    path = write_service_file("http://127.0.0.1:8700")
    (path.parent / "read.token").unlink()
    location = discovery.find()
    assert location.read_token == "o" * 20
    assert "read.token" in location.note


@pytest.mark.parametrize("content", ["", "{", "[]", '{"url": 5}', '{"url": "ftp://x"}', '"\xff"'])
def test_a_damaged_file_is_reported_in_the_error(content: str) -> None:
    write_service_file("http://x").write_bytes(content.encode("latin-1"))
    with pytest.raises(Unreachable, match=r"service\.json"):
        discovery.find()
    assert discovery.find("http://head:8700").url == "http://head:8700"


@pytest.mark.parametrize(
    "url", ["head:8700", "ftp://head", "http://", "http://u:p@head", "http://head?x=1", ""]
)
def test_not_the_url_of_a_service(url: str) -> None:
    with pytest.raises(InvalidInput, match="http://HOST:8700"):
        discovery.find(url)


def test_attach_to_nobody_fails_at_once_and_names_the_url() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(Unreachable, match=url) as caught:
        stagescope.attach(url, timeout=60.0)
    assert "the URL given" in str(caught.value)


def test_attach_refuses_a_wrong_token(service: Answering) -> None:
    with pytest.raises(Unauthorized, match="STAGESCOPE_TOKEN"):
        stagescope.attach(service.url, token="wrong", timeout=5.0)
    with pytest.raises(Unauthorized) as caught:
        stagescope.attach(service.url, timeout=5.0)
    assert str(discovery.service_file()) in str(caught.value)
