"""A dead letter that is the queue itself goes round for ever: it is refused, however it is named."""

from pathlib import Path
from typing import Any

import pytest

from actors import Subscription, open_runtime
from links.errors import LinkRefused
from links.sql import SqlBroker
from settlement import Ack, Delivery, Policy
from tests.links.sqlite_kit import Database

pytestmark = pytest.mark.sqlite


async def handler(delivery: Delivery[Any]) -> Ack:
    return Ack()


def to(dead: Any) -> Policy:
    return Policy(max_attempts=2, dead_letter=dead)


@pytest.mark.parametrize("name", ["jobs", "JOBS", "main.jobs"])
async def test_a_publisher_to_the_queue_itself(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same broker, by another one on the same file, by a path of another form: `ValueError`, before any I/O."""
    database = Database(tmp_path / "q.db")
    broker = database.broker()
    monkeypatch.chdir(tmp_path)
    for other in (broker, database.broker(), SqlBroker("sqlite:///q.db"), SqlBroker(f"sqlite:///{tmp_path}/x/../q.db")):
        with pytest.raises(ValueError, match="dead_letter must be another queue than 'jobs' itself"):
            Subscription(broker.queue(database.table()), handler, policy=to(other.publisher(database.table(name))))
    with pytest.raises(ValueError, match="dead_letter must be another queue"):
        Subscription(broker.queue(database.table()), handler, policy=to(name))


async def test_a_group_is_its_own_dead_letter_and_no_other(tmp_path: Path) -> None:
    """Of a table with groups the same group is refused, another one is not."""
    database = Database(tmp_path / "q.db", grouped=True)
    broker = database.broker()
    queue = broker.queue(database.table(), group="mail")
    with pytest.raises(ValueError, match="dead_letter must be another queue than 'mail' itself"):
        Subscription(queue, handler, policy=to(broker.publisher(database.table(), group="mail")))
    Subscription(queue, handler, policy=to(broker.publisher(database.table(), group="dead")))
    Subscription(queue, handler, policy=to("dead"))


async def test_a_whole_table_takes_what_is_put_into_any_of_its_groups(tmp_path: Path) -> None:
    """A queue that knows no groups reads all rows: a group of the same table is the queue itself."""
    database = Database(tmp_path / "q.db", grouped=True)
    broker = database.broker()
    queue = broker.queue(database.table(group=None))
    with pytest.raises(ValueError, match="dead_letter must be another queue than 'jobs' itself"):
        Subscription(queue, handler, policy=to(broker.publisher(database.table(), group="dead")))


async def test_the_same_table_in_another_file_is_another_queue(tmp_path: Path) -> None:
    """Nothing is refused there."""
    one, other = Database(tmp_path / "a.db").create(), Database(tmp_path / "b.db").create()
    policy = to(other.broker().publisher(other.table()))
    async with open_runtime(Subscription(one.broker().queue(one.table()), handler, policy=policy)):
        pass


async def test_another_name_of_the_same_file(tmp_path: Path) -> None:
    """What only the disk can tell is refused at start-up."""
    database = Database(tmp_path / "q.db").create()
    name = tmp_path / "same.db"
    name.symlink_to(database.path)
    policy = to(SqlBroker(f"sqlite:///{name}").publisher(database.table()))
    with pytest.raises(LinkRefused, match="is this queue itself, by another name of its file"):
        async with open_runtime(Subscription(database.broker().queue(database.table()), handler, policy=policy)):
            raise AssertionError("started")
