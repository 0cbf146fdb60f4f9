"""A statement that touched no row is no answer by itself: is the token still there, was anything written at all?"""

from pathlib import Path
from typing import Any

import pytest
import trio

from links.errors import CallBroken, LeaseLost, NotApplied, PublishNotAccepted
from links.sql import Lease
from settlement.sql import Delay, Finish, MoveToGroup, MoveToTable, PutBack
from tests.links.sqlite_kit import Database, attached, bodies, finish, open_link, say, until

pytestmark = pytest.mark.sqlite

DEAF = "SELECT RAISE(IGNORE);"


def ignore(database: Database, what: str, table: str = "jobs", *, when: str = "1", do: str = "") -> None:
    """From now on such statements touch nothing there; `do` is what the trigger writes before."""
    database.run(f"CREATE TRIGGER deaf BEFORE {what} ON {table} WHEN {when} BEGIN {do} {DEAF} END")


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        (Finish(), "DELETE"),
        (PutBack(count=False), "UPDATE"),
        (Delay(5.0, count=False), "UPDATE"),
        (MoveToTable("dead"), "DELETE"),
    ],
    ids=str,
)
async def test_a_verb_that_is_ignored_is_not_applied(verb: Any, what: str, tmp_path: Path) -> None:
    """DESIGN 3.8: the lease is ours still, so it is not lost; said again without the trigger it is carried out."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    async with open_link(database.broker().queue(database.table())) as link:
        one, other = await link.receive(2)
        ignore(database, what, when="OLD.id = 1")
        before = database.rows()
        verdicts = await link.settle([say(one, verb), say(other, Finish())])
        assert isinstance(verdicts[0], NotApplied)
        assert "a trigger has ignored" in str(verdicts[0])
        assert verdicts[1] is None
        assert (database.rows(), database.rows("dead")) == (before[:1], [])
        database.run("DROP TRIGGER deaf")
        assert await link.settle([say(one, verb)]) == [None]


async def test_a_marking_and_a_regrouping_that_are_ignored(tmp_path: Path) -> None:
    """The same of a table with groups whose rows are marked."""
    database = Database(tmp_path / "q.db", grouped=True, marks=True).create()
    database.add(b"a", b"b", group="mail")
    async with open_link(database.broker().queue(database.table(), group="mail")) as link:
        one, other = await link.receive(2)
        ignore(database, "UPDATE")
        verdicts = await link.settle([say(one, Finish()), say(other, MoveToGroup("dead"))])
        assert [type(each) for each in verdicts] == [NotApplied, NotApplied]
        assert [row["grp"] for row in database.rows()] == ["mail", "mail"]


async def test_a_dead_letter_of_nothing_leaves_the_original(tmp_path: Path) -> None:
    """The table that is to hold it takes no row: not applied, and not lost either."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    ignore(database, "INSERT", "dead")
    async with open_link(database.broker().queue(database.table())) as link:
        (received,) = await link.receive(1)
        (verdict,) = await link.settle([say(received, MoveToTable("dead"))])
        assert isinstance(verdict, NotApplied)
    assert (database.row()["payload"], database.rows("dead")) == (b"a", [])


async def test_what_the_trigger_wrote_is_undone(tmp_path: Path) -> None:
    """A verb that was not applied has left no trace, however often it is said."""
    database = Database(tmp_path / "q.db").create()
    database.run("CREATE TABLE audit (id)")
    database.add(b"a")
    ignore(database, "DELETE", do="INSERT INTO audit VALUES (OLD.id);")
    async with open_link(database.broker().queue(database.table())) as link:
        received = await link.receive(1)
        for _ in range(3):
            (verdict,) = await link.settle(finish(received))
            assert isinstance(verdict, NotApplied)
    assert database.run("SELECT * FROM audit") == []


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE jobs SET id = 77",
        "UPDATE jobs SET attempt = 9",
        "UPDATE jobs SET locked_until = NULL",
        "UPDATE jobs SET locked_until = locked_until + 1",
        "DELETE FROM jobs",
    ],
)
async def test_what_somebody_changed_is_lost(change: str, tmp_path: Path) -> None:
    """The token is not there any more: every verb says so, and touches nothing."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    async with open_link(database.broker(poll_interval=3600.0).queue(database.table())) as link:
        received = await link.receive(2)
        database.run(change)
        before = database.rows()
        for verb in (Finish(), PutBack(count=False), MoveToTable("dead")):
            (verdict,) = await link.settle([say(received[0], verb)])
            assert isinstance(verdict, LeaseLost)
            assert "changed by somebody else" in str(verdict)
        assert (database.rows(), database.rows("dead")) == (before, [])


async def test_an_extension_that_is_lost_is_said(tmp_path: Path) -> None:
    """Of two rows one was changed: that one is lost, the other is leased on."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    async with open_link(database.broker().queue(database.table())) as link:
        one, other = await link.receive(2)
        database.run("UPDATE jobs SET attempt = 9 WHERE id = 1")
        assert await link.extend([one, other]) == [one]
        assert await link.settle(finish([other])) == [None]


