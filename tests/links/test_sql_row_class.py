"""Row mode into the user's own class: attrs, dataclass, msgspec Struct; on SQLite and PostgreSQL."""

from __future__ import annotations

import dataclasses
import datetime as dt
import sqlite3
import uuid
from abc import ABC, abstractmethod
from contextlib import closing
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs
import pytest

from actors import Subscription, open_runtime
from links.errors import LinkRefused
from links.sql import SqlBroker, Table
from links.sql.row_class import fields_of, lacking, maker
from settlement import Ack, Delivery, Drop, Outcome, Policy
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import open_link, until


@attrs.frozen
class Attrs:
    id: int
    amount: float = attrs.field(validator=attrs.validators.ge(0))
    _note: str | None = None
    tags: list[str] = attrs.Factory(list[str])
    seen: int = attrs.field(default=0, init=False)


@dataclasses.dataclass(frozen=True)
class Data:
    id: int
    amount: float
    _note: str | None = None
    tags: list[str] = dataclasses.field(default_factory=list[str])
    seen: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.amount < 0:
            raise ValueError("amount must be 0 or more")


def struct(name: str, *fields: Any, **options: Any) -> Any:
    """A Struct, where msgspec is installed."""
    pytest.importorskip("msgspec")
    made = import_module("msgspec").defstruct(name, list(fields), **options)
    made.__module__ = __name__
    return made


def amounts() -> Any:
    return struct("Amounts", ("id", int), ("amount", float), ("note_of", str | None, None), rename="camel")


# --- the class


def test_which_classes_there_are() -> None:
    """Each field by its name, the argument that takes it, and whether it must be given."""
    expected = {"id": ("id", True), "amount": ("amount", True), "_note": ("note", False), "tags": ("tags", False)}
    assert fields_of(Attrs) == expected
    assert fields_of(Data) == expected | {"_note": ("_note", False)}
    assert fields_of(amounts()) == {"id": ("id", True), "amount": ("amount", True), "note_of": ("noteOf", False)}
    assert lacking(Attrs, ["id", "note"]) == ["amount"]


@pytest.mark.parametrize("kind", [Attrs, Data])
def test_a_row_becomes_an_instance(kind: type[Any]) -> None:
    """A column that no field has is left out, a field without a column keeps its default."""
    made = maker(kind)({"id": 1, "amount": 2.5, "_note": "x", "locked_until": None, "seen": 9})
    assert (made, made.seen) == (kind(1, 2.5, "x"), 0)
    with pytest.raises(ValueError, match="amount"):
        maker(kind)({"id": 1, "amount": -1.0})


def test_a_struct_converts_what_a_database_holds() -> None:
    """Columns by field name; SQLite's 0 and 1 are a bool, its texts times and UUIDs; NULL is no int."""
    one = uuid.uuid4()
    kind = struct("All", ("id", uuid.UUID), ("paid", bool), ("at", dt.datetime), ("sum_of", Decimal), rename="camel")
    row = {"id": str(one), "paid": 1, "at": "2026-11-30T12:00:00Z", "sum_of": "1.50", "other": object()}
    expected = kind(one, True, dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC), Decimal("1.50"))
    assert maker(kind)(row) == expected
    assert maker(kind)(row | {"id": one, "paid": True, "at": expected.at, "sum_of": Decimal("1.50")}) == expected
    with pytest.raises(ValueError, match="null"):
        maker(kind)(row | {"paid": None})


@pytest.mark.parametrize("row", [dict, int, "Order", Attrs(1, 1.0), None.__class__], ids=str)
def test_another_class_is_refused(row: Any) -> None:
    """When the table is described; the way out is a decoder."""
    with pytest.raises(ValueError, match=r"row must be an attrs class, a dataclass or a msgspec.Struct, not .*decode"):
        Table("orders", id="id", row=row)


class Abstract(ABC):
    @abstractmethod
    def total(self) -> int: ...


@attrs.frozen
class Unfinished(Abstract):
    id: int


def test_a_class_that_no_row_becomes_is_refused() -> None:
    """Else each row would be a decode failure, and dropped: an abstract class, and a Struct that is an array."""
    abstract: Any = Unfinished
    with pytest.raises(ValueError, match=r"Unfinished.*: it is abstract"):
        Table("orders", id="id", row=abstract)
    with pytest.raises(ValueError, match=r"Array.*: it is array_like"):
        Table("orders", id="id", row=struct("Array", ("id", int), array_like=True))


@dataclasses.dataclass
class Scaled:
    id: int
    scale: dataclasses.InitVar[int]
    amount: int = 0

    def __post_init__(self, scale: int) -> None:
        self.amount *= scale


@dataclasses.dataclass(init=False)
class Made:
    id: int
    amount: int = 0

    def __init__(self, id: int, unit: str, **_: Any) -> None:  # noqa: A002 -- a column's name
        self.id, self.unit = id, unit


