"""Publishing on a real SQLite file: what publishing writes."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio
import trio.testing

from links.errors import ConnectionBroken, LinkBroken, NotConnected, PublishNotAccepted
from links.sql import SqlPublisher, Table
from links.sql.jobs import Insert
from settlement import Letter
from settlement.sql import MoveToTable
from tests.links.sqlite_kit import (
    TIMES,
    Database,
    Foreigner,
    Gate,
    attached,
    bodies,
    near,
    now,
    open_link,
    say,
    seconds,
    until,
)

pytestmark = pytest.mark.sqlite


def minimal(name: str = "jobs", **roles: Any) -> Table[bytes]:
    given: dict[str, Any] = {"id": "id", "payload": "payload", "locked_until": "locked_until", **roles}
    return Table(name, **given)


async def publish(database: Database, table: Table[Any], body: bytes, **arguments: Any) -> None:
    broker = database.broker()
    async with broker.connect():
        await broker.publisher(table).publish(body, **arguments)


async def test_what_is_published_arrives_byte_for_byte(tmp_path: Path) -> None:
    """S-11.1: body, key and 24 headers, among them an empty one and bytes that are no UTF-8."""
    database = Database(tmp_path / "q.db").create()
    headers = {f"h{number}": bytes([number, 255 - number]) for number in range(22)} | {
        "empty": b"",
        "ünï": "ö".encode(),
    }
    broker = database.broker()
    async with open_link(broker.queue(database.table())) as link:
        for body in (b"\x00\xff\xfe", b"", "text ä".encode()):
            await broker.publisher("jobs").publish(body, headers, key="k/1")
            (received,) = await link.receive(1)
            delivery = received.delivery
            assert (delivery.body, delivery.message, delivery.key, dict(delivery.headers)) == (
                body,
                body,
                "k/1",
                headers,
            )
            assert received.unreadable is None


async def test_a_fresh_row_is_due_and_free(tmp_path: Path) -> None:
    """S-1.2: what the table's defaults say; the group is the publisher's."""
    database = Database(tmp_path / "q.db", grouped=True, marks=True).create()
    broker = database.broker()
    async with broker.connect():
        await broker.publisher(database.table(), group="mail").publish(b"x")
    assert database.row() == {
        "id": 1,
        "payload": b"x",
        "headers": None,
        "lane": None,
        "retry_after": 0,
        "locked_until": None,
        "attempt": 1,
        "grp": "mail",
        "processed_at": None,
    }


@pytest.mark.parametrize("times", TIMES)
async def test_columns_that_must_have_a_value_get_one(times: str, tmp_path: Path) -> None:
    """A table without defaults: retry_after is now, the attempt 1, the id a random text; a text payload is a text."""
    database = Database(tmp_path / "q.db", times)
    database.run(
        f"CREATE TABLE jobs (id TEXT PRIMARY KEY, payload TEXT, due {times} NOT NULL, n INTEGER NOT NULL, "
        f"locked_until {times})"
    )
    before = now()
    await publish(database, minimal(retry_after="due", attempt="n"), b"x")
    row = database.row()
    assert near(seconds(row["due"]), before)
    assert (row["payload"], row["n"], len(row["id"])) == ("x", 1, 32)


@pytest.mark.parametrize("times", TIMES)
async def test_a_letter_may_be_due_later(times: str, tmp_path: Path) -> None:
    """`deliver_after` is retry_after; where the table has none the letter is not accepted."""
    database = Database(tmp_path / "q.db", times).create()
    broker = database.broker()
    before = now()
    async with broker.connect():
        await broker.publisher(database.table()).send(Letter(b"x", deliver_after=50.0))
        with pytest.raises(PublishNotAccepted, match="cannot hold a delay: it has no retry_after column"):
            await broker.publisher(database.table(retry_after=None)).send(Letter(b"x", deliver_after=50.0))
    assert near(seconds(database.row()["retry_after"]), before + 50)


@pytest.mark.parametrize("times", TIMES)
async def test_a_letter_is_due_when_it_is_said(times: str, tmp_path: Path) -> None:
    """A delay in seconds or as a `timedelta`, an instant in any time zone; one that has passed is due now."""
    database = Database(tmp_path / "q.db", times).create()
    broker = database.broker()
    instant = datetime(2031, 5, 6, 7, 8, 9, 125000, timezone(timedelta(hours=-7, minutes=-30)))
    before = now()
    async with broker.connect():
        publisher = broker.publisher(database.table())
        await publisher.publish(b"float", delay=50.0)
        await publisher.publish(b"timedelta", {"a": b"b"}, key="k", delay=timedelta(minutes=2))
        await publisher.publish(b"due", due=instant)
        await publisher.publish(b"past", due=datetime.min.replace(tzinfo=UTC))
        await publisher.publish(b"far", due=datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))))
        assert await publisher.publish_once(9, b"once", due=instant)
        assert not await publisher.publish_once(9, b"once", delay=0.0)
        mistakes: list[dict[str, Any]] = [
            {"delay": 1.0, "due": instant},
            {"due": datetime(2031, 1, 1)},  # noqa: DTZ001
            {"delay": -1.0},
        ]
        for wrong in mistakes:
            with pytest.raises(ValueError, match=r"delay|due"):
                await publisher.publish(b"x", **wrong)
        with pytest.raises(PublishNotAccepted, match="cannot hold a delay"):
            await broker.publisher(database.table(retry_after=None)).publish(b"x", due=instant)
    due = {row["payload"]: seconds(row["retry_after"]) for row in database.rows()}
    assert near(due[b"float"], before + 50)
    assert near(due[b"timedelta"], before + 120)
    assert due[b"due"] == due[b"once"] == instant.timestamp()
    assert sorted(due) == [b"due", b"far", b"float", b"once", b"past", b"timedelta"]
    async with open_link(database.broker().queue(database.table())) as link:
        assert bodies(await link.receive(9)) == [b"past"]


async def test_what_the_table_cannot_hold_is_not_accepted(tmp_path: Path) -> None:
    """S-11.3: a header or a key without its column: an error, and nothing written."""
    database = Database(tmp_path / "q.db").create()
    with pytest.raises(PublishNotAccepted, match="cannot hold headers: it has no headers column"):
        await publish(database, minimal(), b"x", headers={"a": b"b"})
    with pytest.raises(PublishNotAccepted, match="cannot hold a key: it has no partition_key column"):
        await publish(database, minimal(), b"x", key="k")
    with pytest.raises(PublishNotAccepted, match="no table 'none'"):
        await publish(database, minimal("none"), b"x")
    with pytest.raises(PublishNotAccepted, match="has no column 'nope'"):
        await publish(database, minimal(headers="nope"), b"x")
    assert database.rows() == []


@pytest.mark.parametrize(
    ("letter", "reason"),
    [
        (Letter("text"), "a body is bytes, not str"),  # type: ignore[arg-type]
        (Letter(b"x", {"a": "b"}), "a header is a str and bytes, not str and str"),  # type: ignore[dict-item]
        (Letter(b"x", {("a",): b"b"}), "a header is a str and bytes, not tuple and bytes"),  # type: ignore[dict-item]
        (Letter(b"x", [b"a"]), "headers are a mapping of str to bytes, not list"),  # type: ignore[arg-type]
        (Letter(b"x", key=("k",)), "a key is a str or None, not tuple"),  # type: ignore[arg-type]
        (Letter(b"x", deliver_after=float("nan")), "deliver_after must be a finite number"),
        (Letter(b"x", key="\ud800"), "surrogates not allowed"),
    ],
)
async def test_a_letter_that_is_none_harms_nobody(letter: Letter, reason: str, tmp_path: Path) -> None:
    """S-11.3: a mistake in one publish is `PublishNotAccepted` out of that publish, nothing written; all goes on."""
    database = Database(tmp_path / "q.db").create()
    broker = database.broker()
    async with broker.connect():
        publisher = broker.publisher(database.table())
        with pytest.raises(PublishNotAccepted, match=reason):
            await publisher.send(letter)
        with pytest.raises(PublishNotAccepted, match=reason):
            await publisher.publish_many([b"x", letter])
        assert database.rows() == []
        await publisher.publish(b"good")
    assert database.row()["payload"] == b"good"


async def test_an_error_of_one_job_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is raised in the thread fails that job alone, nothing of it written; its neighbours are carried out."""
    database = Database(tmp_path / "q.db").create()
    gate = Gate(monkeypatch)
    broker = database.broker()

    class Bug(dict[str, bytes]):
        def items(self) -> NoReturn:
            raise RuntimeError("a bug")

    async with broker.connect():
        publisher = broker.publisher(database.table())
        gate.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.publish, b"first")
            await until(lambda: gate.entered)
            nursery.start_soon(publisher.publish, b"second")
            letters = [(None, Letter(b"half")), (None, Letter(b"", Bug(a=b"")))]
            bad = Insert(database.table(), None, letters, 5.0)
            nursery.start_soon(broker.life.publishing.carry_out, bad)
            nursery.start_soon(publisher.publish, b"third")
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        assert isinstance(bad.error, RuntimeError)
        await publisher.publish(b"fourth")
    assert sorted(row["payload"] for row in database.rows()) == [b"first", b"fourth", b"second", b"third"]