@pytest.mark.parametrize("raises", ["IGNORE", "ABORT, 'no'", "ROLLBACK, 'no'"])
async def test_one_row_that_cannot_be_extended_harms_no_other(raises: str, tmp_path: Path) -> None:
    """It keeps its old lease and is told as degraded; the others are leased on."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b")
    told: list[tuple[str, str | None]] = []
    async with open_link(database.broker().queue(database.table(), claim=Lease(30.0))) as link:
        link.degraded = lambda what, why: told.append((what, why))
        one, other = await link.receive(2)
        before = [(each.token, each.expires) for each in (one, other)]
        database.run(f"CREATE TRIGGER deaf BEFORE UPDATE ON jobs WHEN OLD.id = 1 BEGIN SELECT RAISE({raises}); END")
        await trio.sleep(0.01)
        assert await link.extend([one, other]) == []
        assert (one.token, one.expires) == before[0]
        assert other.token != before[1][0]
        assert "row 1" in (told[-1][1] or "")
        with pytest.raises(CallBroken):
            await link.extend([one])
        database.run("DROP TRIGGER deaf")
        assert await link.extend([one, other]) == []
        assert told[-1] == ("to extend each lease", None)
        assert await link.settle(finish([one, other])) == [None, None]


async def test_one_row_that_cannot_be_given_back_harms_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The call says which; the goodbye says how many are left to their lease's end."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a", b"b", b"c")
    broker = database.broker()
    async with broker.connect(), attached(broker.queue(database.table())) as link:
        received = await link.receive(3)
        ignore(database, "UPDATE", when="OLD.id = 1")
        with pytest.raises(CallBroken, match="row 1: the lease was not let go"):
            await link.give_back(received[:2])
        await until(lambda: database.rows()[1]["locked_until"] is None)
    assert [row["locked_until"] is None for row in database.rows()] == [False, True, True]
    assert "could not let go 1 rows" in caplog.text


# --- publishing


async def test_a_publish_of_nothing_is_not_accepted(tmp_path: Path) -> None:
    """An INSERT that wrote no row is no publish, and what its trigger wrote elsewhere is undone."""
    database = Database(tmp_path / "q.db").create()
    database.run("CREATE TABLE audit (id)")
    broker = database.broker()
    publisher = broker.publisher(database.table())
    full = "(SELECT count(*) FROM jobs) >= 2"
    ignore(database, "INSERT", when=full, do="INSERT INTO audit VALUES (1);")
    async with broker.connect():
        await publisher.publish(b"1")
        with pytest.raises(PublishNotAccepted, match="letter 2 of 2: table 'jobs': no row was written"):
            await publisher.publish_many([b"2", b"3"])
        assert await publisher.publish_once(7, b"2")
        with pytest.raises(PublishNotAccepted, match="no row was written"):
            await publisher.publish(b"3")
        with pytest.raises(PublishNotAccepted, match="no row was written"):
            await publisher.publish_once(8, b"3")
        assert database.run("SELECT * FROM audit") == []
        database.run("DROP TRIGGER deaf")
        assert not await publisher.publish_once(7, b"again")
        assert await publisher.publish_once(8, b"3")
    assert [row["payload"] for row in database.rows()] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("poison", ["surrogate", "constraint"])
async def test_publish_many_names_the_letter(poison: str, tmp_path: Path) -> None:
    """None is written, and the error says which of them it was."""
    database = Database(tmp_path / "q.db").create()
    database.run("CREATE UNIQUE INDEX one ON jobs (payload)")
    broker = database.broker()
    letters: list[Any] = [b"1", b"2", b"3"]
    letters[2] = b"1" if poison == "constraint" else "no bytes"
    async with broker.connect():
        with pytest.raises(PublishNotAccepted, match=r"'jobs', letter 3 of 3: "):
            await broker.publisher(database.table()).publish_many(letters)
    assert database.rows() == []


async def test_a_neighbour_of_what_is_ignored_is_published(tmp_path: Path) -> None:
    """Publishes that share a transaction share no failure."""
    database = Database(tmp_path / "q.db").create()
    broker = database.broker()
    publisher = broker.publisher(database.table())
    ignore(database, "INSERT", when="NEW.payload = 'no'")
    refused: list[PublishNotAccepted] = []

    async def publish(body: bytes) -> None:
        try:
            await publisher.publish(body)
        except PublishNotAccepted as error:
            refused.append(error)

    database.run("DROP TRIGGER deaf")
    ignore(database, "INSERT", when="NEW.payload = x'6e6f'")
    async with broker.connect(), trio.open_nursery() as nursery:
        for body in (b"a", b"no", b"b", b"no", b"c"):
            nursery.start_soon(publish, body)
    assert len(refused) == 2
    async with open_link(database.broker().queue(database.table())) as link:
        assert sorted(bodies(await link.receive(9))) == [b"a", b"b", b"c"]


# --- and one that has failed has done nothing


FAIL = "CREATE TRIGGER no AFTER {} ON jobs WHEN NEW.payload = x'61' BEGIN SELECT RAISE(FAIL, 'no'); END"
"""RAISE(FAIL) keeps what its statement has done so far."""


@pytest.mark.parametrize("verb", [PutBack(count=False), Delay(5.0, count=False)], ids=str)
async def test_a_verb_that_fails_halfway_keeps_the_lease(verb: Any, tmp_path: Path) -> None:
    """It is not applied and not half applied: said again it finds its token."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    async with open_link(database.broker().queue(database.table())) as link:
        (one,) = await link.receive(1)
        before = database.rows()
        database.run(FAIL.format("UPDATE"))
        (verdict,) = await link.settle([say(one, verb)])
        assert isinstance(verdict, NotApplied)
        with pytest.raises(CallBroken, match="no"):
            await link.extend([one])
        assert database.rows() == before
        database.run("DROP TRIGGER no")
        assert await link.settle([say(one, verb)]) == [None]


