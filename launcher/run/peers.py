"""Connect the launchers of a run over several nodes: node 0 coordinates, the others are members.

Lines of JSON over one TCP connection a member, bound to the address of the rendezvous. Who connects proves
that it sees the run directory, by a secret in a file there. Nothing is encrypted: the network is trusted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bert_dp import files
from bert_dp.config import ConfigError, Issue, differing_settings
from bert_dp.files import Heartbeat
from bert_dp.files.models import Failure
from launcher.job import COMPARED, Job
from launcher.log import Log
from launcher.report.formats import count_of
from launcher.run.nodes import Place
from launcher.run.starters import NodeStart, RankStart
from launcher.watch import hangs
from launcher.watch.failure import RankExit, first_line

BEAT_S = 1.0
ARRIVE_S = 120.0  # for every launcher to come
REFUSE_S = 10.0  # for launchers that are still to come, when node 0 itself has been refused
SUSPENDED_S = 5.0  # between two beats of our own: this process was stopped, and so heard nobody
ENDING_S = 20.0  # for a member to kill its ranks and to tell how they ended
LINE_BYTES = 2**26
SECRET = re.compile(r"\.nodes-[0-9a-f]{32}")

Message = dict[str, Any]


class Link:
    """One connection. A thread reads messages, another sends a beat each second with `status`."""

    def __init__(self, connection: socket.socket, received: Callable[[Message], None] | None = None):
        self._socket = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()
        self.received = received
        self.heard_s = time.monotonic()
        self.is_closed = False
        self.status: Message = {}
        """Facts of every beat that is sent."""

    def start(self) -> None:
        for target in (self._read, self._beat):
            threading.Thread(target=target, name="launchers", daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message; one to a launcher that is gone is lost, which `is_closed` tells."""
        line = json.dumps({"kind": kind, **facts}).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            self.is_closed = True

    def next_line(self, limit: int = LINE_BYTES) -> Message:
        """Read one message. Raises OSError at the end, and ValueError for what is no message."""
        line = self._reader.readline(limit)
        if not line.endswith(b"\n"):
            raise ConnectionError("closed")
        message = files.parse_json(line)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError("no message of a launcher")
        return message

    def silent_s(self) -> float:
        return time.monotonic() - self.heard_s

    def close(self) -> None:
        """Close once the other side has read what was sent and closes: a reset would take it away."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        end = time.monotonic() + 2.0
        while not self.is_closed and time.monotonic() < end:
            time.sleep(0.02)
        self.is_closed = True
        self._socket.close()

    def _read(self) -> None:
        try:
            while True:
                message = self.next_line()
                self.heard_s = time.monotonic()
                if self.received is not None:
                    self.received(message)
        except (OSError, ValueError):
            self.is_closed = True
            if self.received is not None:
                self.received({"kind": "closed"})

    def _beat(self) -> None:
        last = time.monotonic()
        while not self.is_closed:
            self.send("beat", **self.status)
            time.sleep(BEAT_S)
            now = time.monotonic()
            if now - last > BEAT_S + SUSPENDED_S:
                self.heard_s = now
            last = now


def _proof(secret: str, nonce: str) -> str:
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def _name(rank: int, host: object) -> str:
    return f"node {rank} ({files.safe(str(host))[:64]})"


@dataclasses.dataclass(frozen=True)
class Order:
    """Tell a node what the others mean for its ranks."""

    failed: bool = False
    """A rank elsewhere has failed: the ranks here get their time to save, and no more."""
    over: bool = False
    """End the ranks now."""
    signal: int = 0
    """A stop signal that came on another node."""


# --- node 0


class Coordinator:
    """Node 0's side: who is there, what each said, who is lost."""

    def __init__(self, place: Place, run_dir: Path, log: Log, limit_s: float):
        self.place, self._log, self._limit_s = place, log, limit_s
        self._run_dir, self._secret = run_dir, secrets.token_hex(32)
        self._file = run_dir / f".nodes-{secrets.token_hex(16)}"
        self._members: dict[int, Link] = {}
        self._strangers: list[Link] = []
        self._said: dict[tuple[int, str], Message] = {}
        """(node, kind) -> the newest message."""
        self._issues: list[Issue] = []
        self._changed = threading.Condition()
        self._attempt = 0
        self._told_failed = False
        self._cause: Failure | None = None
        self.hellos: dict[int, Message] = {}
        self._listener = listen(place.address, place.port)
        try:
            files.write_text(self._file, self._secret)
        except OSError as error:
            self._listener.close()
            message = f"{run_dir} cannot be written ({error.strerror})"
            raise ConfigError([Issue("--run-dir", "not_found", message, str(run_dir))]) from None
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    # who comes

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._admit, args=(connection,), name="admit", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Let a launcher prove that it sees the shared directory, and note who it is."""
        link, nonce = Link(connection), secrets.token_hex(16)
        connection.settimeout(files.STALE_S + 2 * BEAT_S)
        try:
            link.send("challenge", nonce=nonce, file=self._file.name)
            answer = link.next_line(4096)
            if answer["kind"] == "unseen":
                self._note(Issue(**answer["issue"]))
                return
            if not hmac.compare_digest(answer["proof"], _proof(self._secret, nonce)):
                return
            link.send("welcome", proof=_proof(self._secret, answer["nonce"]))
            hello = link.next_line()
            connection.settimeout(None)
            rank = int(hello["rank"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        link.received = lambda message: self._hear(rank, message)
        link.start()
        with self._changed:
            issue = self._refusal(rank, hello)
            if issue is None:
                self._members[rank], self.hellos[rank] = link, hello
                self._issues += [Issue(**fields) for fields in hello["issues"]]
            else:
                self._strangers.append(link)
                self._issues.append(issue)
            self._changed.notify_all()

    def _refusal(self, rank: int, hello: Message) -> Issue | None:
        """Find why a launcher has no place among the nodes."""
        if hello["nodes"] != self.place.nodes:
            message = f"{hello['nodes']} on {_name(rank, hello['host'])} and {self.place.nodes} on node 0"
            return Issue("--nnodes", "conflict", message, hello["nodes"], hint="give every node the same")
        if rank in self._members:
            hosts = f"{self.hellos[rank]['host']} and {hello['host']}"
            hint = "number the nodes from 0"
            return Issue(
                "--node-rank", "conflict", f"{rank} was given to two nodes, {hosts}", rank, hint=hint
            )
        return None

    def gather(self, hello: Message) -> None:
        """Wait for every node's launcher; `hello` is our own. Raises ConfigError for one that does not come,
        and for what differs between nodes."""
        self.hellos[0] = hello
        end = time.monotonic() + ARRIVE_S
        missing = self._wait_for_members(end)
        if missing and not self._issues:
            each = ", ".join(f"node {rank}" for rank in missing)
            message = f"{each} did not come within {ARRIVE_S:.0f} s"
            hint = (
                "start `bert-dp train` on every node, with the same --rendezvous; see its own message there"
            )
            raise ConfigError([Issue("--nnodes", "missing", message, self.place.nodes, hint=hint)])
        if issues := [*self._issues, *_differences(self.hellos)]:
            raise ConfigError(issues)
        self._log(
            "nodes: "
            + ", ".join(
                f"{self.name(rank)} with {count_of(count, 'rank')}" for rank, count in enumerate(self.counts)
            )
        )

    def _wait_for_members(self, end: float) -> list[int]:
        """Return the nodes that have not come by `end`, or when an issue came first."""
        with self._changed:
            while True:
                missing = [rank for rank in range(1, self.place.nodes) if rank not in self._members]
                left = end - time.monotonic()
                if not missing or self._issues or left <= 0:
                    return missing
                self._changed.wait(left)

    @property
    def nodes(self) -> list[str]:
        """The node of each rank."""
        return [self.name(rank) for rank, count in enumerate(self.counts) for _ in range(count)]

    @property
    def counts(self) -> list[int]:
        """Ranks of each node."""
        return [int(self.hellos[rank]["nproc"]) for rank in range(self.place.nodes)]

    def name(self, rank: int) -> str:
        return _name(rank, self.hellos[rank]["host"])

    # what they say

    def _note(self, issue: Issue) -> None:
        with self._changed:
            self._issues.append(issue)
            self._changed.notify_all()

    def _hear(self, rank: int, message: Message) -> None:
        with self._changed:
            self._said[rank, message["kind"]] = {**message, "heard_ns": time.monotonic_ns()}
            self._changed.notify_all()

    def lost(self) -> Failure | None:
        """Describe a node whose launcher has gone, or was not heard of for hang_after_s."""
        for rank, link in self._members.items():
            if not link.is_closed and link.silent_s() < self._limit_s:
                continue
            how = (
                "its launcher has ended"
                if link.is_closed
                else (f"not heard of for {link.silent_s():.0f} s: the machine or the link has failed")
            )
            return Failure(kind="node_lost", message=f"{self.name(rank)} is lost: {how}")
        return None

    def _await(self, kind: str, seconds: float | None) -> dict[int, Message]:
        """Wait until each member has sent a message of this kind, one is lost or the time is over."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                said = {rank: self._said[rank, kind] for rank in self._members if (rank, kind) in self._said}
                is_over = end is not None and time.monotonic() >= end
                if len(said) == len(self._members) or is_over or self.lost() or self._issues:
                    return said
                self._changed.wait(BEAT_S / 5)

    def check_data(self, data_hash: str) -> None:
        """Compare the data of all nodes. Raises ConfigError."""
        said = self._await("data", None)
        issues = list(self._issues)
        for rank, message in said.items():
            issues += [Issue(**issue).within(self.name(rank)) for issue in message["issues"]]
            if not message["issues"] and message["hash"] != data_hash:
                text = f"{self.name(rank)} has {str(message['hash'])[:16]}, node 0 has {data_hash[:16]}"
                issues.append(Issue("data", "conflict", text, hint="use the same shards on every node"))
        if lost := self.lost():
            issues.append(Issue("--nnodes", "not_found", lost.message, hint="see its own message there"))
        if issues:
            raise ConfigError(issues)

    # an attempt

    def begin(self, start: RankStart, config: str) -> RankStart:
        """Tell every node to start its ranks; return how ours start. `config`: text of config.yaml."""
        self._attempt += 1
        self._told_failed = False
        store = listen(self.place.address, 0)
        port: int = store.getsockname()[1]
        with self._changed:
            self._said = {key: said for key, said in self._said.items() if key[1] != "ended"}
        for rank, link in self._members.items():
            link.send(
                "start",
                attempt=self._attempt,
                config=config,
                worker=list(start.worker),
                store=port,
                first_rank=sum(self.counts[:rank]),
            )
        node = NodeStart(self.place, self._attempt, 0, port, store, config)
        return dataclasses.replace(start, nproc=self.counts[0], node=node)

    def unheard_s(self) -> float:
        return max((link.silent_s() for link in self._members.values()), default=0.0)

    def heartbeats(self) -> dict[int, tuple[Heartbeat, str]]:
        with self._changed:
            beats = [self._said.get((rank, "beat"), {}) for rank in self._members]
        return {
            int(rank): (Heartbeat(*fields), state)
            for beat in beats
            if beat.get("attempt") == self._attempt
            for rank, (fields, state) in beat.get("ranks", {}).items()
        }

    def ask_for_evidence(self) -> None:
        with self._changed:
            self._said = {key: said for key, said in self._said.items() if key[1] != "evidence"}
        for link in self._members.values():
            link.send("look")

    def evidence(self) -> dict[int, tuple[tuple[hangs.Frame, ...], hangs.Collectives]]:
        said = self._await("evidence", hangs.ANSWER_S)
        return {
            int(rank): (tuple(hangs.Frame(*frame) for frame in stack), collectives)
            for message in said.values()
            for rank, (stack, collectives) in message["ranks"].items()
        }

    def exchange(self, failed: bool, signal: int) -> Order:
        """Tell the members that a rank here has failed, and return what theirs mean for ours."""
        if failed and not self._told_failed:
            self._told_failed = True
            for link in self._members.values():
                link.send("failed")
        with self._changed:
            beats = [self._said.get((rank, "beat"), {}) for rank in self._members]
            ended = [self._said[rank, "ended"] for rank in self._members if (rank, "ended") in self._said]
        has_failed = any(beat.get("attempt") == self._attempt and beat.get("failed") for beat in beats)
        has_failed = has_failed or any(message["code"] for message in ended)
        signals = [int(beat.get("signal") or 0) for beat in beats]
        return Order(has_failed, self.lost() is not None, max(signals, default=0))

    def collect(self, *, failed: bool) -> tuple[list[Failure], list[RankExit]]:
        """Return the errors and ends of the members' ranks, on our clock; those of a failed run are ended
        first. A node that is lost has none."""
        if failed:
            for link in self._members.values():
                link.send("abort")
        said = self._await("ended", ENDING_S)
        if len(said) < len(self._members) and not failed:
            return self.collect(failed=True)
        errors, exits = [], []
        for message in said.values():
            offset_ns = message["now_ns"] - message["heard_ns"]
            for fields in message["errors"]:
                error = Failure.model_validate(fields)
                errors.append(error.model_copy(update={"time_ns": error.time_ns - offset_ns}))
            exits += [RankExit(rank, code, ns - offset_ns, end) for rank, code, ns, end in message["exits"]]
        return errors, sorted(exits, key=lambda end: end.time_ns)

    def blame(self, cause: Failure | None) -> Failure | None:
        """Name the node of the rank that failed first, or the node that is lost where ranks failed because
        of it."""
        if (lost := self.lost()) and (cause is None or cause.kind in ("peer_gone", "no_cause")):
            cause = lost
        elif cause is not None and cause.rank is not None:
            cause = cause.model_copy(update={"node": self.nodes[cause.rank]})
        self._cause = cause
        return cause

    def end(self, code: int, issues: Sequence[Issue] = ()) -> None:
        """Tell every node how the run ended, and close."""
        line = f"failed: {first_line(self._cause.headline())}" if self._cause and code == 1 else ""
        with self._changed:
            links = [*self._members.values(), *self._strangers]
        for link in links:
            link.send("end", code=code, line=line, issues=[issue.to_json() for issue in issues])
        for link in links:
            link.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with contextlib.suppress(OSError):
            self._file.unlink()


