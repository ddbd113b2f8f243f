"""Compare the versions, data and clocks of several nodes for `doctor`, and test the network between them."""

import json
from collections.abc import Sequence
from pathlib import Path

from bert_dp.config import ConfigError, Issue, read_manifest
from launcher import job
from launcher.children import module_command, run_command
from launcher.log import Log
from launcher.machine.doctor import Finding
from launcher.machine.environment import existing
from launcher.run import peers
from launcher.run.nodes import Place

LINK_S = 90.0  # time limit for one measurement, including imports
MAX_CLOCK_S = 1.0  # a clock difference of more than this plus the measurement error causes a warning
SILENT_S = 30.0  # a launcher that sends no message for this long counts as lost


def check(place: Place, run_dir: Path, data: Path | None, log: Log) -> tuple[list[Finding], int]:
    """Check the nodes. Return (findings, 0) on node 0, and ([], node 0's exit code) on the other nodes.
    Raise ConfigError if a node is missing, versions or data differ, or `run_dir` is not shared."""
    directory = existing(run_dir.resolve())
    hello = peers.hello_of(job.load("quickstart", [], run_dir), place, 1)
    data_hash = read_manifest(data).hash if data else ""
    if place.rank:
        return [], _serve(place, directory, data_hash, hello)
    with peers.coordinating(place, directory, log, SILENT_S) as nodes:
        nodes.gather(hello)
        nodes.check_data(data_hash)
        also = f" and data (hash {data_hash[:16]})" if data else ""
        message = f"nodes: all {place.nodes} have the same versions{also} and share {directory}"
        findings = [Finding("ok", message)]
        for rank in range(1, place.nodes):
            findings += [_clock(nodes, rank), _link(nodes, rank)]
        nodes.end(int(any(f.level == "fail" for f in findings)))
    return findings, 0


def _clock(nodes: peers.Coordinator, rank: int) -> Finding:
    """Compare a node's clock with node 0's. The measurement error is at most half the round-trip time."""
    offset_s, error_s = nodes.clock_offset(rank)
    message = f"clock of {nodes.name(rank)}: {offset_s * 1e3:+.0f} ms ± {error_s * 1e3:.0f} ms from node 0's"
    if abs(offset_s) <= MAX_CLOCK_S + error_s:
        return Finding("ok", message)
    return Finding("warn", message, "timestamps in the nodes' logs are not comparable", "run chrony or ntpd")


def _link(nodes: peers.Coordinator, rank: int) -> Finding:
    """Measure an all-reduce between a process on node 0 and one on node `rank`."""
    place, what = nodes.place, f"all-reduce with {nodes.name(rank)}"
    with peers.listen(place.address, 0) as store:
        port: int = store.getsockname()[1]
        nodes.ask(rank, "start", store=port)
        output, error = _measure(place, 0, port, [store.fileno()])
    if not output:
        consequence = "ranks of different nodes cannot communicate"
        fix = "check for a firewall between the nodes, or choose another --interface"
        return Finding("fail", f"{what}: {error}", consequence, fix)
    r = json.loads(output)
    rate = f"{r['bytes'] / 2**20:.0f} MiB at {r['busbw_gb_s'] * 1e3:,.1f} MB/s over {place.interface}"
    return Finding("ok", f"{what}: {r['backend']}, {rate}")


def _measure(place: Place, rank: int, port: int, store: Sequence[int]) -> tuple[str | None, str | None]:
    """Run one rank of a two-rank all-reduce, and return (output, error) as run_command does. `store`: on
    rank 0, the file descriptor of the TCPStore's bound socket; on rank 1, empty."""
    words = [rank, place.address, port, place.interface, *store]
    command = [*module_command("bert_dp.measure.all_reduce"), "pair", *map(str, words)]
    return run_command(command, LINK_S, pass_fds=store)


def _serve(place: Place, directory: Path, data_hash: str, hello: peers.Message) -> int:
    """Run the measurements that node 0 requests. Return node 0's exit code, or 1 if node 0 is lost. Raise
    ConfigError if node 0 reports issues."""
    member = peers.join(place, directory, hello, SILENT_S)
    member.link.send("data", hash=data_hash, issues=[])
    while (order := member.next()) is not None and order["kind"] == "start":
        _measure(place, 1, order["store"], ())
    if order is None:
        return 1
    member.link.close()
    if order["issues"]:
        raise ConfigError([Issue(**issue) for issue in order["issues"]])
    return int(order["code"])