async def test_publishing_once(tmp_path: Path) -> None:
    """An id of the user's own: publishing again makes no second order; a plain publish of it is refused."""
    database = Database(tmp_path / "q.db")
    database.run("CREATE TABLE jobs (id TEXT PRIMARY KEY, payload BLOB, locked_until REAL)")
    broker = database.broker()
    async with broker.connect():
        publisher: SqlPublisher = broker.publisher(minimal())
        assert await publisher.publish_once("order-1", b"first") is True
        assert await publisher.publish_once("order-1", b"second") is False
    assert [(row["id"], row["payload"]) for row in database.rows()] == [("order-1", b"first")]


async def test_publishing_many_is_all_or_nothing(tmp_path: Path) -> None:
    """One transaction: a letter that is refused takes the others with it."""
    database = Database(tmp_path / "q.db").create()
    database.run("CREATE UNIQUE INDEX once ON jobs (lane)")
    broker = database.broker()
    async with broker.connect():
        publisher = broker.publisher(database.table())
        await publisher.publish_many([b"a", Letter(b"b", key="k"), b"c"])
        with pytest.raises(PublishNotAccepted, match="UNIQUE"):
            await publisher.publish_many([b"d", Letter(b"e", key="k"), b"f"])
        await publisher.publish_many([])
    assert [row["payload"] for row in database.rows()] == [b"a", b"b", b"c"]


