"""Listening sockets and the printed address."""

import socket

import pytest

from tapfm.errors import InputError
from tapfm.viewer.access_control import AccessPolicy
from tapfm.viewer.server import open_socket, viewer_url


def test_port_0_uses_a_free_port():
    with open_socket("127.0.0.1", 0) as first, open_socket("127.0.0.1", 0) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


def test_a_port_in_use_is_an_error():
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"127\.0\.0\.1.*{port}") as error:
            open_socket("127.0.0.1", port)
        assert "--port" in error.value.hint


def test_without_a_port_the_next_free_port_is_used(monkeypatch):
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("tapfm.viewer.server._FIRST_PORT", port)
        with open_socket("127.0.0.1", None) as next_free:
            assert next_free.getsockname()[1] != port


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(InputError, match=r"absent\.invalid"):
        open_socket("absent.invalid", 0)
    with pytest.raises(InputError, match=r"two\.\.dots"):
        open_socket("two..dots", 0)
    with pytest.raises(InputError, match=r"192\.0\.2\.1"):
        open_socket("192.0.2.1", 0)  # reserved for documentation


def test_the_url_contains_a_reachable_host_and_the_token():
    assert viewer_url("127.0.0.1", 8000, AccessPolicy()) == "http://127.0.0.1:8000/"
    assert viewer_url("::1", 8000, AccessPolicy()) == "http://[::1]:8000/"
    policy = AccessPolicy.for_host("0.0.0.0", 8000)
    url = viewer_url("0.0.0.0", 8000, policy)
    assert url == f"http://{socket.gethostname()}:8000/?token={policy.token}"
    assert policy.accepts_host(f"{socket.gethostname()}:8000")
