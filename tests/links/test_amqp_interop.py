"""rhea and proton's blocking client, which nobody here wrote, against links.amqp.embedded over loopback TCP."""

from __future__ import annotations

import pytest
import trio.testing

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.embedded.broker import EmbeddedBroker, QueuePolicy
from links.amqp.embedded.exchange import Consumer
from links.amqp.embedded.server_connection import ServerConnection
from links.amqp.embedded.store import Message
from links.amqp.engine.events import ACCEPTED, Condition, Disposition, State, Terminus
from links.errors import LinkRefused
from tests.interop.rhea_kit import Rhea, digest, install, only, seen, until
from tests.links.test_amqp_embedded import client

pytestmark = [pytest.mark.amqp, pytest.mark.servers]

SECOND = "352d33ffd8a27a0928e22199585de4585b41fbf49253eb14a9b4c7949ea87063"
"""Of the body of message 1: 1.1.1.1. … 1."""


@pytest.fixture(scope="session")
def rhea() -> Rhea:
    return install()


def granted(broker: EmbeddedBroker) -> list[int]:
    return [consumer.credit for peer in broker.peers for consumer in peer.consumers.values()]


# --- what is sent is what comes


async def test_rhea_gets_what_rhea_sent(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        sent = await rhea.run("produce.js", url, "q", "--count", "1000")
        got = await rhea.run("consume.js", url, "q", "--count", "1000", "--credit", "100")
        assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
    assert sent == [{"sent": 1000, "accepted": 1000, "rejected": 0, "released": 0, "modified": 0}]
    assert [said.disposition for said in broker.said] == [ACCEPTED] * 1000
    assert only(got, "answered") == [1000]
    assert [(fact["n"], fact["hash"]) for fact in got[1:-1]] == [(n, digest(n)) for n in range(1000)]
    assert got[2] == {
        "n": 1,
        "answer": "accept",
        "size": 1024,
        "hash": SECOND,
        "durable": True,
        "priority": 7,
        "ttl": 3600000,
        "message_id": "id-1",
        "correlation_id": "of-1",
        "subject": "interop",
        "content_type": "application/octet-stream",
        "message_annotations": {"x-opt-lane": "fast"},
        "application_properties": {"n": 1, "name": "Zoë", "urgent": True},
    }


async def test_proton_gets_what_rhea_sent(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "200")
        got = await rhea.run("blocking.py", url, "q", "consume", "200")
        assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
    assert seen(got) == [(n, 0) for n in range(200)]
    assert got[2] == {
        "n": 1,
        "hash": SECOND,
        "message_id": "id-1",
        "subject": "interop",
        "durable": True,
        "priority": 7,
        "delivery_count": 0,
        "message_annotations": {"x-opt-lane": "fast"},
        "application_properties": {"n": 1, "name": "Zoë", "urgent": True},
    }


async def test_rhea_gets_what_proton_sent(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        assert await rhea.run("blocking.py", url, "q", "produce", "200") == [{"sent": 200}]
        got = await rhea.run("consume.js", url, "q", "--count", "200")
        assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
    assert [(fact["n"], fact["hash"]) for fact in got[1:-1]] == [(n, digest(n)) for n in range(200)]
    assert got[2] == {
        "n": 1,
        "answer": "accept",
        "size": 1024,
        "hash": SECOND,
        "message_id": "id-1",
        "subject": "interop",
        "message_annotations": {"x-opt-lane": "fast"},
        "application_properties": {"n": 1, "name": "Zoë", "urgent": True},
    }


async def test_three_megabytes_come_whole_and_again(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "2", "--size", "3145728")
        got = await rhea.run("consume.js", url, "q", "--count", "3", "--credit", "1", "--answers", "fail,accept")
    assert seen(got) == [(0, None), (0, 1), (1, None)]
    assert only(got, "hash") == [digest(0, 3145728), digest(0, 3145728), digest(1, 3145728)]


async def test_a_link_without_an_address_sends_each_message_where_it_says(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    broker.refuse("closed", Condition("amqp:unauthorized-access", "not yours"))
    async with broker.serve() as url:
        sent = await rhea.run("produce.js", url, "here", "--relay", "--count", "2")
        assert sent == [{"sent": 2, "accepted": 2, "rejected": 0, "released": 0, "modified": 0}]
        assert seen(await rhea.run("consume.js", url, "here", "--count", "2")) == [(0, None), (1, None)]
        for to, why in (("", "amqp:precondition-failed"), ("closed", "amqp:unauthorized-access")):
            assert await rhea.run("produce.js", url, to, "--relay") == [
                {"rejected": why},
                {"sent": 1, "accepted": 0, "rejected": 1, "released": 0, "modified": 0},
            ]


async def test_a_dynamic_target_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    """It asks for an address that the broker makes; it is no link whose messages say where they go."""
    broker = EmbeddedBroker()
    async with broker.running(), client(broker) as at:
        with pytest.raises(LinkRefused, match="dynamic ones there are none"):
            await at.connection.attach_sender(at.session, Terminus(None, dynamic=True)).attached()


async def test_messages_that_are_sent_settled_come_and_no_outcome_goes(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        sent = await rhea.run("produce.js", url, "q", "--settled", "--count", "1000")
        assert sent == [{"sent": 1000, "accepted": 0, "rejected": 0, "released": 0, "modified": 0}]
        got = await rhea.run("consume.js", url, "q", "--settled", "--count", "1000")
        assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
    assert seen(got) == [(n, None) for n in range(1000)]
    assert list(broker.said) == []


# --- many


async def test_rhea_and_proton_share_a_queue(rhea: Rhea) -> None:
    """Each message comes to exactly one of them; both understand that the queue goes away."""
    broker = EmbeddedBroker()
    async with (
        broker.serve() as url,
        rhea.running("consume.js", url, "q", "--count", "0") as one,
        rhea.running("blocking.py", url, "q", "consume", "0") as other,
    ):
        for consumer in (one, other):
            await consumer.tells("attached")
        await until(lambda: len(granted(broker)) == 2 and min(granted(broker)) >= 10)  # proton's is 10 or 20, by chance
        await rhea.run("produce.js", url, "q", "--count", "1000")
        await until(lambda: len(broker.said) == 1000)
        for peer in broker.peers:
            peer.detach("q", Condition("amqp:resource-deleted"))
        ones, others = await one.ends(), await other.ends()
    assert [said.disposition for said in broker.said] == [ACCEPTED] * 1000
    assert only(ones, "detached") == only(others, "detached") == ["amqp:resource-deleted"]
    assert min(len(only(ones, "n")), len(only(others, "n"))) >= 10
    assert sorted(only(ones, "n") + only(others, "n")) == list(range(1000))


@pytest.mark.parametrize(("address", "options"), [("news", ["--topic"]), ("topic://news", [])])
async def test_a_topic_gives_each_of_two_rheas_everything(rhea: Rhea, address: str, options: list[str]) -> None:
    broker = EmbeddedBroker()
    async with (
        broker.serve() as url,
        rhea.running("consume.js", url, address, "--count", "100", *options) as one,
        rhea.running("consume.js", url, address, "--count", "100", *options) as other,
    ):
        for consumer in (one, other):
            await consumer.tells("attached")
        await rhea.run("produce.js", url, address, "--count", "100")
        for consumer in (one, other):
            assert seen(await consumer.ends()) == [(n, None) for n in range(100)]


# --- outcomes


@pytest.mark.parametrize(
    ("answer", "then", "dead"),
    [
        ("accept", [(1, None), (2, None)], 0),
        ("fail", [(0, 1), (1, None), (2, None)], 0),
        ("modify", [(0, 0), (1, None), (2, None)], 0),
        ("release", [(0, 0), (1, None), (2, None)], 0),
        ("reject", [(1, None), (2, None)], 1),
        ("undeliverable", [(1, None), (2, None)], 1),
    ],
)
async def test_an_outcome_of_rheas_does_what_the_table_says(
    rhea: Rhea, answer: str, then: list[tuple[int, int | None]], dead: int
) -> None:
    """The table of `links.amqp.embedded`: ready at its old place, counted or not; or gone, to the dead-letter queue."""
    broker = EmbeddedBroker(policies={"q": QueuePolicy(dead_letter="dead")})
    count = str(len(then) + 1)
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "3")
        got = await rhea.run("consume.js", url, "q", "--count", count, "--credit", "1", "--answers", f"{answer},accept")
        assert (broker.ready("q"), broker.unsettled("q"), len(broker.ready("dead"))) == ([], 0, dead)
    assert seen(got) == [(0, None), *then]
    firsts = [fact for fact in got if fact.get("n") == 0]
    assert [fact.get("first_acquirer") for fact in firsts] == [None, False][: len(firsts)]
    for fact in firsts:  # the header is spliced, and nothing else
        assert (fact["durable"], fact["priority"], fact["ttl"]) == (True, 7, 3600000)
        assert (fact["message_annotations"], fact["hash"]) == ({"x-opt-lane": "fast"}, digest(0))


async def test_a_message_that_rhea_wants_later_comes_after_the_others(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "3")
        got = await rhea.run("consume.js", url, "q", "--count", "4", "--credit", "1", "--answers", "later,accept")
    assert seen(got) == [(0, None), (1, None), (2, None), (0, 1)]


async def test_a_dead_letter_keeps_its_count(rhea: Rhea) -> None:
    broker = EmbeddedBroker(policies={"q": QueuePolicy(dead_letter="dead", delivery_limit=2)})
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q")
        got = await rhea.run("consume.js", url, "q", "--count", "3", "--credit", "1", "--answers", "fail")
        assert seen(got) == [(0, None), (0, 1), (0, 2)]
        assert seen(await rhea.run("consume.js", url, "dead")) == [(0, 3)]


@pytest.mark.parametrize("goodbye", ["close", "detach", "session", "connection"])
async def test_what_rhea_leaves_unsettled_comes_back_uncounted(rhea: Rhea, goodbye: str) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "3")
        left = await rhea.run("consume.js", url, "q", "--count", "2", "--answers", "nothing", "--goodbye", goodbye)
        assert seen(left) == [(0, None), (1, None)]
        assert seen(await rhea.run("consume.js", url, "q", "--count", "3")) == [(0, 0), (1, 0), (2, None)]


async def test_what_a_killed_rhea_leaves_comes_back_counted(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "3")
        async with rhea.running(
            "consume.js", url, "q", "--count", "2", "--answers", "nothing", "--goodbye", "never"
        ) as killed:
            await killed.tells("answered")
            assert broker.unsettled("q") == 2
            killed.process.kill()
        await until(lambda: not broker.peers)
        assert seen(await rhea.run("consume.js", url, "q", "--count", "3")) == [(0, 1), (1, 1), (2, None)]


async def test_rhea_settles_second_after_the_broker_has(rhea: Rhea) -> None:
    """rcv-settle-mode second: an outcome that is not settled yet is one, and the broker settles it."""
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "3")
        got = await rhea.run(
            "consume.js", url, "q", "--second", "--count", "4", "--credit", "1", "--answers", "fail,accept"
        )
        assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
    assert seen(got) == [(0, None), (0, 1), (1, None), (2, None)]
    assert only(got, "settled") == [0, 1, 2, 3]
    failed = Disposition(State.MODIFIED, failed=True, annotations={"x-opt-seen": "yes"})
    assert [said.disposition for said in broker.said] == [failed, ACCEPTED, ACCEPTED, ACCEPTED]


# --- links


async def test_a_small_window_holds_messages_back(rhea: Rhea, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever credit there is: no more than 1 MiB waits for a session's window, the rest is in the queue."""
    broker, most, deliver = EmbeddedBroker(), 0, ServerConnection.deliver

    def watched(peer: ServerConnection, consumer: Consumer, message: Message) -> None:
        nonlocal most
        deliver(peer, consumer, message)
        most = max(most, peer.engine.queued(consumer.link))

    monkeypatch.setattr(ServerConnection, "deliver", watched)
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "3000")
        got = await rhea.run("consume.js", url, "q", "--count", "3000", "--credit", "3000", "--window", "100")
        assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
    assert seen(got) == [(n, None) for n in range(3000)]
    assert 500 < most < 1024


async def test_a_drain_takes_what_is_there_and_is_answered(rhea: Rhea) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "3")
        assert seen(await rhea.run("consume.js", url, "q", "--drain")) == [(0, None), (1, None), (2, None)]
        assert await rhea.run("consume.js", url, "q", "--drain") == [
            {"attached": True},
            {"drained": True},
            {"answered": 0},
        ]


