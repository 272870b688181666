"""The login of a browser, the page's files, and ETags of answers."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.api import Rank, Service, service

from stagescope_service.figure_style import PLOTLY
from stagescope_service.http.access_token_file import TokenFile
from stagescope_service.http.access_tokens import Access, AccessTokens
from stagescope_service.http.auth import COOKIE

CAPTURE = {"stages": "all", "steps": [1], "keep": ["old_log_probs"]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for the questions that change nothing."""
    with service(tmp_path_factory.mktemp("home")) as running:
        yield running


def browser(live: Service, grade: str | None = None, **headers: str) -> httpx.Client:
    """A client that keeps cookies, logged in as `grade`."""
    client = live.client(None, **headers)
    if grade is not None:
        answer = client.post("/login", json={"token": getattr(live.tokens, grade)})
        assert answer.status_code == 204, answer.text
    return client


def own_page(live: Service) -> dict[str, str]:
    """What a browser says of a request that a page of the service sends."""
    return {"origin": live.server.url, "sec-fetch-site": "same-origin"}


class TestLogin:
    def test_trades_a_token_for_a_cookie_that_reads(self, shared: Service) -> None:
        client = browser(shared, "read")
        assert client.get("/runs").status_code == 200
        assert client.get("/whoami").json() == {
            "grade": "read", "user": "unknown", "bundle": None, "opens": None,
            "role": "read", "token": None, "person": None, "runs": None,
        }  # fmt: skip

    def test_the_cookie_is_not_the_token_and_closed_to_scripts_and_sites(
        self, shared: Service
    ) -> None:
        answer = shared.client(None).post("/login", json={"token": shared.tokens.operate})
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}=")
        assert shared.tokens.operate not in cookie
        assert shared.tokens.read not in cookie
        attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
        assert {"httponly", "samesite=strict"} <= attributes
        # Without a path the browser takes the folder of the page, which a proxy serves anywhere.
        assert not any(each.startswith(("path", "domain", "secure")) for each in attributes)
        assert answer.content == b""

    @pytest.mark.parametrize("name", ["origin", "x-forwarded-proto"])
    def test_is_secure_where_the_browsers_connection_is(self, shared: Service, name: str) -> None:
        host = shared.server.url.removeprefix("http://")
        said = {"origin": f"https://{host}", "x-forwarded-proto": "https"}
        answer = shared.client(None, **{name: said[name]}).post(
            "/login", json={"token": shared.tokens.read}
        )
        assert "; secure" in answer.headers["set-cookie"].lower()

    @pytest.mark.parametrize("token", ["", "x" * 43, "ö" * 43])
    def test_of_another_token_is_refused(self, shared: Service, token: str) -> None:
        answer = shared.client(None).post("/login", json={"token": token})
        assert answer.status_code in (401, 422)
        assert "set-cookie" not in answer.headers

    def test_takes_a_token_with_the_newline_of_its_file(self, shared: Service) -> None:
        answer = shared.client(None).post("/login", json={"token": f" {shared.tokens.read}\n"})
        assert answer.status_code == 204

    @pytest.mark.parametrize("body", [{}, {"token": 1}, {"token": "x", "run": "r"}])
    def test_of_another_form_is_refused(self, shared: Service, body: object) -> None:
        assert shared.client(None).post("/login", json=body).status_code == 422

    def test_of_a_large_body_is_refused_before_it_is_read(self, shared: Service) -> None:
        answer = shared.client(None).post("/login", content=b" " * 5000)
        assert answer.status_code == 413

    def test_of_another_site_is_refused(self, shared: Service) -> None:
        answer = shared.client(None, origin="https://evil.example").post(
            "/login", json={"token": shared.tokens.read}
        )
        assert answer.status_code == 403

    def test_a_token_that_was_replaced_ends_it(self, live: Service) -> None:
        client = browser(live, "read")
        other = AccessTokens(read="n" * 40, operate="o" * 40)
        cookie = client.cookies[COOKIE]
        file = TokenFile(live.settings.home, "key")
        found = Access(live.tokens, file).of_cookie(cookie)
        assert found is not None
        assert found.role == "read"
        assert Access(other, file).of_cookie(cookie) is None

    @pytest.mark.parametrize("cookie", ["", "x", "a.b.c", "\xff", "x" * 5000])
    def test_other_cookies_allow_nothing(self, shared: Service, cookie: str) -> None:
        value = f"{COOKIE}={cookie}".encode("latin-1")
        answer = shared.client(None).get("/runs", headers={b"cookie": value})
        assert answer.status_code == 401

    def test_whoami_without_one_says_so(self, shared: Service) -> None:
        expected = {
            "grade": None, "user": "unknown", "bundle": None, "opens": None,
            "role": None, "token": None, "person": None, "runs": None,
        }  # fmt: skip
        assert shared.client(None).get("/whoami").json() == expected
        stale = shared.client(None).get("/whoami", headers={"cookie": f"{COOKIE}=abc"})
        assert stale.json() == expected
        assert shared.client("wrong").get("/whoami").json() == expected
        assert shared.operate.get("/whoami").json()["grade"] == "operate"

    def test_a_bearer_token_comes_before_the_cookie(self, shared: Service) -> None:
        client = browser(shared, "operate")
        bearer = {"authorization": f"Bearer {shared.tokens.read}"}
        assert client.get("/whoami", headers=bearer).json()["grade"] == "read"
        wrong = {"authorization": "Bearer wrong"}
        assert client.get("/runs", headers=wrong).status_code == 401