async def test_publishing_a_row(tmp_path: Path) -> None:
    """Row mode: the body is a JSON object of columns; anything else is not accepted."""
    database = Database(tmp_path / "q.db").create()
    rows: Table[dict[str, Any]] = Table("jobs", id="id", locked_until="locked_until")
    await publish(database, rows, b'{"id": 7, "lane": "k", "payload": {"base64": "/w=="}}')
    assert (database.row()["id"], database.row()["lane"], database.row()["payload"]) == (7, "k", b"\xff")
    for body in (b"no json", b'{"lane": ' + b"[" * 200_000):
        with pytest.raises(PublishNotAccepted, match="takes rows"):
            await publish(database, rows, body)


async def test_an_id_that_nobody_gives_is_not_accepted(tmp_path: Path) -> None:
    """S-1.3: one that is neither given nor generated nor a text is asked for; generated, but by nothing, is refused."""
    database = Database(tmp_path / "q.db")
    database.run("CREATE TABLE jobs (id INT PRIMARY KEY, payload BLOB, locked_until REAL)")
    with pytest.raises(PublishNotAccepted, match="needs a value: publish_once"):
        await publish(database, minimal(), b"x")
    with pytest.raises(PublishNotAccepted, match=r"'id' .id. is in generated=.*but nothing fills it"):
        await publish(database, minimal(generated=["id"]), b"x")
    assert database.rows() == []


