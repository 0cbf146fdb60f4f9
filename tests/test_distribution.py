"""What is shipped, and what the repository must not say."""

import re
import subprocess
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.build import build_wheel

ROOT = Path(__file__).parent.parent
PACKAGES = {"settlement", "actors", "links"}
INFO = "trio_settlement-0.1.0.dist-info"

# In pieces, so that this file does not say what it forbids.
REGISTRIES = [r"\.".join(parts) for parts in (
    ("pypi", "org"), ("pythonhosted", "org"), ("debian", "org"), ("ubuntu", "com"),
    ("npmjs", "(?:org|com)"), ("yarnpkg", "com"), ("crates", "io"), ("golang", "org"),
)]  # fmt: skip
FOLDERS = "work|tmp|root|home|opt"
FORBIDDEN = re.compile(rf"(?:{'|'.join(REGISTRIES)})\b|(?<![\w.*}}/-])/(?:{FOLDERS})/\w")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ZipFile:
    """The wheel of this clone, built without a network by the hatchling of the lock."""
    monkeypatch.chdir(ROOT)
    return ZipFile(tmp_path / build_wheel(str(tmp_path)))


def metadata(wheel: ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"{INFO}/METADATA").decode())


def test_the_wheel_holds_three_packages_and_nothing_beside_them(wheel: ZipFile) -> None:
    """At the top of the wheel stand settlement, actors, links and the dist-info."""
    assert {name.split("/")[0] for name in wheel.namelist()} == PACKAGES | {INFO}


def test_the_wheel_holds_every_module(wheel: ZipFile) -> None:
    """Every module of the three packages is in the wheel, and no compiled one."""
    modules = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert modules
    assert {name for name in wheel.namelist() if name.endswith((".py", ".pyc"))} == modules


def test_each_package_says_that_it_is_typed(wheel: ZipFile) -> None:
    """A type checker believes the annotations of a package only where it finds py.typed."""
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_the_metadata_says_what_a_user_needs(wheel: ZipFile) -> None:
    """Name, version, the Pythons, and trio and attrs as the only two hard dependencies."""
    said = metadata(wheel)
    hard = {need for need in said.get_all("Requires-Dist", []) if "extra ==" not in need}
    assert (said["Name"], said["Version"], said["Requires-Python"]) == ("trio-settlement", "0.1.0", ">=3.11")
    assert hard == {"trio>=0.31", "attrs>=23.2"}
    assert said["License-Expression"] == "MIT"
    assert f"{INFO}/licenses/LICENSE" in wheel.namelist()


@pytest.mark.parametrize("lock", sorted((ROOT / "locks").glob("*.txt")), ids=lambda lock: lock.name)
def test_a_lock_pins_by_hash_and_names_no_host(lock: Path) -> None:
    """A lock says which bytes, never where they come from."""
    text = lock.read_text()
    pins = re.findall(r"^\S+==\S+(?: ;.*?)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    assert len(pins) == len(re.findall(r"^[^\s#]", text, re.MULTILINE)) > 0
    assert not re.search(r"://|--(?:extra-)?index|--find-links", text)


def test_both_environments_have_a_lock() -> None:
    """What examples/run and tests/run install is written down."""
    assert {path.name for path in (ROOT / "locks").iterdir()} >= {"run.in", "run.txt", "tests.in", "tests.txt"}


def test_no_file_names_a_registry_host_or_a_place_on_one_machine() -> None:
    """The repository is the same for everybody: it names no registry's host and no path of one machine."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files are ours")
    ours = ["git", "ls-files", "-z"]  # what is tracked: what lies about besides is nobody's business
    listed = subprocess.run(ours, cwd=ROOT, check=True, capture_output=True)
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    texts = {path: path.read_bytes() for path in files if path.is_file()}
    assert Path(__file__) in texts
    said = {
        f"{path.relative_to(ROOT)}:{number}: {found[0]}"
        for path, content in texts.items()
        if b"\0" not in content
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1)
        if (found := FORBIDDEN.search(line))
    }
    assert not said
