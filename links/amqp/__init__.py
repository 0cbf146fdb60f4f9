"""AMQP 1.0: RabbitMQ 4 (tested), and by the standard others. Needs python-qpid-proton (the extra `amqp`).

A broker without a server, for tests and first steps, is `EmbeddedBroker`.
"""

try:
    import proton  # noqa: F401  # pyright: ignore[reportUnusedImport] -- what is missing is called by its name
except ModuleNotFoundError as missing:
    raise ImportError(
        'links.amqp needs python-qpid-proton: pip install "trio-settlement[amqp]"', name="proton"
    ) from missing

from links.amqp.addresses import Queue as Queue
from links.amqp.addresses import Raw as Raw
from links.amqp.addresses import Topic as Topic
from links.amqp.broker import AmqpBroker as AmqpBroker
from links.amqp.embedded.broker import EmbeddedBroker as EmbeddedBroker
from links.amqp.embedded.broker import QueuePolicy as QueuePolicy
from links.amqp.publisher import AmqpPublisher as AmqpPublisher
from links.amqp.source import AmqpSource as AmqpSource
from settlement.amqp import AT_LEAST_ONCE as AT_LEAST_ONCE
from settlement.amqp import AT_MOST_ONCE as AT_MOST_ONCE
