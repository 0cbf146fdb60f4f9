"""What we know of a peer and of its queues, and what follows from it. Pure.

RabbitMQ is the peer whose queues differ: some count deliveries and some do not, and a quorum queue throws away on its
own what was delivered too often. What is not known here counts as the weaker of two, so that a message is copied once
too often rather than tried for ever. Each fact was tried on 4.0.5 and 4.3.6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, cast

import attrs

__all__ = ["IS_A_STREAM", "Peer", "QueueInfo", "advice", "counts", "delays_natively", "queue_info"]

IS_A_STREAM: Final = (
    "a stream gives nothing back: what is retried or left unsettled never comes again. Take from a quorum or classic "
    "queue, bound to the same exchange, or read the stream by a client of streams"
)
DEFAULT_DELIVERY_LIMIT: Final = 20
"""That of a quorum queue whose arguments say nothing, from 4.0 on."""

_RABBITMQ: Final = "RabbitMQ"
_EMBEDDED: Final = "trio-settlement embedded"
"""What `links.amqp.embedded` says that it is."""
_NO_ARGUMENTS: Final[Mapping[str, object]] = MappingProxyType({})
_NUMBERS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})*")
_FIRST_WITH_MODIFIED: Final = (4,)
_FIRST_WITH_DELAY: Final = (4, 3)
_FIRST_COUNTING_CLASSIC: Final = (4, 3)


@attrs.frozen
class Peer:
    """Who is at the other end of a connection, by its own word.

    Attributes:
        product: What it is, such as `RabbitMQ`; empty, the default: it does not say.
        release: Its version as it says it, such as `4.3.6`; empty, the default: it does not say.
    """

    product: str = ""
    release: str = ""

    @classmethod
    def of(cls, properties: Mapping[str, object]) -> Peer:
        """Take it from the properties with which the peer opened the connection (`Opened.properties`)."""
        product, release = properties.get("product"), properties.get("version")
        return cls(product if isinstance(product, str) else "", release if isinstance(release, str) else "")

    @property
    def name(self) -> str:
        """For messages, such as `RabbitMQ 4.3.6`."""
        return f"{self.product} {self.release}".strip() or "a peer that does not say what it is"

    @property
    def version(self) -> tuple[int, ...]:
        """The numbers that the release begins with; none where it begins with something else."""
        found = _NUMBERS.match(self.release)
        return tuple(int(number) for number in found[0].split(".")) if found else ()

    @property
    def is_rabbitmq(self) -> bool:
        """Is it a RabbitMQ?"""
        return self.product == _RABBITMQ

    @property
    def is_embedded(self) -> bool:
        """Is it our own embedded broker?"""
        return self.product == _EMBEDDED

    @property
    def too_old(self) -> bool:
        """Is it a RabbitMQ before 4.0? It ends the session on any *modified*. One without a version is not."""
        return self.is_rabbitmq and () < self.version < _FIRST_WITH_MODIFIED


@attrs.frozen
class QueueInfo:
    """What RabbitMQ says of one of its queues. Its policies stand in none of it: `/management` does not show them.

    Attributes:
        name: Its name.
        kind: `quorum`, `classic`, `stream`, or what a plugin calls its own; empty: not said.
        arguments: Those that it was declared with, such as `x-delivery-limit`.
        delivery_limit: After so many failed deliveries, 0 or more, and one more, the broker discards a message, or
            dead-letters it; None: never.
        dead_letter: Where the broker puts what is rejected or over the limit, in words; None: it is gone.
    """

    name: str
    kind: str
    arguments: Mapping[str, object]
    delivery_limit: int | None
    dead_letter: str | None


def queue_info(answer: Mapping[str, object]) -> QueueInfo:
    """Read what `/management` answers to `GET /queues/:name`. What is missing there, or of another type, is empty."""
    name, kind, arguments = answer.get("name"), answer.get("type"), answer.get("arguments")
    named = cast("Mapping[str, object]", arguments) if isinstance(arguments, Mapping) else _NO_ARGUMENTS
    found = kind if isinstance(kind, str) else ""
    limit, dead_letter = _delivery_limit(found, named), _dead_letter(named)
    return QueueInfo(name if isinstance(name, str) else "", found, named, limit, dead_letter)


def _delivery_limit(kind: str, arguments: Mapping[str, object]) -> int | None:
    if kind != "quorum":
        return None  # the others refuse the argument
    limit = arguments.get("x-delivery-limit")
    if not isinstance(limit, int) or isinstance(limit, bool):
        return DEFAULT_DELIVERY_LIMIT  # one that is a text is taken and passed over: 4.3 limits by 20, 4.0 not at all
    return limit if limit >= 0 else None


def _dead_letter(arguments: Mapping[str, object]) -> str | None:
    exchange, key = arguments.get("x-dead-letter-exchange"), arguments.get("x-dead-letter-routing-key")
    if not isinstance(exchange, str):
        return None
    if not isinstance(key, str):
        return f"exchange {exchange!r}"
    return f"exchange {exchange!r}, key {key!r}" if exchange else f"queue {key!r}"


def counts(peer: Peer, kind: str | None) -> bool:
    """Does the delivery-count of a message in such a queue grow with *modified*, delivery-failed?

    False, so that copies count: RabbitMQ's classic queues before 4.3 (it stays 0), its streams (they never deliver
    again), its queues of a kind that is not known (None: not read), and any queue of one without a version.
    """
    if not peer.is_rabbitmq:
        return True
    if kind == "quorum":
        return peer.version >= _FIRST_WITH_MODIFIED
    return kind == "classic" and peer.version >= _FIRST_COUNTING_CLASSIC


def delays_natively(peer: Peer, kind: str | None) -> bool:
    """Does such a queue keep a *modified* message back until its `x-opt-delivery-time`?"""
    return peer.is_embedded or (peer.is_rabbitmq and kind == "quorum" and peer.version >= _FIRST_WITH_DELAY)


def advice(info: QueueInfo, *, max_attempts: int | None, has_dead_letter: bool) -> str | None:
    """The warning for a queue that throws messages away on its own; None: there is none.

    No cap and no dead letter of ours prevents it: the broker counts also what ends without an outcome (the
    process died, the connection broke; on 4.0 a detach, too), and everything that was in hand beside a message that
    kills its process. `max_attempts` says whether the retries of a handler alone get there as well: a limit of L allows
    L + 1 deliveries. Nothing is lost, and nothing is said, where the queue itself has a dead-letter target.
    """
    limit = info.delivery_limit
    if limit is None or info.dead_letter is not None:
        return None
    tries = "1 try" if limit == 0 else f"{limit + 1} tries"
    if max_attempts is None:
        ours = "" if has_dead_letter else "; retries use them up, since there is no max_attempts"
    elif limit < max_attempts:
        ours = f"; retries use them up before max_attempts={max_attempts} is reached"
    else:
        ours = ""
    return (
        f"queue {info.name!r}: RabbitMQ discards a message after {tries} (delivery limit {limit}) and has no dead "
        "letter for it; a crash or a broken connection uses up a try of everything that was in hand, whatever "
        f"max_attempts is{ours}: declare the queue with x-dead-letter-exchange, or with x-delivery-limit -1 (none). A "
        "RabbitMQ policy that says otherwise cannot be seen from here"
    )
