"""links.amqp.rabbitmq: what is known of a peer and of its queues. Facts of RabbitMQ 4.0.5 and 4.3.6."""

from __future__ import annotations

import pytest

from links.amqp.rabbitmq import Peer, QueueInfo, advice, counts, delays_natively, queue_info

pytestmark = pytest.mark.amqp

RABBITMQ_40, RABBITMQ_43 = Peer("RabbitMQ", "4.0.5"), Peer("RabbitMQ", "4.3.6")
RABBITMQ_310, RABBITMQ_UNKNOWN = Peer("RabbitMQ", "3.10.8"), Peer("RabbitMQ", "snapshot")
EMBEDDED, ARTEMIS, NOBODY = Peer("trio-settlement embedded"), Peer("apache-activemq-artemis", "2.40.0"), Peer()


# --- peers


def test_a_peer_is_what_it_says_when_it_opens_the_connection() -> None:
    peer = Peer.of({"product": "RabbitMQ", "version": "4.3.6", "node": "rabbit@one", "cluster_name": "one"})
    assert peer == Peer("RabbitMQ", "4.3.6")
    assert (peer.name, peer.version) == ("RabbitMQ 4.3.6", (4, 3, 6))
    assert peer.is_rabbitmq
    assert not peer.is_embedded


@pytest.mark.parametrize(
    "properties", [{}, {"product": None, "version": 4}, {"product": b"RabbitMQ", "version": [4, 3]}, {"Product": "x"}]
)
def test_a_peer_that_says_nothing_of_use_is_nobody(properties: dict[str, object]) -> None:
    peer = Peer.of(properties)
    assert peer == NOBODY
    assert (peer.name, peer.version) == ("a peer that does not say what it is", ())
    assert (peer.is_rabbitmq, peer.is_embedded, peer.too_old) == (False, False, False)


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("4.3.6", (4, 3, 6)),
        ("4.3.6+1", (4, 3, 6)),
        ("4.3.0-rc.2", (4, 3, 0)),
        ("4", (4,)),
        ("4.", (4,)),
        ("10.0.12.7", (10, 0, 12, 7)),
        ("", ()),
        ("v4.3", ()),
        (" 4.3", ()),
        ("٤.٣", ()),
        ("9" * 5000, (999999999,)),
    ],
)
def test_a_version_is_the_numbers_that_the_release_begins_with(release: str, version: tuple[int, ...]) -> None:
    assert Peer("RabbitMQ", release).version == version


@pytest.mark.parametrize(
    ("peer", "too_old"),
    [
        (RABBITMQ_310, True),
        (Peer("RabbitMQ", "3"), True),
        (Peer("RabbitMQ", "4.0.0-beta.1"), False),
        (RABBITMQ_40, False),
        (RABBITMQ_UNKNOWN, False),
        (Peer("apache-activemq-artemis", "2.40.0"), False),
    ],
)
def test_a_rabbitmq_before_4_is_too_old(peer: Peer, too_old: bool) -> None:
    """DESIGN 6: any *modified* ends its session."""
    assert peer.too_old is too_old


@pytest.mark.parametrize(
    ("peer", "kind", "expected"),
    [
        (RABBITMQ_40, "quorum", True),
        (RABBITMQ_43, "quorum", True),
        (RABBITMQ_40, "classic", False),
        (RABBITMQ_43, "classic", True),
        (Peer("RabbitMQ", "4.2.9"), "classic", False),
        (Peer("RabbitMQ", "5"), "classic", True),
        (RABBITMQ_310, "quorum", False),
        (RABBITMQ_UNKNOWN, "quorum", False),
        (RABBITMQ_43, "stream", False),
        (RABBITMQ_43, "rabbit_mqtt_qos0_queue", False),
        (RABBITMQ_43, None, False),
        (EMBEDDED, None, True),
        (ARTEMIS, None, True),
        (NOBODY, None, True),
    ],
)
def test_who_counts_deliveries(peer: Peer, kind: str | None, expected: bool) -> None:
    """DESIGN 6: a peer that does not count is treated as carrying no count, so that copies count."""
    assert counts(peer, kind) is expected


@pytest.mark.parametrize(
    ("peer", "kind", "expected"),
    [
        (RABBITMQ_43, "quorum", True),
        (RABBITMQ_43, "classic", False),
        (RABBITMQ_43, "stream", False),
        (RABBITMQ_43, None, False),
        (RABBITMQ_40, "quorum", False),
        (Peer("RabbitMQ", "4.2.9"), "quorum", False),
        (RABBITMQ_UNKNOWN, "quorum", False),
        (EMBEDDED, None, True),
        (ARTEMIS, "quorum", False),
    ],
)
def test_who_keeps_a_message_until_its_time(peer: Peer, kind: str | None, expected: bool) -> None:
    """DESIGN 6: `Native()` is for quorum queues of RabbitMQ 4.3 and newer."""
    assert delays_natively(peer, kind) is expected