class TestLogout:
    def test_ends_the_login(self, shared: Service) -> None:
        client = browser(shared, "read")
        assert client.post("/logout", headers=own_page(shared)).status_code == 204
        assert COOKIE not in client.cookies
        assert client.get("/runs").status_code == 401

    def test_of_another_site_is_refused(self, shared: Service) -> None:
        client = browser(shared, "read")
        answer = client.post("/logout", headers={"origin": "https://evil.example"})
        assert answer.status_code == 403

    def test_services_on_ports_of_one_host_keep_their_logins(
        self, shared: Service, live: Service
    ) -> None:
        """Browsers send a cookie to every port of its host, as where tunnels lead to clusters."""
        client = browser(shared, "read")
        there = live.client(None)
        there.cookies.set(COOKIE, client.cookies[COOKIE])
        answer = there.post("/login", json={"token": live.tokens.operate})
        both = answer.cookies[COOKIE]
        for running, grade in ((shared, "read"), (live, "operate")):
            other = running.client(None, cookie=f"{COOKIE}={both}")
            assert other.get("/whoami").json()["grade"] == grade
        left = live.client(None, cookie=f"{COOKIE}={both}").post("/logout").cookies[COOKIE]
        kept = shared.client(None, cookie=f"{COOKIE}={left}")
        gone = live.client(None, cookie=f"{COOKIE}={left}")
        assert kept.get("/whoami").json()["grade"] == "read"
        assert gone.get("/whoami").json()["grade"] is None


class TestChanges:
    """What a cookie may change, and on whose request."""

    def test_the_read_cookie_changes_nothing(self, shared: Service) -> None:
        client = browser(shared, "read", **own_page(shared))
        assert client.post("/captures", json=CAPTURE).status_code == 403

    @pytest.mark.parametrize("signs", ["both", "origin", "site"])
    def test_the_operate_cookie_does_on_request_of_the_page(
        self, live: Service, signs: str
    ) -> None:
        headers = own_page(live)
        if signs == "origin":
            del headers["sec-fetch-site"]
        elif signs == "site":
            del headers["origin"]
        client = browser(live, "operate")
        made = client.post("/captures", json=CAPTURE, headers=headers)
        assert made.status_code == 201, made.text
        assert made.json()["by"] == "unknown (operate token, 127.0.0.1)"

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"sec-fetch-site": "same-site"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "none"},
            {"origin": "http://127.0.0.1:1"},
            {"origin": "null"},
        ],
    )
    @pytest.mark.parametrize("path", ["/captures", "/triggers/test"])
    def test_it_does_not_on_request_of_others(
        self, shared: Service, headers: dict[str, str], path: str
    ) -> None:
        client = browser(shared, "operate")
        answer = client.post(path, json=CAPTURE, headers=headers)
        assert answer.status_code == 403
        assert client.delete("/captures/x", headers=headers).status_code == 403

    def test_not_even_of_an_allowed_origin(self, tmp_path: Path) -> None:
        other = "https://board.example"
        with service(tmp_path, allowed_origins=(other,)) as running:
            client = browser(running, "operate")
            answer = client.post("/captures", json=CAPTURE, headers={"origin": other})
            assert answer.status_code == 403


