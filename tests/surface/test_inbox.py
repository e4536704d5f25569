import asyncio

import pytest

from trivet.surface.inbox import BodyTooLargeError, Inbox

GONE = {"type": "http.disconnect"}


def part(body: bytes, *, more: bool = False) -> dict:
    return {"type": "http.request", "body": body, "more_body": more}


class Connection:
    """The server's side: messages as they come, then silence until the client leaves."""

    def __init__(self, *messages: dict) -> None:
        self.messages = list(messages)
        self.left = asyncio.Event()
        self.asked = 0

    async def __call__(self) -> dict:
        self.asked += 1
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        return GONE


async def test_a_body_is_put_together_and_given_on_as_one_message():
    inbox = Inbox(Connection(part(b"ab", more=True), part(b"", more=True), part(b"cd")))
    assert await inbox.body(100) == b"abcd"
    assert await inbox() == part(b"abcd")
    await inbox.close()


async def test_a_message_may_leave_out_what_is_empty():
    inbox = Inbox(Connection({"type": "http.request"}))
    assert await inbox.body(0) == b""
    assert await inbox() == part(b"")


@pytest.mark.parametrize("messages", [[], [part(b"ab", more=True)]])
async def test_a_client_that_leaves_before_the_end_of_its_body_has_none(messages):
    assert await Inbox(Connection(*messages, GONE)).body(100) is None


@pytest.mark.parametrize("sizes", [[4], [2, 2], [1, 1, 1, 1]])
async def test_a_body_that_is_too_large_is_not_read_to_its_end(sizes):
    parts = [part(b"x" * size, more=True) for size in sizes]
    connection = Connection(*parts, part(b"never read"))
    with pytest.raises(BodyTooLargeError):
        await Inbox(connection).body(3)
    assert connection.messages == [part(b"never read")]


async def test_a_body_may_be_as_large_as_allowed():
    assert await Inbox(Connection(part(b"xx", more=True), part(b"x"))).body(3) == b"xxx"


async def test_the_next_message_is_that_the_client_has_left():
    connection = Connection(part(b""))
    inbox = Inbox(connection)
    await inbox.body(1)
    await inbox()
    waiting = asyncio.create_task(inbox())
    await asyncio.sleep(0)
    assert not waiting.done()
    connection.left.set()
    assert await waiting == GONE
    assert await inbox() == GONE


async def test_all_who_wait_for_the_client_to_leave_are_told_and_the_server_is_asked_once():
    connection = Connection(part(b""))
    inbox = Inbox(connection)
    await inbox.body(1)
    waiting = [asyncio.create_task(inbox.left()) for _ in range(3)]
    await asyncio.sleep(0)
    connection.left.set()
    await asyncio.gather(*waiting)
    assert connection.asked == 2


async def test_one_who_waits_no_longer_does_not_stop_the_others():
    connection = Connection(part(b""))
    inbox = Inbox(connection)
    await inbox.body(1)
    first, second = (asyncio.create_task(inbox.left()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not second.done()
    connection.left.set()
    await second


async def test_closing_ends_what_still_listens():
    before = asyncio.all_tasks()
    inbox = Inbox(Connection(part(b"")))
    await inbox.body(1)
    waiting = asyncio.create_task(inbox.left())
    await asyncio.sleep(0)
    await inbox.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await inbox.close()
    assert asyncio.all_tasks() == before


async def test_closing_what_nobody_listened_to_is_nothing():
    connection = Connection(part(b""))
    inbox = Inbox(connection)
    await inbox.body(1)
    await inbox.close()
    assert connection.asked == 1


async def test_messages_of_other_kinds_are_passed_over():
    connection = Connection(part(b""), {"type": "http.request"}, {"type": "http.something"}, GONE)
    inbox = Inbox(connection)
    await inbox.body(1)
    await inbox.left()
    assert connection.messages == []


async def test_a_body_that_was_given_on_is_not_kept():
    inbox = Inbox(Connection(part(b"ab")))
    await inbox.body(100)
    assert await inbox() == part(b"ab")
    assert inbox._body is None
    await inbox.close()
