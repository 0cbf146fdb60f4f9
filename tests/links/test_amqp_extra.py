"""Without the extra `amqp`."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.amqp

_BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("proton", "cproton", "cproton_ffi"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
try:
    import links.amqp
except ImportError as error:
    print(error, error.name)
"""


def test_a_missing_extra_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", _BLOCKED], check=True, capture_output=True, text=True)
    assert done.stdout == 'links.amqp needs python-qpid-proton: pip install "trio-settlement[amqp]" proton\n'
