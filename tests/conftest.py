"""Define the fixtures and settings of all tests."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.browser import Browser, find
from tests.shards import write_shards

LONG = ("e2e", "faults", "nodes", "parity")  # packages whose tests start ranks
LAST = ("e2e", "faults")  # run last, because the longest test files are in other packages

# so that tests can run bert-dp and Python of this environment by name
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
# waiting OpenMP threads sleep: a spinning thread takes the core from the thread that it waits for, which made
# a step of one rank on two busy cores 14 times as long
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # in a background job of a script, or under nohup
        signal.signal(number, default)

settings.register_profile("no timing decides a test", deadline=None)
settings.load_profile("no timing decides a test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow if they start ranks and are not quick: `make test` skips slow tests, and
    `make test-long` runs no others."""
    for item in items:
        if package_of(item) in LONG and not item.get_closest_marker("quick"):
            item.add_marker("slow")
    items.sort(key=lambda item: LAST.index(package_of(item)) + 1 if package_of(item) in LAST else 0)


def package_of(item: pytest.Item) -> str:
    return Path(item.path).parent.name


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write small shards, which no test changes."""
    return write_shards(tmp_path_factory.mktemp("shards") / "s")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the path of a run directory that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("no chromium or google-chrome on PATH")
    with Browser(program) as opened:
        yield opened
