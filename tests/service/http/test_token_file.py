"""The tokens of people, teams and programs: their file, roles, limits, and people of a proxy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.api import Service, service

from stagescope_service.http import access_token_file as token_file
from stagescope_service.http.access_token_file import (
    RateLimits,
    Token,
    TokenFile,
    add_token,
    read_tokens,
    remove_token,
    rotate_token,
)
from stagescope_service.http.auth import Caller
from stagescope_service.settings import Settings
from stagescope_wire.errors import Conflict, Forbidden, InvalidInput, NotFound

CAPTURE = {"stages": "all", "steps": [1], "keep": ["old_log_probs"]}
PERSON = "x-forwarded-email"


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file with every request, as a service does every second."""
    monkeypatch.setattr(token_file, "CHECK_SECONDS", 0.0)


def added(home: Path, name: str, role: Any = "read", **fields: Any) -> str:
    text = add_token(home, Token(name, role, **fields))
    assert text is not None
    return text


# --- the file ---------------------------------------------------------------------------------
class TestFile:
    def test_holds_no_token_and_is_its_users_alone(self, tmp_path: Path) -> None:
        text = added(tmp_path, "ada", "operate", per_minute=60)
        path = tmp_path / "tokens.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert text not in path.read_text()
        (token,) = read_tokens(tmp_path)
        assert (token.name, token.role, token.per_minute) == ("ada", "operate", 60)
        assert str(token.sha256) not in repr(token)

    def test_of_several_writers_at_a_time_loses_none(self, tmp_path: Path) -> None:
        names = [f"t{number}" for number in range(20)]
        threads = [threading.Thread(target=added, args=(tmp_path, name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(token.name for token in read_tokens(tmp_path)) == sorted(names)

    def test_names_each_once(self, tmp_path: Path) -> None:
        added(tmp_path, "ada")
        with pytest.raises(Conflict, match="token ada already"):
            added(tmp_path, "ada")
        with pytest.raises(NotFound, match="bob") as missing:
            rotate_token(tmp_path, "bob")
        assert "ada" in missing.value.expected
        assert add_token(tmp_path, Token("eve", "read", proxy_user="eve@x.org")) is None
        with pytest.raises(Conflict):
            add_token(tmp_path, Token("eve2", "read", proxy_user="eve@x.org"))
        with pytest.raises(InvalidInput, match="proxy"):
            rotate_token(tmp_path, "eve")

    @pytest.mark.parametrize(
        "wrong",
        [
            Token("", "read"), Token("a b", "read"), Token("a", "root"),  # type: ignore[arg-type]
            Token("a", "read", per_minute=0), Token("a", "read", proxy_user="a (b)"),
        ],
    )  # fmt: skip
    def test_takes_nothing_that_cannot_be_used(self, tmp_path: Path, wrong: Token) -> None:
        with pytest.raises(InvalidInput):
            add_token(tmp_path, wrong)
        assert read_tokens(tmp_path) == []

    @pytest.mark.parametrize(
        "content",
        [
            "", "{", "[]", '{"tokens": 1}', '{"tokens": [{"name": "a"}]}',
            '{"tokens": [{"name": "a", "role": "read", "sha256": "x", "until": 1}]}',
            '{"tokens": [{"name": "a", "role": "read", "sha256": "x", "runs": ["a*"]}]}',
        ],
    )  # fmt: skip
    def test_that_is_broken_allows_nothing(self, tmp_path: Path, content: str) -> None:
        text = added(tmp_path, "ada")
        found = TokenFile(tmp_path, "key")
        found.read()
        assert token_file.of_secret(found.table.by_sha256, text) is not None
        (tmp_path / "tokens.json").write_text(content)
        found.read()
        assert token_file.of_secret(found.table.by_sha256, text) is None
        with pytest.raises(InvalidInput):
            read_tokens(tmp_path)

    def test_through_a_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "other").write_text('{"tokens": []}')
        (tmp_path / "tokens.json").symlink_to(tmp_path / "other")
        with pytest.raises(Forbidden):
            read_tokens(tmp_path)

    def test_is_looked_at_once_a_second(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(token_file, "CHECK_SECONDS", 1.0)
        looked: list[object] = []
        real = os.stat

        def counted(*arguments: Any, **options: Any) -> os.stat_result:
            looked.append(arguments)
            return real(*arguments, **options)

        found = TokenFile(tmp_path, "key", clock=lambda: now)
        now = 5.0
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", counted)
            for now in (5.0, 5.5, 5.9, 6.0, 6.5):  # noqa: B007 - the clock's
                asyncio.run(found.look())
        assert len(looked) == 2

    def test_on_a_disk_that_hangs_stops_no_request(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = added(tmp_path, "ada")
        found = TokenFile(tmp_path, "key")
        found.read()
        now, hangs = found._checked + 60.0, threading.Event()
        monkeypatch.setattr(found, "_clock", lambda: now)
        monkeypatch.setattr(token_file, "LOOK_SECONDS", 0.1)
        monkeypatch.setattr(found, "read", lambda: hangs.wait(30))

        async def ask() -> int:
            turns = 0
            looking = asyncio.create_task(found.look())
            while not looking.done():
                await asyncio.sleep(0.001)
                turns += 1
            hangs.set()
            return turns

        assert asyncio.run(ask()) > 1  # the event loop went on
        assert token_file.of_secret(found.table.by_sha256, text) is not None


def test_limits_let_a_minutes_requests_through_and_then_say_when() -> None:
    now = 100.0
    limits = RateLimits(clock=lambda: now)
    token = Token("ci", "read", per_minute=6)
    assert [limits.wait(token, is_report=False) for _ in range(7)] == [0] * 6 + [10]
    assert limits.wait(token, is_report=True) == 0
    assert limits.wait(Token("other", "read", per_minute=6), is_report=False) == 0
    now = 110.0
    assert [limits.wait(token, is_report=False) for _ in range(2)] == [0, 10]
    now = 1000.0
    assert [limits.wait(token, is_report=False) for _ in range(7)] == [0] * 6 + [10]


# --- in a service -----------------------------------------------------------------------------
def test_are_added_rotated_and_removed_without_a_restart(live: Service) -> None:
    home = live.settings.home
    text = added(home, "ada", "operate")
    ada = live.client(text)
    assert ada.get("/runs").status_code == 200
    assert ada.get("/whoami").json()["token"] == "ada"
    rotated = rotate_token(home, "ada")
    assert ada.get("/runs").status_code == 401
    again = live.client(rotated)
    assert again.get("/runs").status_code == 200
    remove_token(home, "ada")
    assert again.get("/runs").status_code == 401
    assert live.read.get("/runs").status_code == 200


@pytest.mark.parametrize("change", ["rotate", "remove", "operate.token"])
def test_a_login_ends_with_its_token(live: Service, change: str) -> None:
    home = live.settings.home
    browser = live.client(None)
    text = added(home, "ada")
    assert browser.post("/login", json={"token": text}).status_code == 204
    cookie = browser.cookies["stagescope"]
    assert text not in cookie
    # Who reads the file alone can make no cookie of it.
    assert str(read_tokens(home)[0].sha256) not in cookie
    assert browser.get("/whoami").json()["token"] == "ada"
    if change == "operate.token":
        other = TokenFile(home, "another operate token")
        assert other.login(read_tokens(home)[0]) != cookie
        return
    rotate_token(home, "ada") if change == "rotate" else remove_token(home, "ada")
    assert browser.get("/runs").status_code == 401
    assert browser.get("/whoami").json()["grade"] is None


def test_a_stream_ends_with_its_token(live: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagescope_service.http.stream.HEARTBEAT_SECONDS", 0.1)
    client = live.client(added(live.settings.home, "ada"))
    with client.stream("GET", "/stream", timeout=30) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("retry")
        remove_token(live.settings.home, "ada")
        assert len([*lines]) < 1000  # it ends


class TestRoles:
    def test_read_operate_admin(self, live: Service) -> None:
        home = live.settings.home
        clients = {role: live.client(added(home, role, role)) for role in token_file.ROLES}
        for run, (role, client) in enumerate(clients.items()):
            assert client.get("/runs").status_code == 200
            assert client.get("/whoami").json()["role"] == role
            made = client.post("/captures", json={**CAPTURE, "run": f"r{run}"})
            assert made.status_code == (403 if role == "read" else 201)
            assert client.get("/audit").status_code == (200 if role == "admin" else 403)
        assert live.operate.get("/audit").status_code == 403
        assert "--role admin" in live.operate.get("/audit").json()["advice"]

    def test_the_audit_names_the_token(self, live: Service) -> None:
        home = live.settings.home
        ada = live.client(added(home, "ada", "operate"))
        boss = live.client(added(home, "boss", "admin"))
        said = {"x-stagescope-user": "root (operate token, 1.2.3.4)"}
        for run, headers in (("q", {}), ("r", said)):
            body = {**CAPTURE, "run": run}
            assert ada.post("/captures", json=body, headers=headers).status_code == 201
        page = boss.get("/audit", params={"limit": 1}).json()
        more = boss.get("/audit", params={"limit": 1, "cursor": page["next"]}).json()
        assert more["next"] is None
        (last,), (first,) = page["rows"], more["rows"]
        assert first["by"] == "token ada (operate, 127.0.0.1)"
        assert last["by"] == "token ada (operate, as root operate token, 1.2.3.4, 127.0.0.1)"
        assert last["action"] == "add_capture"
        assert last["detail"]["run"] == "r"
        assert last["wall"] >= first["wall"]


class TestLimits:
    def test_are_answered_with_when_to_ask_again(self, live: Service) -> None:
        client = live.client(added(live.settings.home, "ci", per_minute=2))
        assert [client.get("/runs").status_code for _ in range(2)] == [200, 200]
        refused = client.get("/runs")
        assert refused.status_code == 429
        assert refused.json()["code"] == "too_many_requests"
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert "ci has sent more than the 2 requests" in refused.json()["wrong"]
        assert live.read.get("/runs").status_code == 200

    def test_leave_trainings_alone_unless_they_have_their_own(self, live: Service) -> None:
        home = live.settings.home
        client = live.client(added(home, "train", "operate", per_minute=1))
        assert {client.post("/events", content=b"{}").status_code for _ in range(5)} == {422}
        assert client.get("/runs").status_code == 200
        limited = live.client(added(home, "slow", "operate", reports_per_minute=1))
        found = [limited.post("/poll", content=b"{}").status_code for _ in range(2)]
        assert found == [422, 429]
        assert limited.get("/runs").status_code == 200


# --- people of a proxy --------------------------------------------------------------------------
class TestProxy:
    def test_is_believed_only_where_it_is_switched_on(self, live: Service) -> None:
        answer = live.client(None, **{PERSON: "ada@x.org"}).get("/runs")
        assert answer.status_code == 401

    def test_names_people(self, tmp_path: Path) -> None:
        with service(tmp_path, trusted_proxy_header="X-Forwarded-Email") as running:
            ada = running.client(None, **{PERSON: "ada@x.org"})
            assert ada.get("/runs").status_code == 200
            known = ada.get("/whoami").json()
            assert (known["person"], known["role"], known["token"]) == ("ada@x.org", "read", None)
            own = {"origin": running.server.url}
            body = {**CAPTURE, "run": "r"}
            assert ada.post("/captures", json=body, headers=own).status_code == 403
            add_token(tmp_path, Token("ada", "operate", proxy_user="ada@x.org"))
            assert ada.post("/captures", json=body).status_code == 403  # of another page
            assert ada.post(
                "/captures", json=body, headers={"sec-fetch-site": "cross-site"}
            ).status_code == 403  # fmt: skip
            made = ada.post("/captures", json=body, headers=own)
            assert made.status_code == 201
            assert made.json()["by"] == "person ada@x.org (operate by proxy, 127.0.0.1)"
            bearer = running.client(add_token(tmp_path, Token("ci", "read")), **{PERSON: "a@x"})
            assert bearer.get("/whoami").json()["token"] == "ci"
            assert running.client(None, **{PERSON: ""}).get("/runs").status_code == 401

    def test_may_name_only_those_who_are_listed(self, tmp_path: Path) -> None:
        settings = {"trusted_proxy_header": PERSON, "trusted_proxy_role": "none"}
        with service(tmp_path, **settings) as running:
            ada = running.client(None, **{PERSON: "ada@x.org"})
            assert ada.get("/runs").status_code == 403
            add_token(tmp_path, Token("ada", "read", proxy_user="ada@x.org"))
            assert ada.get("/runs").status_code == 200
            remove_token(tmp_path, "ada")
            assert ada.get("/runs").status_code == 403

    @pytest.mark.parametrize("proxies", [("10.0.0.0/8",), ("192.0.2.7", "2001:db8::/32")])
    def test_of_another_address_is_refused(self, tmp_path: Path, proxies: tuple[str, ...]) -> None:
        with service(
            tmp_path, trusted_proxy_header=PERSON, trusted_proxies=proxies
        ) as running:  # fmt: skip
            refused = running.client(None, **{PERSON: "ada@x.org"}).get("/runs")
            assert refused.status_code == 403
            assert "127.0.0.1" in refused.json()["wrong"]
            assert "STAGESCOPE_TRUSTED_PROXIES" in refused.json()["expected"]
            assert running.read.get("/runs").status_code == 200

    def test_names_one_person(self, tmp_path: Path) -> None:
        with service(tmp_path, trusted_proxy_header=PERSON) as running:
            client = running.client(None)
            twice = [(PERSON, "ada@x.org"), (PERSON, "boss@x.org")]
            assert client.get("/runs", headers=twice).status_code == 422
            for name in ("a b", "ada@x.org, boss@x.org", "a(b)", "a" * 201):
                assert client.get("/runs", headers={PERSON: name}).status_code == 422

    @pytest.mark.parametrize(
        "wrong",
        [
            {"trusted_proxy_header": "Authorization"}, {"trusted_proxy_header": "a b"},
            {"trusted_proxies": ("nowhere",)}, {"trusted_proxy_role": "admin"},
        ],
    )  # fmt: skip
    def test_settings_are_checked(self, tmp_path: Path, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            Settings(home=tmp_path, **wrong)


def test_names_in_the_audit_cannot_be_feigned() -> None:
    token = Token("ci", "operate")
    feigned = str(Caller("token ci (operate, 127.0.0.1)", "operate", "::1"))
    assert feigned != str(Caller("unknown", "operate", "127.0.0.1", token))
    assert feigned.endswith(" (operate token, ::1)")
    own = str(Caller("x) (operate token, ::1)", "operate", "127.0.0.1", token))
    assert own.startswith("token ci (")
    assert own.count("(") == 1


def test_a_token_is_described_without_its_hash(tmp_path: Path) -> None:
    added(tmp_path, "ada")
    (token,) = read_tokens(tmp_path)
    shown = token_file.describe(token)
    assert json.dumps(shown)
    assert "sha256" not in shown
    assert dataclasses.asdict(token)["sha256"]