@contextlib.contextmanager
def coordinating(place: Place, run_dir: Path, log: Log, limit_s: float) -> Iterator[Coordinator]:
    """Listen for the other nodes, and tell them of a ConfigError. Raises ConfigError."""
    coordinator = Coordinator(place, run_dir, log, limit_s)
    try:
        yield coordinator
    except ConfigError as error:
        coordinator._wait_for_members(time.monotonic() + REFUSE_S)
        coordinator.end(2, issues=error.issues)
        raise
    except BaseException:
        coordinator.end(1)
        raise


def listen(address: str, port: int) -> socket.socket:
    """Bind a socket to one address. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        message = f"node 0 ({socket.gethostname()}) cannot listen at {address}:{port} ({error.strerror})"
        hint = "use an address of node 0 and a free port"
        raise ConfigError(
            [Issue("--rendezvous", "exists", message, f"{address}:{port}", hint=hint)]
        ) from None
    return listener


def hello_of(job: Job, place: Place, nproc: int, issues: Sequence[Issue] = ()) -> Message:
    """Return what a launcher says of itself."""
    return {
        "rank": place.rank,
        "nodes": place.nodes,
        "host": socket.gethostname(),
        "nproc": nproc,
        "gpus": job.gpus > 0,
        "versions": {name: job.machine.versions.get(name) for name in COMPARED},
        "config": job.config.model_dump(mode="json"),
        "issues": [issue.within(_name(place.rank, socket.gethostname())).to_json() for issue in issues],
    }


def _differences(hellos: Mapping[int, Message]) -> list[Issue]:
    """Find what must be equal on all nodes and is not."""
    issues, first = [], hellos[0]
    for rank in sorted(hellos.keys() - {0}):
        other, name = hellos[rank], _name(rank, hellos[rank]["host"])
        for package, version in first["versions"].items():
            if other["versions"].get(package) != version:
                text = f"{package} is {other['versions'].get(package)} on {name} and {version} on node 0"
                hint = "install the same versions on every node"
                issues.append(Issue("versions", "conflict", text, hint=hint))
        for setting, own, theirs in differing_settings(first["config"], other["config"]):
            text = f"{theirs} on {name} and {own} on node 0"
            issues.append(Issue(setting, "conflict", text, hint="give every node the same configuration"))
        if other["gpus"] != first["gpus"]:
            kinds = {True: "GPUs", False: "CPU cores"}
            text = f"{name} would use {kinds[other['gpus']]} and node 0 {kinds[first['gpus']]}"
            hint = "use run.device=cpu on every node, or nodes that all show GPUs"
            issues.append(Issue("run.device", "conflict", text, hint=hint))
    return issues


# --- the other nodes


class Member:
    """The side of any other node."""

    def __init__(self, link: Link, run_dir: Path, limit_s: float):
        self.link, self._limit_s = link, limit_s
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._failed = self._over = self._asked = False
        self._looked_s = 0.0
        self._ranks: dict[int, tuple[Heartbeat, str]] = {}
        self._run_dir = run_dir
        self.heartbeats: Path | None = None
        """Folder of the heartbeats of the ranks here."""
        link.received = self._hear

    def _hear(self, message: Message) -> None:
        if message["kind"] in ("abort", "closed"):
            self._over = True
        if message["kind"] == "failed":
            self._failed = True
        if message["kind"] == "look":
            self._asked = True
        if message["kind"] in ("start", "end"):
            self._messages.put(message)

    def next(self, stopped: Callable[[], bool]) -> Message | None:
        """Wait for `start` or `end`; None when node 0 is lost or `stopped`."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._messages.get(timeout=BEAT_S / 5)
            if self.lost() or stopped():  # what it sent last may have come in this moment
                return None if self._messages.empty() else self._messages.get()

    def lost(self) -> str | None:
        if self.link.is_closed:
            return "node 0 is lost: its launcher has ended"
        if self.link.silent_s() >= self._limit_s:
            return (
                f"node 0 is lost: not heard of for {self.link.silent_s():.0f} s: the machine or the link has "
                "failed"
            )
        return None

    def begin(self, attempt: int) -> None:
        self._failed = self._over = self._asked = False
        self.link.status = {"attempt": attempt}

    def poll(self, workers: Mapping[int, psutil.Process]) -> None:
        """Put what the ranks here show into the next beat, and send their stacks when node 0 asks."""
        now = time.monotonic()
        if now - self._looked_s >= hangs.LOOK_EVERY_S:
            self._looked_s = now
            self._ranks = hangs.look(self._run_dir, workers, self.heartbeats)
            shown = {rank: [dataclasses.astuple(beat), state] for rank, (beat, state) in self._ranks.items()}
            self.link.status = {**self.link.status, "ranks": shown}
        if self._asked:
            self._asked = False
            snapshots = [
                hangs.RankSnapshot(rank, beat, 0, 0, state) for rank, (beat, state) in self._ranks.items()
            ]
            found = hangs.evidence(self._run_dir, workers, [s for s in snapshots if s.rank in workers])
            ranks = {r: [[dataclasses.astuple(f) for f in stack], all_] for r, (stack, all_) in found.items()}
            self.link.send("evidence", ranks=ranks)

    def exchange(self, failed: bool, signal: int) -> Order:
        """Tell node 0 of a failure or a signal here, and return what it wants."""
        before = self.link.status
        status = self.link.status = {**before, "failed": failed, "signal": signal}
        if (failed, signal) != (before.get("failed"), before.get("signal")):
            self.link.send("beat", **status)
        return Order(self._failed, self._over or self.lost() is not None)


