"""`doctor` over several nodes: what a run over them needs, their clocks, and the rate of the link to each."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bert_dp.config import ConfigError, read_manifest
from launcher import job
from launcher.children import NO_ANSWER, start_module
from launcher.log import Log
from launcher.machine.doctor import Finding
from launcher.machine.environment import existing
from launcher.run import peers
from launcher.run.nodes import Place
from launcher.run.processes import stop_signals

LINK_S = 90.0  # for one measurement, imports included
MAX_CLOCK_S = 1.0
SILENT_S = 30.0  # of a launcher that is lost


def check(place: Place, run_dir: Path, data: Path | None, log: Log) -> tuple[list[Finding], int]:
    """Check the nodes; return the findings, all of them on node 0, and the exit code. Raises ConfigError for
    what would also end a run: a node that does not come, other versions or data, no shared directory."""
    here, directory = job.load("quickstart", [], run_dir), existing(run_dir.resolve())
    hello = peers.hello_of(here, place, 1)
    if place.rank:
        return [], _serve(place, directory, data, hello)
    with peers.coordinating(place, directory, log, SILENT_S) as nodes:
        nodes.gather(hello)
        nodes.check_data(_hash(data))
        shared = f"nodes: {place.nodes} have the same versions and see {directory}"
        findings = [Finding("ok", shared + (f" and the data {_hash(data)[:16]}" if data else ""))]
        for rank in range(1, place.nodes):
            findings += [_clock(nodes, rank), _link(nodes, rank)]
        nodes.end(int(any(f.level == "fail" for f in findings)))
    return findings, 0


def _hash(data: Path | None) -> str:
    return "" if data is None else read_manifest(data).hash


def _clock(nodes: peers.Coordinator, rank: int) -> Finding:
    """Compare a node's clock with ours, within half the time of the answer."""
    offset_s, error_s = nodes.clock_offset(rank)
    message = f"clock of {nodes.name(rank)}: {offset_s * 1e3:+.0f} ms ± {error_s * 1e3:.0f} ms from node 0's"
    if abs(offset_s) <= MAX_CLOCK_S + error_s:
        return Finding("ok", message)
    return Finding("warn", message, "dates in logs of several nodes do not compare", "run chrony or ntpd")


def _link(nodes: peers.Coordinator, rank: int) -> Finding:
    """Measure all-reduces between a rank here and one there."""
    place, name = nodes.place, nodes.name(rank)
    with peers.listen(place.address, 0) as store:
        port: int = store.getsockname()[1]
        nodes.ask(rank, "start", store=port)
        output, error = _measure(place, 0, port, store.fileno())
    if not output:
        consequence = "ranks of different nodes cannot talk to each other"
        fix = "look for a firewall between the nodes, or choose another --interface"
        return Finding("fail", f"all-reduce with {name}: {error}", consequence, fix)
    r = json.loads(output)
    rate = f"{r['busbw_gb_s'] * 1e3:,.1f} MB/s over {place.interface}"
    return Finding(
        "ok", f"all-reduce with {name}: {r['backend']}, {r['bytes'] / 2**20:.0f} MiB at a rate of {rate}"
    )


def _measure(place: Place, rank: int, port: int, listening: int | None) -> tuple[str, str]:
    """Run one of two ranks; return rank 0's line, empty where it failed, and the error. `listening`: the
    store's socket."""
    words = [
        str(rank),
        place.address,
        str(port),
        place.interface,
        str(-1 if listening is None else listening),
    ]
    process = start_module(
        "bert_dp.measure.all_reduce",
        ["pair", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[] if listening is None else [listening],
    )
    try:
        output, errors = process.communicate(timeout=LINK_S)
        return output.strip(), (errors.strip().splitlines() or ["no result"])[-1]
    except subprocess.TimeoutExpired:
        return "", f"{NO_ANSWER} {LINK_S:.0f} s"
    finally:
        process.kill()
        process.wait()


def _serve(place: Place, directory: Path, data: Path | None, hello: peers.Message) -> int:
    """Do what node 0 asks for, and return its exit code. Raises ConfigError."""
    member = peers.join(place, directory, hello, SILENT_S)
    try:
        member.link.send("data", hash=_hash(data), issues=[])
    except ConfigError as error:
        member.link.send("data", hash="", issues=[issue.to_json() for issue in error.issues])
    with stop_signals() as pending:
        while (order := member.next(lambda: bool(pending))) is not None and order["kind"] == "start":
            _measure(place, 1, order["store"], None)
    if order is None:
        return 128 + pending[0] if pending else 1
    member.link.close()
    if order["issues"]:
        raise ConfigError([peers.Issue(**issue) for issue in order["issues"]])
    return int(order["code"])
