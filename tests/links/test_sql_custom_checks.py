"""Statements of the user's own, before anything is carried out: what is refused at construction, and what they gave."""

from __future__ import annotations

import re
from typing import Any

import pytest

from links.errors import CallBroken
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, Table
from links.sql.custom import check_custom, fetched, for_psycopg, ids_of, ours_of, yes
from links.sql.jobs import Passing
from settlement.sql import ClaimForm

pytestmark = pytest.mark.sqlite

JOBS: Table[Any] = Table("jobs", id="id", payload="body", headers="head")
FIFO: Table[Any] = Table("jobs", id="id", payload="body", group="grp", locked_until="until", fifo=True)
CLAIM = {"claim": "SELECT id FROM jobs LIMIT :room"}
LEASING = {"claim": "UPDATE jobs SET until = :until WHERE id = 1 RETURNING id"}
LOCK = {"lock": "SELECT mine(:key)"}
UNLOCK = {"unlock": "SELECT free(:key)"}
KEY = AdvisoryLock("{id}")


@pytest.mark.parametrize(
    ("custom", "claim", "why"),
    [
        (LOCK, KEY, "custom['lock'] needs custom['unlock'] as well"),
        (UNLOCK, KEY, "custom['unlock'] needs custom['lock'] as well"),
        (
            LOCK | UNLOCK,
            Lease(30.0),
            "custom['lock'] and custom['unlock'] need claim=AdvisoryLock(key), not Lease(duration=30.0), under which",
        ),
        (LOCK | UNLOCK, RowLock(), "need claim=AdvisoryLock(key), not RowLock("),
        (CLAIM, KEY, "custom['claim'] cannot be under AdvisoryLock(key='{id}')"),
        ({"extend": "SELECT :id, :until"}, RowLock(), "custom['extend'] needs claim=Lease(seconds), not RowLock("),
        ({"extend": "SELECT :id, :until"}, KEY, "custom['extend'] needs claim=Lease(seconds), not AdvisoryLock("),
        ({"fetch": "SELECT :id"}, RowLock(), "custom['fetch'] needs custom['claim'] as well"),
        ({"claim": "SELECT :until"}, RowLock(), "custom['claim'] binds :until, which is none of now, group, room"),
        ({"claim": "SELECT :id"}, RowLock(), "custom['claim'] binds :id, which is none of now, group, room"),
        (
            {"claim": "SELECT 1"},
            Lease(30.0),
            "custom['claim'] must bind :until: it must write that, the lease's end, into locked_until",
        ),
        ({"extend": "SELECT :id"}, Lease(30.0), "custom['extend'] must bind :until: it must write that"),
        ({"extend": "SELECT :until"}, Lease(30.0), "custom['extend'] must bind :id"),
        (CLAIM | {"fetch": "SELECT 1"}, RowLock(), "custom['fetch'] must bind :id"),
        (CLAIM | {"fetch": "SELECT :id, :token"}, RowLock(), "binds :token, which is none of id, group"),
        ({"lock": "SELECT 1"} | UNLOCK, KEY, "custom['lock'] must bind :key"),
        (LOCK | {"unlock": "SELECT true"}, KEY, "custom['unlock'] must bind :key"),
        (
            {"ack": "SELECT :until"},
            Lease(30.0),
            "custom['ack'] binds :until, which is none of id, token, attempt, now, ",
        ),
    ],
)
def test_what_does_not_go_together(custom: dict[str, str], claim: ClaimForm, why: str) -> None:
    """S-10.3."""
    with pytest.raises(ValueError, match=re.escape(why)):
        check_custom(custom, claim, JOBS)


@pytest.mark.parametrize("custom", [LEASING, {"extend": "SELECT :id, :until"}])
def test_not_for_a_fifo_table(custom: dict[str, str]) -> None:
    """S-7: the order is kept by our own claim and extend."""
    with pytest.raises(ValueError, match=r"cannot be for the FIFO table 'jobs', .* leave fifo out"):
        check_custom(custom, Lease(30.0), FIFO)


def test_what_sqlite_has_not() -> None:
    """S-10.3: on construction of the queue."""
    broker = SqlBroker("sqlite:///nowhere.db")
    with pytest.raises(ValueError, match=r"custom\['lock'\] and custom\['unlock'\] cannot be on SQLite, where no lock"):
        broker.queue(JOBS, claim=KEY, custom=LOCK | UNLOCK)
    leased: Table[Any] = Table("jobs", id="id", payload="body", locked_until="until")
    with pytest.raises(ValueError, match=r"custom\['claim'\] needs custom\['fetch'\] as well on SQLite"):
        broker.queue(leased, custom=LEASING)
    broker.queue(leased, custom=LEASING | {"fetch": "SELECT body FROM jobs WHERE id = :id"})


def test_how_psycopg_takes_the_names() -> None:
    """What is more than a value has its type; the time is the server's."""
    assert for_psycopg("SELECT :now, :until, :key, :room") == (
        "SELECT clock_timestamp(), %(until)s::timestamptz, %(key)s::text, %(room)s"
    )


# --- what they gave


def test_ids() -> None:
    """Each once, in order; NULL is none."""
    assert ids_of([(3,), (None,), (1, "more"), (3,)], 2) == [3, 1]
    assert ids_of([(None,)], 1) == []
    with pytest.raises(CallBroken, match="gave 2 rows, and there is room for 1: let it end with LIMIT :room"):
        ids_of([(1,), (2,)], 1)
    with pytest.raises(CallBroken, match=r"must give ids, not \[1\]"):
        ids_of([([1],)], 1)


def test_which_are_worked_on() -> None:
    passing = Passing(held={9}, over=frozenset())
    looked = [(0, True, 1, "until", 2), (1, None, 2, "until", 2), (3, True, 1, "until", 2)]
    assert ours_of([1, 2, 3, 1.0], looked, passing, "not there") == [(1, "until", 2)]
    assert {key: str(why) for key, why in passing.failed.items()} == {
        3: "the statement for 'claim' gave it, but it is not there",
        2: "the statement for 'claim' gave it, but it is not due, or finished, or of another group",
    }
    with pytest.raises(CallBroken, match="has leased row 9, which is in hand"):
        ours_of([9], [(0, True, 9, "until", 2)], passing, "not there")


def test_what_was_fetched() -> None:
    row = (1, "until", 2, None, None, None)
    assert fetched(JOBS, row, ["head", "body", "more"], [(None, b"a", 1)]) == (1, "until", 2, b"a", None, None)
    whole: Table[Any] = Table("jobs", id="id", headers="head")
    assert fetched(whole, row, ["head", "more"], [(None, 1)])[6] == {"head": None, "more": 1}
    assert str(fetched(whole, row, ["head"], [])[6]) == "the statement for 'fetch' gave 0 rows for row 1, not 1"
    lacks = fetched(JOBS, row, ["body"], [(b"a",)])
    assert str(lacks[3]) == "the statement for 'fetch' gave no column 'head' for row 1; it gave body"


@pytest.mark.parametrize(("answer", "said"), [(True, True), (False, False), (1, True), (0, False)])
def test_yes_and_no(answer: object, said: bool) -> None:
    assert yes("lock", [(answer,)]) is said


@pytest.mark.parametrize(
    ("found", "what"),
    [([], "0 rows"), ([(None,)], "None"), ([("t",)], "'t'"), ([(True,), (True,)], "2 rows"), ([()], "None")],
)
def test_neither(found: list[tuple[Any, ...]], what: str) -> None:
    with pytest.raises(CallBroken, match=f"'unlock' must give one row with true or false, not {what}"):
        yes("unlock", found)
