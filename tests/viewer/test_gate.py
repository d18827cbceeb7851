"""Who may ask."""

import pytest
from slide_files import section, write_slide
from viewed_slides import served

from tapfm.viewer.gate import _HEADERS as HEADERS
from tapfm.viewer.gate import Admission, is_loopback


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    return write_slide(tmp_path_factory.mktemp("gate") / "slide.svs", section(300, 300))


@pytest.fixture(scope="module")
def client(slide):
    with served(slide) as client:
        yield client


@pytest.fixture(scope="module")
def open_to_others(slide):
    with served(slide, admission=Admission.of("0.0.0.0", 8000), base_url="http://192.168.1.20:8000") as client:
        yield client


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:9999", "[::1]:8000"])
def test_names_of_this_machine_are_answered(client, host):
    assert client.get("/api/collection", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1", "10.0.0.1"],
)
def test_other_hosts_are_refused(client, host):
    answer = client.get("/api/collection", headers={"Host": host})
    assert answer.status_code == 421
    assert "slides" not in answer.json()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_reading_is_possible(client, method):
    assert client.request(method, "/api/collection").status_code == 405


@pytest.mark.parametrize("path", ["/", "/api/collection", "/absent"])
def test_asking_for_the_headers_alone_is_reading(client, path):
    answer, whole = client.head(path), client.get(path)
    assert (answer.status_code, answer.content) == (whole.status_code, b"")
    assert answer.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize("origin", ["cross-site", "same-site"])
def test_pages_of_others_get_nothing(client, origin):
    headers = {"Sec-Fetch-Site": origin, "Sec-Fetch-Mode": "no-cors", "Origin": "http://localhost:3000"}
    assert client.get("/api/collection", headers=headers).status_code == 403
    assert client.get("/", headers=headers | {"Sec-Fetch-Mode": "navigate"}).status_code == 200
    answer = client.get("/api/collection", headers={"Origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/", "/api/collection", "/absent", "/api/slides/absent"])
def test_every_answer_has_the_headers(client, path):
    for headers in ({}, {"Host": "evil.example"}):
        answer = client.get(path, headers=headers)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value


def test_what_the_headers_forbid():
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


def test_no_token_is_needed_on_this_machine(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers


def test_others_need_the_token(open_to_others):
    token = open_to_others.app.admission.token
    assert len(token) >= 32
    for path in (
        "/",
        "/api/collection",
        "/assets/viewer.js",
        f"/api/collection?token={token}",
        "/?token=wrong",
        "/?token=",
    ):
        answer = open_to_others.get(path)
        assert answer.status_code == 401, path
        assert token not in answer.text
    page = open_to_others.get(f"/?token={token}")
    assert page.status_code == 200
    cookie = page.headers["set-cookie"]
    assert cookie.startswith("tapfm-view-8000=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert open_to_others.get("/api/collection").status_code == 200  # the client has kept the cookie
    open_to_others.cookies.clear()
    for wrong in ("x", token[:-1], token + "x", "ä"):
        cookie = f"tapfm-view-8000={wrong}".encode()
        assert open_to_others.get("/api/collection", headers={"Cookie": cookie}).status_code == 401


@pytest.mark.parametrize("other", ['view={"a": 1}', "a b=c", "x=\u00e4", "theme=[dark, wide]", "alone", ";;="])
def test_cookies_of_other_servers_do_not_hide_the_token(open_to_others, other):
    token = open_to_others.app.admission.token
    cookies = f"{other}; tapfm-view-8000={token}; {other}".encode("latin-1")
    assert open_to_others.get("/api/collection", headers={"Cookie": cookies}).status_code == 200


def test_each_server_has_its_own_token():
    assert Admission.of("0.0.0.0", 8000).token != Admission.of("0.0.0.0", 8000).token


@pytest.mark.parametrize(("host", "status"), [("192.168.1.20:8000", 401), ("localhost", 401), ("evil.example", 421)])
def test_names_that_could_be_rebound_are_refused_to_others_too(open_to_others, host, status):
    assert open_to_others.get("/api/collection", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LocalHost"])
def test_addresses_of_this_machine_alone(host):
    assert is_loopback(host)
    assert Admission.of(host, 1).token is None
    assert Admission.of(host, 1).knows(f"[{host}]:1" if ":" in host else host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.20", "example.org", ""])
def test_addresses_that_others_can_reach(host):
    assert not is_loopback(host)
    assert Admission.of(host, 1).token
