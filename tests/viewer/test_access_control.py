"""Access control: host names, methods, other sites, tokens."""

import pytest
from slide_files import section, write_slide
from viewer_fixtures import viewer_client

from tapfm.viewer.access_control import _SECURITY_HEADERS as SECURITY_HEADERS
from tapfm.viewer.access_control import AccessPolicy, is_loopback


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    return write_slide(tmp_path_factory.mktemp("access") / "slide.svs", section(300, 300))


@pytest.fixture(scope="module")
def client(slide):
    with viewer_client(slide) as client:
        yield client


@pytest.fixture(scope="module")
def public_client(slide):
    with viewer_client(
        slide, policy=AccessPolicy.for_host("0.0.0.0", 8000), base_url="http://192.168.1.20:8000"
    ) as client:
        yield client


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:9999", "[::1]:8000"])
def test_requests_for_names_of_this_machine_are_accepted(client, host):
    assert client.get("/api/collection", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1", "10.0.0.1"],
)
def test_requests_for_other_host_names_are_rejected(client, host):
    response = client.get("/api/collection", headers={"Host": host})
    assert response.status_code == 421
    assert "slides" not in response.json()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_methods_other_than_get_and_head_are_rejected(client, method):
    assert client.request(method, "/api/collection").status_code == 405


@pytest.mark.parametrize("path", ["/", "/api/collection", "/absent"])
def test_head_returns_the_headers_of_get(client, path):
    response, full = client.head(path), client.get(path)
    assert (response.status_code, response.content) == (full.status_code, b"")
    assert response.headers["content-length"] == str(len(full.content))


@pytest.mark.parametrize("origin", ["cross-site", "same-site"])
def test_requests_from_other_sites_are_rejected(client, origin):
    headers = {"Sec-Fetch-Site": origin, "Sec-Fetch-Mode": "no-cors", "Origin": "http://localhost:3000"}
    assert client.get("/api/collection", headers=headers).status_code == 403
    assert client.get("/", headers=headers | {"Sec-Fetch-Mode": "navigate"}).status_code == 200
    response = client.get("/api/collection", headers={"Origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/", "/api/collection", "/absent", "/api/slides/absent"])
def test_every_response_has_the_security_headers(client, path):
    for headers in ({}, {"Host": "evil.example"}):
        response = client.get(path, headers=headers)
        for name, value in SECURITY_HEADERS.items():
            assert response.headers[name] == value


def test_the_content_security_policy_is_strict():
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


def test_no_token_is_required_on_loopback(client):
    response = client.get("/")
    assert response.status_code == 200
    assert "set-cookie" not in response.headers


def test_other_machines_need_the_token(public_client):
    token = public_client.app.policy.token
    assert len(token) >= 32
    for path in (
        "/",
        "/api/collection",
        "/assets/viewer.js",
        f"/api/collection?token={token}",
        "/?token=wrong",
        "/?token=",
    ):
        response = public_client.get(path)
        assert response.status_code == 401, path
        assert token not in response.text
    index = public_client.get(f"/?token={token}")
    assert index.status_code == 200
    cookie = index.headers["set-cookie"]
    assert cookie.startswith("tapfm-view-8000=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert public_client.get("/api/collection").status_code == 200  # the client has stored the cookie
    public_client.cookies.clear()
    for wrong in ("x", token[:-1], token + "x", "ä"):
        cookie = f"tapfm-view-8000={wrong}".encode()
        assert public_client.get("/api/collection", headers={"Cookie": cookie}).status_code == 401


@pytest.mark.parametrize("other", ['view={"a": 1}', "a b=c", "x=\u00e4", "theme=[dark, wide]", "alone", ";;="])
def test_malformed_cookies_of_other_servers_do_not_hide_the_token(public_client, other):
    token = public_client.app.policy.token
    cookies = f"{other}; tapfm-view-8000={token}; {other}".encode("latin-1")
    assert public_client.get("/api/collection", headers={"Cookie": cookies}).status_code == 200


def test_each_server_has_a_different_token():
    assert AccessPolicy.for_host("0.0.0.0", 8000).token != AccessPolicy.for_host("0.0.0.0", 8000).token


@pytest.mark.parametrize(("host", "status"), [("192.168.1.20:8000", 401), ("localhost", 401), ("evil.example", 421)])
def test_a_public_server_rejects_unknown_host_names(public_client, host, status):
    assert public_client.get("/api/collection", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LocalHost"])
def test_loopback_addresses_need_no_token(host):
    assert is_loopback(host)
    assert AccessPolicy.for_host(host, 1).token is None
    assert AccessPolicy.for_host(host, 1).accepts_host(f"[{host}]:1" if ":" in host else host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.20", "example.org", ""])
def test_addresses_that_other_machines_can_reach_need_a_token(host):
    assert not is_loopback(host)
    assert AccessPolicy.for_host(host, 1).token
