"""What each connection says first. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["SESSION"]

SESSION: Final = b"""SELECT current_setting('transaction_read_only'), set_config('DateStyle', 'ISO', false),
    set_config('extra_float_digits', '3', false),
    set_config('default_transaction_isolation', 'read committed', false)"""
"""What a database or a role may set otherwise: times and floats are read as they are, the order of day and month in a
text stays; and each statement looks at what others have committed before it, not before its transaction."""