async def test_publishers_need_an_open_broker(tmp_path: Path) -> None:
    """S-11.4: `NotConnected` before and after."""
    database = Database(tmp_path / "q.db").create()
    broker = database.broker()
    publisher = broker.publisher(database.table())
    with pytest.raises(NotConnected):
        await publisher.publish(b"before")
    async with broker.connect():
        await publisher.publish(b"x")
    with pytest.raises(NotConnected):
        await publisher.publish(b"after")
    assert database.row()["payload"] == b"x"


async def test_a_locked_file_refuses_a_message_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was written, so it is `PublishNotAccepted`: the message is nowhere but with you."""
    monkeypatch.setattr("links.sql.publisher.PATIENCE", 0.2)
    database = Database(tmp_path / "q.db").create()
    broker = database.broker()
    async with broker.connect():
        publisher = broker.publisher(database.table())
        with Foreigner(database), pytest.raises(PublishNotAccepted, match="held the lock") as caught:
            await publisher.publish(b"x")
        assert "database is locked" not in str(caught.getrepr())
        await publisher.publish(b"y")
    assert [row["payload"] for row in database.rows()] == [b"y"]


async def lose_the_answer(database: Database) -> None:
    broker = database.broker()
    async with broker.connect():
        publisher = broker.publisher(database.table())
        await publisher.publish(b"x")
        for path in database.path.parent.iterdir():
            path.unlink()
        with pytest.raises(LinkBroken, match="may be there or not"):
            await publisher.publish(b"y")
        await trio.sleep_forever()


async def test_an_insert_whose_answer_is_lost(tmp_path: Path) -> None:
    """`LinkBroken`: it was on its way when the file went away, and is never sent again by itself."""
    with pytest.raises(ConnectionBroken):
        await lose_the_answer(Database(tmp_path / "q.db").create())


async def test_many_publishers_share_commits(tmp_path: Path) -> None:
    """All that is ready goes into one transaction; each is confirmed, none is lost."""
    database = Database(tmp_path / "q.db").create()
    broker = database.broker()
    async with broker.connect():
        publisher = broker.publisher(database.table())
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(publisher.publish, b"%d" % number)
    assert sorted(int(row["payload"]) for row in database.rows()) == list(range(100))


async def test_a_publish_that_is_cancelled_while_it_waits_was_not_sent(tmp_path: Path) -> None:
    """Before it began it is withdrawn: nothing is written later behind the caller's back."""
    database = Database(tmp_path / "q.db").create()
    broker = database.broker()
    async with broker.connect():
        with Foreigner(database), trio.move_on_after(0.2) as scope:
            await broker.publisher(database.table()).publish(b"x")
        assert scope.cancelled_caught
        await broker.publisher(database.table()).publish(b"y")
    payloads = [row["payload"] for row in database.rows()]
    assert payloads in ([b"y"], [b"x", b"y"])  # a cancel in the middle of a try leaves that try to end by itself


async def test_a_dead_letter_in_the_same_process_is_noticed_at_once(tmp_path: Path) -> None:
    """S-9.1: a move to a table or a group wakes this broker's queue there."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"x")
    broker = database.broker(poll_interval=3600.0)
    found: list[bytes] = []

    async def read_dead() -> None:
        async with attached(broker.queue(database.table("dead"))) as dead:
            found.extend(bodies(await dead.receive(1)))

    async with broker.connect(), attached(broker.queue(database.table())) as link:
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read_dead)
                (received,) = await link.receive(1)
                await trio.sleep(0.1)
                assert await link.settle([say(received, MoveToTable("dead"))]) == [None]
    assert found == [b"x"]
    await until(lambda: database.row("dead")["locked_until"] is None)