@pytest.mark.parametrize("credit", ["2", "3", "4"])
async def test_a_drain_is_answered_once_whatever_is_left_of_the_credit(rhea: Rhea, credit: str) -> None:
    """Part 2 §2.6.7, as RabbitMQ: also where the messages use the credit up, which proton passes over in silence."""
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "3")
        got = await rhea.run("consume.js", url, "q", "--drain", "--credit", credit)
    assert seen(got) == [(0, None), (1, None), (2, None)][: int(credit)]
    assert only(got, "drained") == [True]


async def test_settled_messages_go_on_when_a_window_opens(rhea: Rhea) -> None:
    """A flow of the session alone is no event, and no outcome comes that were one."""
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "500")
        options = ["--settled", "--count", "500", "--credit", "500", "--window", "100"]
        assert seen(await rhea.run("consume.js", url, "q", *options)) == [(n, None) for n in range(500)]


@pytest.mark.parametrize("goodbye", ["close", "detach"])
async def test_a_link_is_opened_again_under_its_old_name(rhea: Rhea, goodbye: str) -> None:
    broker = EmbeddedBroker()
    async with broker.serve() as url:
        await rhea.run("produce.js", url, "q", "--count", "5")
        answers = "accept,nothing,accept"
        got = await rhea.run(
            "consume.js", url, "q", "--lives", "3", "--count", "2", "--answers", answers, "--goodbye", goodbye
        )
        assert (broker.ready("q"), broker.unsettled("q")) == ([], 0)
    assert only(got, "attached") == [True] * 3
    assert seen(got) == [(0, None), (1, None), (1, 0), (2, None), (3, None), (4, None)]


async def test_rhea_is_told_why_it_is_refused(rhea: Rhea) -> None:
    broker = EmbeddedBroker(max_message=100_000)
    broker.refuse("closed", Condition("amqp:unauthorized-access", "not yours"))
    refused = [{"error": "amqp:unauthorized-access", "description": "not yours"}]
    async with broker.serve() as url:
        for by_session in (False, True):
            broker.refuses_by_session = by_session
            for program in ("produce.js", "consume.js"):
                assert await rhea.run(program, url, "closed", code=1) == refused
        assert await rhea.run("produce.js", url, "q", "--size", "200000", code=1) == [
            {"error": "amqp:link:message-size-exceeded", "description": "more than 100000 bytes"}
        ]
