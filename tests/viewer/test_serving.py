"""Ports and addresses."""

import socket

import pytest

from tapfm.errors import InputError
from tapfm.viewer.gate import Admission
from tapfm.viewer.serving import address_of, open_socket


def test_any_port_is_a_free_one():
    with open_socket("127.0.0.1", 0) as one, open_socket("127.0.0.1", 0) as other:
        assert one.getsockname()[1] != other.getsockname()[1]


def test_a_port_that_was_asked_for_and_is_taken_is_told():
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"Port {port} of 127.0.0.1 cannot be used") as told:
            open_socket("127.0.0.1", port)
        assert "--port" in told.value.hint


def test_without_a_port_the_next_free_one_is_taken(monkeypatch):
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("tapfm.viewer.serving._FIRST_PORT", port)
        with open_socket("127.0.0.1", None) as next_free:
            assert next_free.getsockname()[1] != port


def test_an_address_of_another_machine_is_told():
    with pytest.raises(InputError, match="no address of this machine"):
        open_socket("absent.invalid", 0)
    with pytest.raises(InputError, match="cannot be used"):
        open_socket("192.0.2.1", 0)  # nobody has it


def test_the_printed_address_can_be_opened():
    assert address_of("127.0.0.1", 8000, Admission()) == "http://127.0.0.1:8000/"
    assert address_of("::1", 8000, Admission()) == "http://[::1]:8000/"
    admission = Admission.of("0.0.0.0", 8000)
    address = address_of("0.0.0.0", 8000, admission)
    assert address == f"http://{socket.gethostname()}:8000/?token={admission.token}"
    assert admission.knows(f"{socket.gethostname()}:8000")
