"""An AMQP 1.0 broker, as a user has it: what there is on it, by name."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from links.amqp.addresses import Address, Queue, Raw, Topic
from links.amqp.connecting_broker import ConnectingBroker
from links.amqp.management import Management, management
from links.amqp.publisher import AmqpPublisher
from links.amqp.source import AmqpSource
from settlement.amqp import AT_LEAST_ONCE, Delays, Settle
from settlement.delays import Copies

__all__ = ["AmqpBroker"]

_COPIES = Copies()


class AmqpBroker(ConnectingBroker):
    """A broker, by its URL, or by several of which one is tried after the other.

    `url`: `amqp://[user:password@]host[:port][/vhost]`, or `amqps://` for TLS. `sasl`: "anonymous", "plain" or
    "external", pinned; None: plain where there is a user, else anonymous. `password`: instead of the URL's; a
    function is called, and awaited, for each connection. `plain_text`: a password may go to another machine without
    TLS. `ssl_context`: instead of Python's default, which checks the certificate and the host name. `container_id`:
    what this client calls itself. `heartbeat`: seconds of silence after which the connection is taken for dead, above
    0 (RabbitMQ: 2 or more), noticed within twice as long. `durable`: what is published outlives the broker's restart,
    by a header section. `retry_header`: the application property in which copies count. `connect`: how to get a
    stream to the peer instead of dialling the URL (a tunnel, `EmbeddedBroker.connect`); an `OSError` of it is
    weather.

    Raises `ValueError` that names the argument and its legal range; the password is in no error, log or repr.
    """

    def queue(
        self,
        name: str,
        *,
        delays: Delays = _COPIES,
        settle: Settle = AT_LEAST_ONCE,
        credit: int | None = None,
        count: str = "broker",
    ) -> AmqpSource:
        """A queue: `/queues/<name>` on RabbitMQ, the name itself elsewhere. No I/O.

        `delays`: who keeps a message while `RetryAfter` runs (`settlement.amqp`). `settle`: `AT_LEAST_ONCE`, or
        `AT_MOST_ONCE`: accepted on arrival. `credit`: how many deliveries may be unsettled at once, 1 or more; None:
        2 × concurrency (× size). `count`: "broker"; or "copies" where the broker does not count redeliveries and does
        not say so: then a capped `Retry` publishes a copy. Raises `ValueError` that names the argument.
        """
        return AmqpSource(self, Queue(name), delays=delays, settle=settle, credit=credit, count=count)

    def topic(
        self,
        name: str,
        *,
        delays: Delays = _COPIES,
        settle: Settle = AT_LEAST_ONCE,
        credit: int | None = None,
        count: str = "broker",
    ) -> AmqpSource:
        """A topic: every subscription gets each message that is published while it is attached. As `queue`."""
        return AmqpSource(self, Topic(name), delays=delays, settle=settle, credit=credit, count=count)

    def raw(
        self,
        address: str,
        *,
        delays: Delays = _COPIES,
        settle: Settle = AT_LEAST_ONCE,
        credit: int | None = None,
        count: str = "broker",
    ) -> AmqpSource:
        """An address as it stands, without a capability. As `queue`."""
        return AmqpSource(self, Raw(address), delays=delays, settle=settle, credit=credit, count=count)

    def publisher(self, to: str | Address) -> AmqpPublisher:
        """A publisher to a queue, by its name, or to a `Topic(name)` or `Raw(address)`. No I/O.

        Raises `ValueError` for an empty name.
        """
        return AmqpPublisher(self, to if isinstance(to, Address) else Queue(to))

    @asynccontextmanager
    async def management(self) -> AsyncGenerator[Management, None]:
        """RabbitMQ's management: `queue`, `declare`, `delete`, `purge`, `bind`, `count`; for set-up and tests.

        Raises `LinkRefused` where the peer is no RabbitMQ from 4.0 on; `NotConnected`, `ConnectionBroken`,
        `LinkBroken`. Cancellation: as the end of the block.
        """
        await self.until_up()
        async with management(self.life.connection) as manage:
            yield manage
