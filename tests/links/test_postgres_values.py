"""How a list is bound as an array."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from links.sql.postgres.values import array


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        ([], "{}"),
        ([7], "{7}"),
        ([-1, 2**63 - 1], "{-1,9223372036854775807}"),
        ([1, None], [1, None]),
        ([True], [True]),
        ([Decimal(1)], [Decimal(1)]),
        (['a,"b"', "{}"], ['a,"b"', "{}"]),
    ],
)
def test_whole_numbers_alone_are_bound_as_a_text(values: list[Any], bound: Any) -> None:
    """All else is psycopg's to quote."""
    assert array(values) == bound
