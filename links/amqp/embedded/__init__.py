"""An AMQP 1.0 broker in this process: `EmbeddedBroker`. What it keeps is pure; what it says goes over the real wire."""

from links.amqp.embedded.broker import EmbeddedBroker as EmbeddedBroker
from links.amqp.embedded.store import QueuePolicy as QueuePolicy
