"""Which index does a claim walk along? One that has the queue's order; its name then stands in the statement.

So the order of the claims, and how many rows they lock, does not depend on what the optimizer thinks of the table:
where it sorts instead, each claim locks every row that is due, and others find nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from links.sql.mysql.schema import Index, MysqlSchema

__all__ = ["Walk", "walk"]


@attrs.frozen
class Walk:
    """How a claim walks.

    Attributes:
        index: The name of the index.
        among: How many of the columns that are the same for every row of the queue stand in front of the order.
    """

    index: str
    among: int


def walk(schema: MysqlSchema, same: Sequence[str], order: Sequence[str]) -> Walk | None:
    """The index to walk along; None: there is none in this order.

    `same`: the columns that have one value in every row that a claim may have (group, processed_at). `order`: what
    orders the queue, with the id at the end.
    """
    found = [each for index in schema.indexes if (each := _walk(schema, index, same, order)) is not None]
    return max(found, key=lambda each: (each.among, each.index == "PRIMARY"), default=None)


def _walk(schema: MysqlSchema, index: Index, same: Sequence[str], order: Sequence[str]) -> Walk | None:
    columns = list(index.columns)
    if index.whole:  # an index ends with the primary key
        columns += [column for column in schema.key if column not in columns]
    alike = {column.lower() for column in same}
    among = 0
    while among < len(columns) and columns[among] in alike:
        among += 1
    ordered = [column for column in columns[among:] if column not in alike]
    wanted = [column.lower() for column in order]
    return Walk(index.name, among) if ordered[: len(wanted)] == wanted else None
