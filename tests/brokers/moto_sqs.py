"""A program that stands in for SQS: moto's server, mended where it is not what AWS documents of FIFO queues.

``back`` is the service: moto with its queues and messages in memory. It lives as long as the test run, as AWS lives on
while we are cut off from it. ``front`` is the way to it, a relay of bytes on a port that is kept: that one is stopped,
killed and paused. An answer that is under way when the front dies is lost, as in a network: the request was done.

What is mended, and nothing else:

* moto gives back a group whose messages became visible again with its last message first: the group is found free
  only when the last of them is looked at. Here the order is that in which they were sent, always.
* moto looks once, when a request begins to wait, at which groups are in flight: a request that waits gets the second
  message of a group while somebody has the first. Here it is looked at when messages are handed out, under a lock.
* moto loses a message that is sent while another is deleted (the list is written anew). Here both take the lock.
* moto deletes by a receipt whose visibility time-out has run out. AWS refuses that on FIFO queues, and so do we.

Harsher than AWS, and left so: moto forgets a deduplication id when the message is deleted, AWS only after five minutes.

Beside SQS the back takes orders from tests, on /stand-in/...: see ``Orders``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

BYTES_AT_ONCE = 65_536


class Orders:
    """What a test asked for: requests that are answered otherwise, entries that fail."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []  # operation, status, code, message, times, done (do it all the same)
        self.entries: dict[str, dict[str, Any]] = {}  # by message group: the entry's Failed
        self.copies: dict[str, str] = {}  # by queue: another that gets a copy of what is sent to it, as by SNS
        self.pauses: dict[str, float] = {}  # by operation: the seconds that it takes
        self.calls: list[str] = []  # operations, in order
        self.key = ""  # who made the last request

    def obey(self, what: str, order: Any) -> Any:
        """Take one order; what it answers."""
        if what == "answers":
            self.answers = order
        elif what == "entries":
            self.entries = order
        elif what == "pauses":
            self.pauses = order
        elif what == "copies":
            self.copies |= order
        elif what == "expire":
            return {"expired": _expire()}
        elif what == "key":
            return self.key
        elif what == "calls":
            said, self.calls = self.calls, []
            return said
        return {}

    def answer_for(self, operation: str) -> dict[str, Any] | None:
        """The answer that a test wants for this request, if any."""
        for answer in self.answers:
            if answer["operation"] in (operation, "*") and answer.get("times", 1) > 0:
                answer["times"] = answer.get("times", 1) - 1
                return answer
        return None


def _expire() -> int:
    """Every visibility time-out runs out now."""
    from moto.sqs.models import sqs_backends

    expired = 0
    for account in sqs_backends.values():
        for backend in account.values():
            for queue in backend.queues.values():
                with queue._messages_lock:
                    for message in queue._messages:
                        expired += not message.visible
                        message.visible_at = 0.0
    return expired


