"""Pictures are kept within bounds, and made once for all who ask."""

import asyncio
import threading

import pytest

from tapfm.viewer.pictures import SlideReaders
from tapfm.viewer.pictures import _PictureCache as PictureCache


def test_the_least_recently_used_pictures_are_let_go():
    kept = PictureCache(most_bytes=10)
    kept.put("a", b"1234")
    kept.put("b", b"1234")
    assert kept.get("a") == b"1234"
    kept.put("c", b"123")
    assert kept.get("b") is None
    assert kept.get("a") == b"1234"
    assert kept.get("c") == b"123"
    kept.put("a", b"1")
    assert kept.bytes == 4
    kept.put("too large", bytes(11))
    assert kept.bytes == 0
    assert kept.get("too large") is None


@pytest.fixture
def reading():
    reading = SlideReaders(threads=4)
    yield reading
    reading.close()


def test_a_picture_that_several_ask_for_is_made_once(reading):
    made, go_on = [], threading.Event()

    def make():
        made.append(1)
        assert go_on.wait(20)
        return b"picture"

    async def ask_eight_times():
        asking = [asyncio.ensure_future(reading.picture("key", make)) for _ in range(8)]
        await asyncio.sleep(0)
        asking[0].cancel()  # one who leaves does not take it from the others
        go_on.set()
        return await asyncio.gather(*asking[1:])

    assert asyncio.run(ask_eight_times()) == [b"picture"] * 7
    assert made == [1]
    assert asyncio.run(reading.picture("key", make)) == b"picture"
    assert made == [1]


def test_what_failed_is_tried_again(reading):
    async def ask(make):
        return await reading.picture("key", make)

    def fail():
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        asyncio.run(ask(fail))
    assert asyncio.run(ask(lambda: b"picture")) == b"picture"


def test_eight_pictures_are_made_side_by_side():
    reading = SlideReaders(threads=8)
    together = threading.Barrier(8, timeout=20)

    async def ask():
        return await asyncio.gather(*(reading.picture(number, lambda: bytes([together.wait()])) for number in range(8)))

    assert sorted(asyncio.run(ask())) == [bytes([number]) for number in range(8)]
    reading.close()
