"""proton's own blocking client. `python blocking.py URL ADDRESS produce|consume COUNT`; a JSON line for each fact.

consume 0: until the other side detaches the link.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import count as numbers
from typing import Any

from proton import Message, symbol
from proton.utils import BlockingConnection, LinkDetached


def tell(**fact: object) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def produce(connection: BlockingConnection, address: str, count: int) -> None:
    sender = connection.create_sender(address)
    for n in range(count):
        sender.send(
            Message(
                id=f"id-{n}",
                subject="interop",
                annotations={symbol("x-opt-lane"): "fast"},
                properties={"n": n, "name": "Zoë", "urgent": True},
                body=(b"%d." % n * 1024)[:1024],
                inferred=True,
            )
        )
    tell(sent=count)


def consume(connection: BlockingConnection, address: str, count: int) -> None:
    receiver = connection.create_receiver(address, credit=10)
    tell(attached=True)
    try:
        for _ in range(count) if count else numbers():
            message: Any = receiver.receive(timeout=60)
            tell(
                n=message.properties["n"],
                hash=hashlib.sha256(bytes(message.body)).hexdigest(),
                message_id=message.id,
                subject=message.subject,
                durable=message.durable,
                priority=message.priority,
                delivery_count=message.delivery_count,
                message_annotations={str(name): value for name, value in message.annotations.items()},
                application_properties=message.properties,
            )
            receiver.accept()
    except LinkDetached as error:
        if count:
            raise
        tell(detached=error.condition)


if __name__ == "__main__":
    url, address, program, most = sys.argv[1:]
    connection = BlockingConnection(url, timeout=60, allowed_mechs="ANONYMOUS")
    {"produce": produce, "consume": consume}[program](connection, address, int(most))
    connection.close()