class TestFiles:
    def test_are_open_and_data_is_not(self, shared: Service) -> None:
        nobody = shared.client(None)
        page = nobody.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        paths = re.findall(r'(?:src|href)="([^"#][^"]*)"', page.text)
        assert len(paths) >= 3
        for path in paths:  # relative to the page, which a proxy may serve below a path
            assert path.startswith("static/")
            assert nobody.get(f"/{path}").status_code == 200, path
        assert nobody.get("/runs").status_code == 401
        assert nobody.get("/openapi.json").status_code == 401
        assert nobody.get("/stream").status_code == 401

    def test_the_page_names_each_module_that_it_imports(self, shared: Service) -> None:
        nobody = shared.client(None)
        page = nobody.get("/").text
        imported, waiting = set[str](), re.findall(r'src="([^"]+\.js)"', page)
        while waiting:
            path = waiting.pop()
            if path in imported:
                continue
            imported.add(path)
            folder = path.rpartition("/")[0]
            for name in re.findall(r'from "\./([^"]+)"', nobody.get(f"/{path}").text):
                waiting.append(f"{folder}/{name}")
        assert set(re.findall(r'rel="modulepreload" href="([^"]+)"', page)) == imported

    def test_let_the_browser_ask_nobody_else(self, shared: Service) -> None:
        headers = shared.client(None).get("/").headers
        parts = [part.split() for part in headers["content-security-policy"].split(";")]
        policy = {name: " ".join(sources) for name, *sources in parts}
        assert policy["default-src"] == "'self'"
        assert "script-src" not in policy  # so that default-src holds: no inline script
        assert "unsafe-inline" not in policy["style-src"]
        assert policy["frame-ancestors"] == "'none'"
        assert "http" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"

    def test_name_no_other_host(self, shared: Service) -> None:
        nobody = shared.client(None)
        for name in ("/", "/docs"):
            assert "//" not in re.sub(r"<!DOCTYPE[^>]*>", "", nobody.get(name).text)

    def test_plotly_is_the_published_file_compressed_and_loads_nothing(
        self, shared: Service
    ) -> None:
        # plotly.js-cartesian-dist-min 4.1.1 of npm
        assert hashlib.sha256(PLOTLY.read_bytes()).hexdigest() == (
            "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
        )
        nobody = shared.client(None)
        path = f"/static/{PLOTLY.name}"
        plain = nobody.get(path, headers={"accept-encoding": "identity"})
        assert "unpkg.com" not in plain.text
        assert abs(len(plain.text) - len(PLOTLY.read_text())) < 500
        with nobody.stream("GET", path) as answer:
            packed = b"".join(answer.iter_raw())
            assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed) == plain.content
        assert len(packed) < len(plain.content) / 2

    def test_preact_is_the_published_file(self, shared: Service) -> None:
        answer = shared.client(None).get("/static/preact.mjs")
        assert answer.headers["content-type"].startswith("text/javascript")
        # dist/preact.mjs of npm's preact 11.2.0
        assert hashlib.sha256(answer.content).hexdigest() == (
            "bdcbd9abdf2c77c5c45326eab42191e949222d479d0d5f69467387a77040cb55"
        )

    def test_of_the_present_version_are_kept_for_good(self, shared: Service) -> None:
        nobody = shared.client(None)
        (script,) = re.findall(r'src="(static/[^"]+/app\.js)"', nobody.get("/").text)
        versioned = nobody.get(script)
        assert "immutable" in versioned.headers["cache-control"]
        for path in ("/static/app.js", "/static/another-version/app.js"):
            answer = nobody.get(path)
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.content == versioned.content
            again = nobody.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert again.status_code == 304
            assert not again.content

    @pytest.mark.parametrize(
        "path",
        ["/static/none.js", "/static/..%2fauth.py", "/static/v/..%2f..%2fapp.py", "/static/app.py"],
    )
    def test_others_are_not_there(self, shared: Service, path: str) -> None:
        assert shared.client(None).get(path).status_code == 404

    def test_of_a_foreign_host_are_refused(self, shared: Service) -> None:
        answer = shared.client(None).get("/", headers={"host": "evil.example"})
        assert answer.status_code == 403


class TestEntityTags:
    def test_an_answer_that_the_client_has_is_not_sent_again(self, live: Service) -> None:
        rank = Rank(live, world_size=1)
        rank.stage("actor_update", 1, scalars={"loss": 1.0})
        first = live.read.get("/steps/1/scalars")
        tag = {"if-none-match": first.headers["etag"]}
        again = live.read.get("/steps/1/scalars", headers=tag)
        assert again.status_code == 304
        assert again.content == b""
        assert again.headers["etag"] == first.headers["etag"]
        rank.stage("actor_update", 1, scalars={"loss": 2.0}, occurrence=1)
        changed = live.read.get("/steps/1/scalars", headers=tag)
        assert changed.status_code == 200
        assert changed.headers["etag"] != first.headers["etag"]
        assert len(changed.json()["rows"]) == 2

    def test_problems_and_changes_have_none(self, live: Service) -> None:
        assert "etag" not in live.read.get("/steps/1/scalars").headers
        assert "etag" not in live.operate.post("/captures", json=CAPTURE).headers

    def test_of_another_user_are_no_way_round_the_login(self, live: Service) -> None:
        tag = live.read.get("/runs").headers["etag"]
        assert live.client(None).get("/runs", headers={"if-none-match": tag}).status_code == 401


def test_documentation_is_served_from_here(shared: Service) -> None:
    pytest.importorskip("fastapi_offline")
    nobody = shared.client(None)
    page = nobody.get("/docs")
    assert page.status_code == 200
    paths = re.findall(r'(?:src|href)="([^"#][^"]*)"', page.text)
    assert len(paths) >= 3
    for path in paths:
        assert nobody.get(f"/{path}").status_code == 200, path
    assert "swagger" in nobody.get("/static/swagger-ui-bundle.js").text.lower()
