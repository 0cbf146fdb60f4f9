"""RabbitMQ's `/management` over AMQP 1.0 (from 4.0 on): what a queue is like, and declare, delete, purge, bind.

A request and its response are HTTP written as messages, on two links that have one name and are a pair:

    | | properties | body |
    |---|---|---|
    | request | message-id; to: the path; subject: the verb; reply-to `$me` | an amqp-value: a map, or null (not none) |
    | response | correlation-id; subject: the status | an amqp-value: a map, a null, or a text that says why not |

The response needs a credit that the broker knew before the request, else it ends the session. It ends it as well where
the user lacks a permission.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Final, cast
from urllib.parse import quote

import attrs
import trio

from links.amqp.engine.client_connection import ClientConnection
from links.amqp.engine.events import Terminus
from links.amqp.engine.session import Session
from links.amqp.rabbitmq import Peer, QueueInfo, queue_info
from links.amqp.wire.sections import PROPERTIES, VALUE, split, walk
from links.amqp.wire.values import LIST, MAP, NULL, Undecodable, compound, items, scalar, string
from links.errors import LinkBroken, LinkRefused

__all__ = ["Management", "management"]

PATIENCE: Final = 10.0
"""Seconds for which an answer is waited for."""
_ADDRESS: Final = "/management"
_PAIR: Final = {"paired": True}
_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})
_NULL = bytes((NULL,))
_TRUE, _FALSE, _LONG = b"\x41", b"\x42", b"\x81"
_LONGS = range(-(2**63), 2**63)
_MAPS = (MAP, 0xD1)
"""With a size of one byte, of four."""
_SUCCESS = range(200, 300)
_LOST = ("", ".", "..")
_AGAIN: Final = "the broker is busy or stuck, try again"


@asynccontextmanager
async def management(connection: ClientConnection) -> AsyncGenerator[Management, None]:
    """A client of the peer's management, for the block, on a session of its own. Wait for `connection.opened()` first.

    Raises `LinkRefused` where the peer is no RabbitMQ from 4.0 on (another one may take `/management` for a queue) or
    allows no more sessions, `LinkBroken` where it does not answer within 10 s, `ConnectionBroken`. An exception of the
    block leaves bare.

    Cancellation: as the end of the block: the session is ended, nothing is waited for.
    """
    peer = Peer.of((await connection.opened()).properties)
    if not peer.is_rabbitmq or peer.too_old:
        raise LinkRefused(f"{_ADDRESS}: {peer.name} has none; it takes RabbitMQ 4.0 or later")
    session = await connection.begin()
    try:
        manage = Management(connection, session)
        await manage.attached()
        yield manage
    finally:
        session.end()


class Management:
    """Asks the management of one RabbitMQ; made by `management`. Tasks that share it take turns.

    Every coroutine raises `LinkRefused` with the broker's reason where it says no; `LinkBroken` where no answer comes
    within 10 s, the answer cannot be read, or the broker ends the session (the user lacks a permission); and
    `ConnectionBroken`.

    Cancellation: what was asked for is done or not.
    """

    def __init__(self, connection: ClientConnection, session: Session) -> None:
        self._connection = connection
        self._receiver = connection.attach_receiver(
            session, Terminus(_ADDRESS), target=_ADDRESS, name=_ADDRESS, properties=_PAIR, presettled=True
        )
        self._sender = connection.attach_sender(
            session, Terminus(_ADDRESS), source=_ADDRESS, name=_ADDRESS, properties=_PAIR, presettled=True
        )
        self._numbers = itertools.count(1)
        self._turn = trio.Lock()

    @property
    def is_broken(self) -> bool:
        """Can nothing be asked here any more?"""
        return self._receiver.broken is not None or self._sender.broken is not None

    async def attached(self) -> None:
        """Wait until both links are attached."""
        with trio.move_on_after(PATIENCE):
            await self._receiver.attached()
            await self._sender.attached()
            return
        raise LinkBroken(f"{_ADDRESS}: no answer to the attach within {PATIENCE:g} s; {_AGAIN}")

    async def queue(self, name: str) -> QueueInfo:
        """What a queue is like. Raises `LinkRefused` where there is none of this name."""
        return queue_info(await self._get(name))

    async def count(self, name: str) -> int:
        """How many messages of a queue are ready. Raises as `queue`. That of a stream lags, and may stay 0."""
        found = (await self._get(name)).get("message_count")
        if not isinstance(found, int):
            raise LinkBroken(f"queue {name!r}: {_ADDRESS} does not say how many messages it has")
        return found

    async def declare(self, name: str, *, kind: str = "quorum", arguments: Mapping[str, object] = _NOTHING) -> None:
        """Declare a durable queue; nothing happens where there is the same one.

        The values of arguments are bool, int and str. Raises `LinkRefused` where there is one with other arguments, or
        RabbitMQ does not take these; `ValueError` for a value that is none of the three.
        """
        asked = {"durable": True, "arguments": {**arguments, "x-queue-type": kind}}
        hint = "declare it as it is, delete it first, or mend the arguments"
        await self._ask(f"queue {name!r} was not declared", "PUT", _path(name), asked, hint=hint)

    async def delete(self, name: str) -> None:
        """Delete a queue with all that is in it; nothing happens where there is none."""
        await self._ask(f"queue {name!r} was not deleted", "DELETE", _path(name), hint="correct its name")

    async def purge(self, name: str) -> None:
        """Throw away what is ready in a queue. Raises `LinkRefused` where there is none, and for a stream."""
        hint = "correct its name; a stream cannot be purged, delete and declare it"
        await self._ask(f"queue {name!r} was not purged", "DELETE", f"{_path(name)}/messages", hint=hint)

    async def bind(self, queue: str, exchange: str, key: str) -> None:
        """Bind a queue to an exchange; nothing happens where it is bound. Raises `LinkRefused` where one is missing."""
        asked = {"source": exchange, "destination_queue": queue, "binding_key": key, "arguments": _NOTHING}
        what = f"queue {queue!r} was not bound to exchange {exchange!r}"
        await self._ask(what, "POST", "/bindings", asked, hint="declare both first, or correct their names")

    async def _get(self, name: str) -> Mapping[str, object]:
        hint = "declare it, or correct its name or the virtual host"
        return await self._ask(f"queue {name!r}", "GET", _path(name), hint=hint)

    async def _ask(
        self, what: str, verb: str, path: str, fields: Mapping[str, object] | None = None, *, hint: str
    ) -> Mapping[str, object]:
        number = str(next(self._numbers))
        raw = request(number, verb, path, fields)
        async with self._turn:
            try:
                answer = await self._answer(number, raw)
            except (LinkBroken, Undecodable) as error:
                raise LinkBroken(f"{what}: {error}") from error
        if answer is None:
            raise LinkBroken(f"{what}: no answer from {_ADDRESS} within {PATIENCE:g} s; {_AGAIN}")
        if answer.status not in _SUCCESS:
            raise LinkRefused(f"{what}: {answer.reason} ({answer.status}); {hint}")
        return answer.fields

    async def _answer(self, number: str, raw: bytes) -> Response | None:
        with trio.move_on_after(PATIENCE):
            self._receiver.grant(1)
            await self._connection.written()  # in one flush the engine would write the credit behind the request
            await self._sender.send(raw)
            while True:
                for arrival in await self._receiver.receive(1):
                    found = response_to(number, arrival.raw)
                    if found is not None:
                        return found
        return None


# --- HTTP as messages


@attrs.frozen
class Response:
    """What the broker said.

    Attributes:
        status: That of HTTP, 100 to 599.
        fields: A map of the body, and in it `arguments` as a map; what else is no single value is an `Other`. Empty
            where the body is no map.
        reason: The body where it is a text; else empty.
    """

    status: int
    fields: Mapping[str, object]
    reason: str


def request(number: str, verb: str, path: str, fields: Mapping[str, object] | None) -> bytes:
    """A request as a message. Raises `ValueError` for a value that is no bool, int of 64 bits, str or map."""
    listed = string(number.encode()), _NULL, string(path.encode()), string(verb.encode()), string(b"$me")
    properties = compound(LIST, len(listed), b"".join(listed))
    return b"\x00\x53%c%b\x00\x53%c%b" % (PROPERTIES, properties, VALUE, _NULL if fields is None else _map(fields))


def response_to(number: str, raw: bytes) -> Response | None:
    """Read a response; None: to another request, one that nobody waits for any more. Raises `Undecodable`."""
    properties = split(raw).properties
    if properties.correlation_id != number:
        return None
    status = properties.subject
    if not isinstance(status, str) or not re.fullmatch("[1-5][0-9][0-9]", status):
        raise Undecodable(f"a response of {_ADDRESS} has no status")
    fields: dict[str, object] = {}
    reason = ""
    for code, _, at, _ in walk(raw):
        if code == VALUE and raw[at] in _MAPS:
            fields = {name: _value_of(raw, value) for name, value in items(raw, at).items()}
        elif code == VALUE:
            value = scalar(raw, at)
            reason = value if isinstance(value, str) else ""
    return Response(int(status), fields, reason)


def _value_of(raw: bytes, at: int) -> object:
    if raw[at] not in _MAPS:
        return scalar(raw, at)
    return {name: scalar(raw, value) for name, value in items(raw, at).items()}


def _map(fields: Mapping[str, object]) -> bytes:
    parts = [part for name, value in fields.items() for part in (string(name.encode()), _encoded(name, value))]
    return compound(MAP, len(parts), b"".join(parts))


def _encoded(name: str, value: object) -> bytes:
    match value:
        case bool():
            return _TRUE if value else _FALSE
        case int() if value in _LONGS:
            return _LONG + value.to_bytes(8, signed=True)
        case str():
            return string(value.encode())
        case Mapping():
            return _map(cast("Mapping[str, object]", value))
        case _:
            raise ValueError(f"{name} must be a bool, an int of 64 bits or a str, not {value!r}")


def _path(name: str) -> str:
    """The path of a queue. Raises `LinkRefused` for a name that is lost in a path: RabbitMQ resolves the dots."""
    if name in _LOST:
        raise LinkRefused(f"queue {name!r}: RabbitMQ's {_ADDRESS} takes it for a step in a path; rename the queue")
    return "/queues/" + quote(name, safe="")