def mend(orders: Orders) -> None:
    """Put our own code in the place of moto's, for FIFO queues."""
    from moto.sqs.exceptions import ReceiptHandleIsInvalid
    from moto.sqs.models import Queue, SQSBackend, _filter_message_attributes, sqs_backends

    receive, send_batch = SQSBackend.receive_message, SQSBackend.send_message_batch
    change, add, delete = SQSBackend.change_message_visibility, Queue.add_message, Queue.delete_message

    def receive_in_order(
        self: Any, queue_name: str, count: int, wait: int, visibility: int, names: list[str] | None = None
    ) -> Any:
        queue = self.get_queue(queue_name)
        if not queue.fifo_queue:
            return receive(self, queue_name, count, wait, visibility, names)
        until = time.monotonic() + wait
        while True:
            with queue._messages_lock:
                found = _hand_out(queue, count, visibility)
                left = until - time.monotonic()
                if found or left <= 0:
                    break
                queue._messages_lock.wait(min(left, 0.05))
        for message in found:
            _filter_message_attributes(message, names or [])
        return found

    def check_receipt(queue: Any, receipt: str) -> None:
        in_flight = (one.receipt_handle for one in queue._messages if not one.visible)
        if queue.fifo_queue and receipt not in queue.deleted_messages and receipt not in in_flight:
            raise ReceiptHandleIsInvalid

    def add_locked(self: Any, message: Any) -> None:
        copy = deepcopy(message)
        with self._messages_lock:
            add(self, message)
        if copies := orders.copies.get(self.name):
            sqs_backends[self.account_id][self.region].get_queue(copies).add_message(copy)

    def delete_current(self: Any, receipt_handle: str) -> None:
        with self._messages_lock:
            check_receipt(self, receipt_handle)
            delete(self, receipt_handle)

    def change_current(self: Any, queue_name: str, receipt_handle: str, visibility_timeout: int) -> None:
        queue = self.get_queue(queue_name)
        with queue._messages_lock:
            check_receipt(queue, receipt_handle)
            change(self, queue_name, receipt_handle, visibility_timeout)

    def send_some(self: Any, queue_name: str, entries: dict[str, dict[str, Any]]) -> Any:
        failing = {key: entry for key, entry in entries.items() if entry.get("MessageGroupId") in orders.entries}
        rest = {key: entry for key, entry in entries.items() if key not in failing}
        sent, failed = send_batch(self, queue_name, rest)
        asked = [{"Id": one["Id"], **orders.entries[one["MessageGroupId"]]} for one in failing.values()]
        return sent, failed + asked

    SQSBackend.receive_message, SQSBackend.send_message_batch = receive_in_order, send_some
    SQSBackend.change_message_visibility = change_current
    Queue.add_message, Queue.delete_message = add_locked, delete_current


def _hand_out(queue: Any, count: int, visibility: int) -> list[Any]:
    """The first messages of groups of which none is in flight, as they were sent; the caller has the lock."""
    locked = {message.group_id for message in queue._messages if not message.visible}
    found: list[Any] = []
    for message in queue._messages:
        if message.delayed:
            locked.add(message.group_id)
        if message.group_id not in locked and len(found) < count:
            message.mark_received(visibility_timeout=visibility)
            found.append(deepcopy(message))
    return found


class Application:
    """The WSGI application: orders of tests, answers that they asked for, and moto behind."""

    def __init__(self, moto: Callable[..., Iterable[bytes]], orders: Orders) -> None:
        self.moto = moto
        self.orders = orders

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        path = environ["PATH_INFO"]
        if path.startswith("/stand-in/"):
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            said = self.orders.obey(path.removeprefix("/stand-in/"), json.loads(body or b"null"))
            return _write(start_response, 200, said)
        operation = environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
        self.orders.calls.append(operation)
        self.orders.key = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        time.sleep(self.orders.pauses.get(operation, 0))
        answer = self.orders.answer_for(operation)
        if answer is None:
            return self.moto(environ, start_response)
        if answer.get("done"):
            b"".join(self.moto(environ, lambda *given: None))
        return _write(
            start_response, answer["status"], {"__type": answer["code"], "message": answer.get("message", "")}
        )


def _write(start_response: Callable[..., Any], status: int, said: Any) -> list[bytes]:
    body = json.dumps(said).encode()
    headers = [("Content-Type", "application/x-amz-json-1.0"), ("Content-Length", str(len(body)))]
    start_response(f"{status} {'OK' if status == 200 else 'Error'}", headers)
    return [body]


def serve_back(port: int) -> None:
    """Be SQS."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    orders = Orders()
    mend(orders)
    application = Application(DomainDispatcherApplication(create_backend_app), orders)
    server = make_server("127.0.0.1", port, application, threaded=True, request_handler=MotoRequestHandler)
    server.serve_forever()


async def serve_front(port: int, back: int) -> None:
    """Carry bytes between a port and the back, until somebody ends this process."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while read := await reader.read(BYTES_AT_ONCE):
                writer.write(read)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", back)
        await asyncio.gather(carry(reader, back_writer), carry(back_reader, writer))

    line = socket.create_server(("127.0.0.1", port), backlog=128)
    server = await asyncio.start_server(connect, sock=line)
    await server.serve_forever()


def main() -> None:
    """``back PORT``, or ``front PORT BACK``."""
    if sys.argv[1] == "back":
        serve_back(int(sys.argv[2]))
    else:
        asyncio.run(serve_front(int(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