def test_what_a_dataclass_is_called_with() -> None:
    """An InitVar, or an argument of an __init__ of its own, is a column too: without one no row could be made."""
    assert lacking(Scaled, ["id", "amount"]) == ["scale"]
    assert maker(Scaled)({"id": 1, "scale": 3, "amount": 2, "other": 0}) == Scaled(1, 3, 2)
    assert (lacking(Made, ["id"]), maker(Made)({"id": 1, "unit": "g"}).unit) == (["unit"], "g")


T = TypeVar("T")


@attrs.frozen
class Pair(Generic[T]):
    id: int
    _second: T = attrs.field(alias="other")


@attrs.frozen(kw_only=True)
class Triple(Pair[str]):
    third: int = 3


def test_generics_aliases_and_what_is_inherited() -> None:
    """By the field's name, whatever the argument is called and wherever the field comes from."""
    assert lacking(Triple, ["id", "second"]) == ["_second"]
    assert maker(Triple)({"id": 1, "_second": "x", "third": 4}) == Triple(id=1, other="x", third=4)
    assert maker(Pair)({"id": 1, "_second": 2}) == Pair(1, 2)
    base: Any = struct("Base", ("id", int))
    module = import_module("msgspec")
    child = module.defstruct("Child", [("amount", float, 0.0)], bases=(base,), rename={"amount": "Betrag"})
    assert maker(child)({"id": "1", "amount": "2.5", "Betrag": 9}) == child(1, 2.5)


def test_a_payload_is_no_row() -> None:
    """A table has one or the other."""
    both: dict[str, Any] = {"payload": "body", "row": Attrs}
    with pytest.raises(ValueError, match="row must be None where there is a payload column"):
        Table("orders", id="id", **both)


# --- the queue


class Place:
    """A queue table `orders` with the columns id, amount, note and a lease, in one of the two databases."""

    def __init__(self, path: Path, database: str | None) -> None:
        self.url = database or f"sqlite:///{path / 'q.db'}"
        self._file = None if database else path / "q.db"
        key, time = ("serial", "timestamptz") if database else ("INTEGER", "REAL")
        self.run(f"CREATE TABLE orders (id {key} PRIMARY KEY, amount float, _note text, lock {time})")

    def run(self, statement: str) -> None:
        if self._file is None:
            PostgresTables(self.url).run(statement)
            return
        with closing(sqlite3.connect(self._file, isolation_level=None)) as connection:
            connection.execute(statement)


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.sqlite),
        pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.servers]),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, None if request.param == "sqlite" else request.getfixturevalue("database"))


async def test_the_message_is_an_instance(place: Place) -> None:
    """S-1.2, row mode; the body is the row as JSON, as it is for a dict; the lease is empty as there."""
    place.run("INSERT INTO orders (amount, _note) VALUES (2.5, 'x')")
    table = Table("orders", id="id", locked_until="lock", row=Attrs)
    async with open_link(SqlBroker(place.url).queue(table)) as link:
        (received,) = await link.receive(1)
        assert received.unreadable is None
        assert received.delivery.message == Attrs(1, 2.5, "x")
        assert received.delivery.body == b'{"id": 1, "amount": 2.5, "_note": "x", "lock": null}'


async def test_values_that_do_not_fit_are_a_decode_failure(place: Place) -> None:
    """S-4.9: of that row alone; the policy answers, and the others go on."""
    place.run("INSERT INTO orders (amount) VALUES (1), (-1), (NULL), (4)")
    seen: list[Attrs] = []

    async def handler(delivery: Delivery[Attrs]) -> Outcome:
        seen.append(delivery.message)
        return Ack()

    queue = SqlBroker(place.url, poll_interval=0.05).queue(Table("orders", id="id", locked_until="lock", row=Attrs))
    subscription = Subscription(queue, handler, policy=Policy(on_undecodable=Drop()))
    async with open_runtime(subscription) as runtime:
        await until(lambda: runtime.ledger("orders").acked == 2, 10)
        await until(lambda: runtime.ledger("orders").dropped == 2, 10)
    assert seen == [Attrs(1, 1.0), Attrs(4, 4.0)]


async def test_a_field_without_a_column_is_refused(place: Place) -> None:
    """S-12.3: at start-up, by name, with the way out; one that has a default is none."""
    place.run("ALTER TABLE orders RENAME amount TO total")
    queue = SqlBroker(place.url).queue(Table("orders", id="id", locked_until="lock", row=Data))
    with pytest.raises(LinkRefused, match=r"'orders': there is no column 'amount' for that field of Data.*id, total"):
        async with open_link(queue):
            pass


async def test_a_struct_of_a_row(place: Place) -> None:
    """As the others, by msgspec's own conversion."""
    place.run("INSERT INTO orders (amount) VALUES (2)")
    kind = amounts()
    async with open_link(SqlBroker(place.url).queue(Table("orders", id="id", locked_until="lock", row=kind))) as link:
        (received,) = await link.receive(1)
        assert received.delivery.message == kind(1, 2.0)