# --- queues


@pytest.mark.parametrize(
    ("kind", "arguments", "limit"),
    [
        ("quorum", {}, 20),
        ("quorum", {"x-delivery-limit": 5}, 5),
        ("quorum", {"x-delivery-limit": 0}, 0),
        ("quorum", {"x-delivery-limit": -1}, None),
        ("quorum", {"x-delivery-limit": -5}, None),
        ("quorum", {"x-delivery-limit": "5"}, 20),
        ("quorum", {"x-delivery-limit": True}, 20),
        ("classic", {}, None),
        ("stream", {}, None),
    ],
)
def test_the_delivery_limit_of_a_queue(kind: str, arguments: dict[str, object], limit: int | None) -> None:
    info = queue_info({"name": "orders", "type": kind, "arguments": arguments, "message_count": 3, "durable": True})
    assert info == QueueInfo("orders", kind, arguments, limit, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, None),
        ({"x-dead-letter-exchange": "dead"}, "exchange 'dead'"),
        ({"x-dead-letter-exchange": "dead", "x-dead-letter-routing-key": "orders"}, "exchange 'dead', key 'orders'"),
        ({"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.dead"}, "queue 'orders.dead'"),
        ({"x-dead-letter-exchange": ""}, "exchange ''"),
        ({"x-dead-letter-exchange": 7}, None),
    ],
)
def test_the_dead_letter_target_of_a_queue(arguments: dict[str, object], words: str | None) -> None:
    assert queue_info({"name": "orders", "type": "classic", "arguments": arguments}).dead_letter == words


@pytest.mark.parametrize("answer", [{}, {"name": 1, "type": None, "arguments": []}])
def test_an_answer_that_says_nothing_is_a_queue_of_no_kind(answer: dict[str, object]) -> None:
    assert queue_info(answer) == QueueInfo("", "", {}, None, None)


# --- advice


def queue(limit: int | None, dead_letter: str | None = None) -> QueueInfo:
    return QueueInfo("orders", "quorum", {}, limit, dead_letter)


@pytest.mark.parametrize(
    ("limit", "max_attempts", "has_dead_letter", "warns"),
    [
        (20, 19, False, True),
        (20, 20, False, True),
        (20, 20, True, True),
        (20, 21, False, True),
        (20, 22, True, True),
        (5, 4, True, True),
        (5, 5, True, True),
        (0, 1, False, True),
        (20, None, False, True),
        (20, None, True, True),
        (20, 1, True, True),
        (None, None, False, False),
        (None, 1000, False, False),
    ],
)
def test_a_limit_is_warned_of_whatever_our_cap_is(
    limit: int | None, max_attempts: int | None, has_dead_letter: bool, warns: bool
) -> None:
    """DESIGN 6: crashes spend tries too, also of what is innocent beside a message that kills its process."""
    said = advice(queue(limit), max_attempts=max_attempts, has_dead_letter=has_dead_letter)
    assert (said is not None) is warns


@pytest.mark.parametrize("max_attempts", [None, 3, 100])
def test_a_queue_with_a_dead_letter_target_is_not_warned_of(max_attempts: int | None) -> None:
    """DESIGN 6: what the broker takes out is kept there."""
    assert advice(queue(3, "queue 'orders.dead'"), max_attempts=max_attempts, has_dead_letter=False) is None


@pytest.mark.parametrize(
    ("limit", "max_attempts", "parts"),
    [
        (20, None, ["'orders'", "after 21 tries (delivery limit 20)", "no max_attempts", "x-delivery-limit -1"]),
        (3, 4, ["'orders'", "after 4 tries (delivery limit 3)", "before max_attempts=4", "a crash"]),
        (3, 3, ["'orders'", "after 4 tries (delivery limit 3)", "a broken connection", "x-dead-letter-exchange"]),
        (0, 2, ["'orders'", "after 1 try (delivery limit 0)", "max_attempts=2", "x-dead-letter-exchange"]),
        (1, 5, ["'orders'", "after 2 tries (delivery limit 1)", "max_attempts=5", "x-delivery-limit"]),
    ],
)
def test_the_warning_says_after_how_many_tries_and_what_to_do(
    limit: int, max_attempts: int | None, parts: list[str]
) -> None:
    said = advice(queue(limit), max_attempts=max_attempts, has_dead_letter=False)
    assert said is not None
    assert [part for part in parts if part not in said] == []
    assert ("retries use them up" in said) is (max_attempts is None or max_attempts > limit)


@pytest.mark.parametrize("info", [queue(20, "exchange 'dead'"), queue(None)])
def test_who_follows_the_warning_is_not_warned_again(info: QueueInfo) -> None:
    assert advice(info, max_attempts=None, has_dead_letter=False) is None
