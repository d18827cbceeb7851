"""The response cache is bounded, and concurrent requests for the same image are computed once."""

import asyncio
import threading

import pytest

from tapfm.viewer.slide_images import SlideImageReader
from tapfm.viewer.slide_images import _ResponseCache as ResponseCache


def test_the_cache_drops_the_least_recently_used_images():
    cache = ResponseCache(max_bytes=10)
    cache.put("a", b"1234")
    cache.put("b", b"1234")
    assert cache.get("a") == b"1234"
    cache.put("c", b"123")
    assert cache.get("b") is None
    assert cache.get("a") == b"1234"
    assert cache.get("c") == b"123"
    cache.put("a", b"1")
    assert cache.bytes == 4
    cache.put("too large", bytes(11))
    assert cache.bytes == 0
    assert cache.get("too large") is None


@pytest.fixture
def reader():
    reader = SlideImageReader(threads=4)
    yield reader
    reader.close()


def test_concurrent_requests_for_an_image_create_it_once(reader):
    calls, may_finish = [], threading.Event()

    def create():
        calls.append(1)
        assert may_finish.wait(20)
        return b"image"

    async def request_eight_times():
        requests = [asyncio.ensure_future(reader.get_or_create("key", create)) for _ in range(8)]
        await asyncio.sleep(0)
        requests[0].cancel()  # a client that disconnects does not cancel the others
        may_finish.set()
        return await asyncio.gather(*requests[1:])

    assert asyncio.run(request_eight_times()) == [b"image"] * 7
    assert calls == [1]
    assert asyncio.run(reader.get_or_create("key", create)) == b"image"
    assert calls == [1]


def test_a_failed_image_is_tried_again(reader):
    async def request(create):
        return await reader.get_or_create("key", create)

    def fail():
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        asyncio.run(request(fail))
    assert asyncio.run(request(lambda: b"image")) == b"image"


def test_eight_images_are_created_in_parallel():
    reader = SlideImageReader(threads=8)
    barrier = threading.Barrier(8, timeout=20)

    async def request_all():
        return await asyncio.gather(
            *(reader.get_or_create(number, lambda: bytes([barrier.wait()])) for number in range(8))
        )

    assert sorted(asyncio.run(request_all())) == [bytes([number]) for number in range(8)]
    reader.close()
