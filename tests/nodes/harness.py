"""Simulate nodes on one machine: network and UTS namespaces joined by a bridge, and views of a shared
directory that bindfs mounts. Each test cleans up its namespaces, mounts and processes.

BERT_DP_NODES=N (10 in `make nodes`) adds long tests and runs N rounds of each fault; CI runs one or two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.cli import command, tiny, wait_for

ROUNDS = int(os.environ.get("BERT_DP_NODES", "0"))
FULL = ROUNDS > 0
NUMBERS = itertools.count()
PORT = 29400


def rounds(short: int = 2) -> range:
    return range(ROUNDS or short)


def observe(fault: str, **facts: Any) -> None:
    """Record the facts of one round for the table of `make nodes`."""
    if path := os.environ.get("BERT_DP_NODES_RECORD"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"fault": fault, **facts}) + "\n")


def why_not() -> str | None:
    """Return the reason why this machine cannot make namespaces, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"bdp-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"cannot make a network namespace: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


REASON = why_not()
needs_nodes = pytest.mark.skipif(REASON is not None, reason=REASON or "")


def run(*arguments: str) -> str:
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


@dataclasses.dataclass(frozen=True)
class Started:
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def output_text(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str, seconds: float = 120) -> None:
        wait_for(lambda: text in self.output_text or self.process.poll() is not None, seconds)
        assert text in self.output_text, self.output_text


class Cluster:
    """Context manager of `size` nodes. Node K of cluster N is hostK at 10.77.N.K+1 and 10.78.N.K+1."""

    def __init__(self, size: int = 2):
        number = next(NUMBERS)
        self.tag, self.net = f"{os.getpid()}x{number}", number % 250
        self.names = [f"bdp{self.tag}n{k}" for k in range(size)]
        self.started: list[subprocess.Popen[bytes]] = []
        self.folder = Path(tempfile.mkdtemp(prefix="nodes-"))

    def __enter__(self) -> Cluster:
        bridge = f"b{self.tag}"
        run("ip", "netns", "add", bridge)
        for k, name in enumerate(self.names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            for net, device in ((77, "data"), (78, "other")):
                port = f"{device}{k}"
                run("ip", "link", "add", device, "netns", name, "type", "veth", "peer", port, "netns", bridge)
                run("ip", "-n", name, "addr", "add", f"10.{net}.{self.net}.{k + 1}/24", "dev", device)
                run("ip", "-n", name, "link", "set", device, "up")
        for device in ("data", "other"):
            run("ip", "-n", bridge, "link", "add", f"br-{device}", "type", "bridge")
            run("ip", "-n", bridge, "link", "set", f"br-{device}", "up")
            for k in range(len(self.names)):
                run("ip", "-n", bridge, "link", "set", f"{device}{k}", "master", f"br-{device}", "up")
        self.bridge = bridge
        return self

    def __exit__(self, *_: object) -> None:
        for process in (process for node in range(len(self.names)) for process in self.on(node)):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for popen in self.started:
            popen.wait(timeout=30)
        shutil.rmtree(self.folder)
        for name in (*self.names, self.bridge):
            subprocess.run(["ip", "netns", "del", name], check=False)

    def address(self, node: int, net: int = 77) -> str:
        return f"10.{net}.{self.net}.{node + 1}"

    def inside(self, node: int, *arguments: str) -> list[str]:
        """Return a command for a node's namespaces, which sets its host name and runs $BEFORE first."""
        script = 'hostname "$0" && ${BEFORE:-true} && exec "$@"'
        within = ["ip", "netns", "exec", self.names[node], "unshare", "-u", "sh", "-c", script, f"host{node}"]
        return [*within, *arguments]

    def start(self, node: int, *arguments: str, **environ: str) -> Started:
        path = self.folder / f"{len(self.started)}.txt"
        with path.open("wb") as output:
            process = subprocess.Popen(
                self.inside(node, *arguments),
                stdout=output,
                stderr=output,
                env={**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", **environ},
            )
        self.started.append(process)
        return Started(process, path)

    def train(
        self,
        shards: Path,
        run_dir: Path | list[Path],
        *settings: str,
        nproc: int = 1,
        options: tuple[str, ...] = (),
        nodes: tuple[int, ...] = (0, 1),
        size: int | None = None,
        **environ: str,
    ) -> list[Started]:
        """Start `bert-dp train` on `nodes`. `run_dir` is one path or a list with the path of each node."""
        size = size or len(self.names)
        items = " ".join(settings).split()
        started = []
        for node in nodes:
            place = run_dir if isinstance(run_dir, Path) else run_dir[node]
            place_options = ["--nnodes", str(size), "--node-rank", str(node)]
            place_options += ["--rendezvous", f"{self.address(0)}:{PORT}"]
            words = command("train", "quickstart", *tiny(shards, *items), "--nproc", str(nproc))
            started.append(
                self.start(node, *words, "--run-dir", str(place), *place_options, *options, **environ)
            )
        return started

    def on(self, node: int) -> list[psutil.Process]:
        """Return the processes of a node."""
        name = self.names[node]
        pids = run("ip", "netns", "pids", name).split() if name in run("ip", "netns") else []
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self, node: int) -> list[psutil.Process]:
        """Return the workers on a node, sorted by rank."""
        found = []
        for process in self.on(node):
            with contextlib.suppress(psutil.Error, ValueError):
                words = process.cmdline()
                if words[words.index("-m") + 1] == "bert_dp.worker":
                    found.append((int(process.environ()["RANK"]), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def link(self, node: int, state: str) -> None:
        run("ip", "-n", self.bridge, "link", "set", f"data{node}", state)

    def signal(self, node: int, number: int) -> None:
        """Send a signal to every process of a node."""
        for process in self.on(node):
            process.send_signal(number)

    def assert_empty(self, seconds: float) -> None:
        """Check that within `seconds` no process is left on any node."""
        wait_for(lambda: not any(self.on(k) for k in range(len(self.names))), seconds)


@contextlib.contextmanager
def stale_views(shared: Path, *views: Path) -> Iterator[None]:
    """Mount `shared` at each view, which may show a state that is 5 s old."""
    if shutil.which("bindfs") is None or not os.path.exists("/dev/fuse"):
        pytest.skip("bindfs or /dev/fuse is missing")
    options = "attr_timeout=5,entry_timeout=5,negative_timeout=5"
    shared.mkdir(parents=True)
    mounted = []
    try:
        for view in views:
            view.mkdir(parents=True)
            run("bindfs", "-o", options, str(shared), str(view))
            mounted.append(view)
        yield
    finally:
        for view in mounted:
            subprocess.run(["umount", "-l", str(view)], check=False)


def ended(started: list[Started], code: int, seconds: float = 240) -> list[str]:
    """Return the output of each process; all must exit with `code` within `seconds`."""
    deadline = time.monotonic() + seconds
    for each in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(timeout=max(0.1, deadline - time.monotonic()))
    outputs = [each.output_text for each in started]
    assert [each.process.poll() for each in started] == [code] * len(started), "\n---\n".join(outputs)
    return outputs