def join(place: Place, run_dir: Path, hello: Message, limit_s: float) -> Member:
    """Connect to node 0, which may start later than this node. Raises ConfigError."""
    end = time.monotonic() + ARRIVE_S
    meet = f"{place.address}:{place.port}"
    while True:
        try:
            connection = socket.create_connection((place.address, place.port), timeout=5.0)
            break
        except OSError as error:
            if time.monotonic() >= end:
                message = (
                    f"node 0 does not answer at {meet} within {ARRIVE_S:.0f} s ({error.strerror or error})"
                )
                hint = "start `bert-dp train --node-rank 0` there; see its own message"
                raise ConfigError([Issue("--rendezvous", "not_found", message, meet, hint=hint)]) from None
            time.sleep(0.5)
    connection.settimeout(files.STALE_S + 2 * BEAT_S)
    link = Link(connection)
    try:
        challenge = link.next_line(4096)
        name, nonce = str(challenge["file"]), secrets.token_hex(16)
        if not SECRET.fullmatch(name):
            raise ValueError("no challenge of node 0")
        if not files.appears(run_dir / name, lambda file: bool(file.read_text())):
            host = _name(place.rank, socket.gethostname())
            message = f"{host} does not see what node 0 writes to {run_dir}"
            hint = "use a directory that all nodes share"
            unseen = Issue("--run-dir", "not_found", message, str(run_dir), hint=hint)
            link.send("unseen", issue=unseen.to_json())
            connection.close()
            raise ConfigError([unseen])
        secret = (run_dir / name).read_text()
        link.send("proof", nonce=nonce, proof=_proof(secret, str(challenge["nonce"])))
        if not hmac.compare_digest(str(link.next_line(4096)["proof"]), _proof(secret, nonce)):
            raise ValueError("not node 0")
        link.send("hello", **hello)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"what answers at {meet} is not node 0 of this run ({error})"
        hint = "see the message of node 0, or choose a free port on every node"
        raise ConfigError([Issue("--rendezvous", "conflict", message, meet, hint=hint)]) from None
    connection.settimeout(None)
    member = Member(link, run_dir, limit_s)
    link.start()
    return member