async def test_a_claim_that_fails_halfway_leaves_its_row_free(tmp_path: Path) -> None:
    """The row that is passed over is neither leased nor counted."""
    database = Database(tmp_path / "q.db").create()
    database.add(b"a")
    before = database.rows()
    database.run(FAIL.format("UPDATE"))
    database.add(b"b", b"c")
    async with open_link(database.broker().queue(database.table())) as link:
        assert bodies(await link.receive(3)) == [b"b", b"c"]
        assert database.rows()[:1] == before
        (alone,) = [each for each in database.rows() if each["id"] == 1]
        assert (alone["locked_until"], alone["attempt"]) == (None, 1)


async def test_a_publish_that_fails_halfway_is_not_there(tmp_path: Path) -> None:
    """Refused is refused: no row stays behind."""
    database = Database(tmp_path / "q.db").create()
    database.run(FAIL.format("INSERT"))
    broker = database.broker()
    async with broker.connect():
        with pytest.raises(PublishNotAccepted, match="no"):
            await broker.publisher(database.table()).publish(b"a")
        await broker.publisher(database.table()).publish(b"b")
    assert [row["payload"] for row in database.rows()] == [b"b"]


async def test_a_trigger_keeps_its_own_conflict_clause(tmp_path: Path) -> None:
    """INSERT OR REPLACE into a tally works for every statement of ours, as it does for anybody else's."""
    database = Database(tmp_path / "q.db").create()
    database.run("CREATE TABLE tally (what TEXT PRIMARY KEY, id)")
    for table, what in (("jobs", "INSERT"), ("jobs", "UPDATE"), ("dead", "INSERT")):
        tally = f"INSERT OR REPLACE INTO tally VALUES ('{table} {what}', NEW.id);"  # noqa: S608
        database.run(f"CREATE TRIGGER {table}_{what} AFTER {what} ON {table} BEGIN {tally} END")
    queue = database.broker().queue(database.table())
    async with open_link(queue) as link:
        await queue.broker.publisher("jobs").publish(b"a")
        await queue.broker.publisher("jobs").publish(b"b")
        received = await link.receive(2)
        assert bodies(received) == [b"a", b"b"]
        assert await link.extend(received) == []
        assert await link.settle([say(each, MoveToTable("dead")) for each in received]) == [None, None]
    assert database.run("SELECT * FROM tally ORDER BY what") == [
        ("dead INSERT", 2),
        ("jobs INSERT", 2),
        ("jobs UPDATE", 2),
    ]
