"""Connect the launchers of a multi-node run. Node 0's launcher is the coordinator; the others are members.

Each member exchanges lines of JSON with the coordinator over a TCP connection to the rendezvous address. To
prove that it can read the run directory, it uses a secret stored there. Messages are not encrypted, because
the network is trusted.
"""

import contextlib
import dataclasses
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
from typing import Any, NamedTuple

import psutil

from bert_dp import files
from bert_dp.config import ConfigError, Issue, differing_settings
from bert_dp.files import Heartbeat
from bert_dp.files.models import Failure
from launcher.job import COMPARED, Job
from launcher.log import Log
from launcher.report.formats import count_of
from launcher.run.nodes import Place, family, refusal
from launcher.run.starters import NodeStart, RankStart
from launcher.watch import hangs
from launcher.watch.failure import RanksEnded, first_line

BEAT_S = 1.0  # interval between `beat` messages
ARRIVE_S = 120.0  # time limit for all launchers to connect
ADMIT_S = files.STALE_S + 2.0  # time limit for a launcher to prove that it sees the shared directory
REFUSE_S = 10.0  # after a ConfigError, time limit for late launchers to connect, so that they report it too
SUSPENDED_S = 5.0  # a beat delayed by more than this shows that this process was suspended
ENDING_S = 20.0  # time limit for a member to kill its ranks and report their exits
LINE_BYTES = 2**26  # maximum size of a message
SECRET = re.compile(r"\.nodes-[0-9a-f]{32}")  # name of the file that contains the secret

Message = dict[str, Any]


class Order(NamedTuple):
    """Instructions for a node's ranks, derived from the state of the other nodes."""

    failed: bool  # a rank on another node failed; this node's ranks may finish a save, then must exit
    over: bool  # this node's ranks must be killed now
    signal: int = 0  # stop signal received on another node; 0 = none


class Link:
    """Connection to another launcher. One thread reads; another sends a `beat` with `status` every second."""

    def __init__(self, connection: socket.socket, limit_s: float):
        """`limit_s`: time without a message after which the other launcher is lost (minimum: SUSPENDED_S)."""
        self._limit_s = max(limit_s, SUSPENDED_S)
        # ms for which a send may block if the link is cut and the buffer is full; kernel's maximum: 2**31 - 1
        send_ms = min(round(1000 * (self._limit_s + 1)), 2**31 - 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, send_ms)
        connection.settimeout(ADMIT_S)
        self._socket, self._reader = connection, connection.makefile("rb")
        self._lock = threading.Lock()
        self.heard_s = time.monotonic()
        self.closed_s: float | None = None
        self.status: Message = {}

    def start(self, received: Callable[[Message], None]) -> None:
        self._socket.settimeout(None)
        self._reading = threading.Thread(target=self._read, args=[received], name="read", daemon=True)
        self._reading.start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message. If the link is broken, discard the message and set `closed_s`."""
        line = json.dumps({"kind": kind, **facts}).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            self.drop()

    def drop(self) -> None:
        """Record that the link has closed."""
        self.closed_s = self.closed_s or time.monotonic()

    def next(self) -> Message:
        """Read a message. Raise OSError at the end of the stream, ValueError if the message is invalid."""
        line = self._reader.readline(LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("closed")
        message = files.parse_json(line)
        if not isinstance(message, dict) or "kind" not in message:
            raise ValueError("not a message from a launcher")
        return message

    def silent_s(self) -> float:
        """Return the seconds from the last message until the link closed, or until now if it is open."""
        return (self.closed_s or time.monotonic()) - self.heard_s

    def lost(self, name: str) -> str | None:
        """Return why the other launcher counts as lost, or None if it does not. `name`: name of its node."""
        if (silent_s := self.silent_s()) >= self._limit_s:
            return f"{name} is lost: no message for {silent_s:.0f} s; the machine or the link has failed"
        return f"{name} is lost: its launcher has exited" if self.closed_s else None

    def close(self) -> None:
        """Close the link. First wait up to 2 s for the other launcher to close its end, because closing
        earlier could reset the connection and discard data that the other launcher has not read."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._reading.join(2.0)
        self.drop()
        self._socket.close()

    def _read(self, received: Callable[[Message], None]) -> None:
        try:
            while True:
                message = self.next()
                self.heard_s = time.monotonic()
                received(message)
        except (OSError, ValueError):
            pass
        finally:
            self.drop()

    def _beat(self) -> None:
        last = time.monotonic()
        while not self.closed_s:
            self.send("beat", **self.status)
            time.sleep(BEAT_S)
            now = time.monotonic()
            if now - last > BEAT_S + SUSPENDED_S:
                self.heard_s = now
            last = now


def _proof(secret: str, nonce: str) -> str:
    return hmac.new(secret.encode(), nonce.encode(), "sha256").hexdigest()


def _name(rank: int, host: object) -> str:
    return f"node {rank} ({files.safe(str(host))[:64]})"


def hello_of(job: Job, place: Place, nproc: int, issues: Sequence[Issue] = ()) -> Message:
    """Build the `hello` message of this node: facts that node 0 compares with its own, and `issues`."""
    host = socket.gethostname()
    return {
        "rank": place.rank,
        "nodes": place.nodes,
        "host": host,
        "nproc": nproc,
        "gpus": job.gpus > 0,
        "versions": {name: job.machine.versions.get(name) for name in COMPARED},
        "config": job.config.model_dump(mode="json"),
        "issues": [issue.within(_name(place.rank, host)).to_json() for issue in issues],
    }


def _differences(first: Message, other: Message) -> list[Issue]:
    """Return an issue for each fact that must be equal but differs between node 0 and another node."""
    name = _name(other["rank"], other["host"])
    kinds = {True: "GPUs", False: "CPU cores"}
    hints = {
        "--nnodes": "pass the same number on every node",
        "run.device": "use run.device=cpu on every node, or use only nodes with visible GPUs",
    }
    differ = [
        ("--nnodes", first["nodes"], other["nodes"]),
        ("run.device", kinds[first["gpus"]], kinds[other["gpus"]]),
        *(
            (package, version, other["versions"].get(package))
            for package, version in first["versions"].items()
        ),
        *differing_settings(first["config"], other["config"]),
    ]
    hint = "use the same versions and configuration on every node"
    return [
        Issue(setting, "conflict", f"{there} on {name} and {here} on node 0", hint=hints.get(setting, hint))
        for setting, here, there in differ
        if here != there
    ]


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on an address and a port. Raise ConfigError if they are unusable."""
    try:
        return socket.create_server((address, port), family=family(address), backlog=128)
    except OSError as error:
        message = f"node 0 ({socket.gethostname()}) cannot listen on {address}:{port} ({error.strerror})"
        hint = "use an address of node 0 and a free port"
        raise refusal("--rendezvous", "exists", message, hint, port) from None


class Coordinator:
    """Coordinator of a multi-node run, on node 0. It keeps each member's link and newest messages."""

    def __init__(self, place: Place, run_dir: Path, log: Log, limit_s: float):
        self.place, self._log, self._limit_s = place, log, limit_s
        self._secret, self._file = secrets.token_hex(32), run_dir / f".nodes-{secrets.token_hex(16)}"
        self._links: list[Link] = []  # links to members and to launchers that are refused
        self._members: dict[int, Link] = {}
        self._hellos: dict[int, Message] = {}
        self._newest: dict[tuple[int, str], Message] = {}  # (node, kind) -> newest message
        self._issues: list[Issue] = []
        self._changed = threading.Condition()
        self._attempt, self._sent_failed = 0, False
        self._cause: Failure | None = None
        self._has_ended = False
        self._listener = listen(place.address, place.port)
        try:
            run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.write_text(self._file, self._secret)
        except OSError as error:
            self._listener.close()
            message = f"{run_dir} is not writable ({error.strerror})"
            raise ConfigError([Issue("--run-dir", "not_found", message)]) from None
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._admit, args=[connection], name="admit", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Admit a launcher once it has proved that it sees the shared directory."""
        nonce = secrets.token_hex(16)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not a launcher of this run
            link = Link(connection, self._limit_s)
            link.send("challenge", nonce=nonce, file=self._file.name)
            hello = link.next()
            if hello["kind"] == "unseen":
                self._note(issues=[Issue(**hello["issue"])])
            elif hmac.compare_digest(hello["proof"], _proof(self._secret, nonce)):
                rank, issues = int(hello["rank"]), [Issue(**fields) for fields in hello["issues"]]
                with self._changed:
                    if rank in self._members:
                        hosts = f"{self._hellos[rank]['host']} and {hello['host']}"
                        message, hint = f"{rank} was passed on two nodes, {hosts}", "number the nodes from 0"
                        issues = [Issue("--node-rank", "conflict", message, rank, hint=hint)]
                        link.start(lambda message: None)  # its messages must not replace the first launcher's
                    else:
                        self._hellos[rank], self._members[rank] = hello, link
                        link.start(lambda message: self._note(rank, message))
                    self._links.append(link)
                    self._note(issues=issues)

    def _note(self, rank: int = 0, message: Message | None = None, issues: Sequence[Issue] = ()) -> None:
        with self._changed:
            if message is not None:
                self._newest[rank, message["kind"]] = {**message, "heard_ns": time.monotonic_ns()}
            self._issues += issues
            self._changed.notify_all()

    def _wait(self, is_done: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until `is_done()` is true, and return its last value. Stop early if there is an
        issue, a node is lost, or `seconds` have passed (None = no limit)."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not (done := is_done()) and not self._issues and not self.lost():
                if end is not None and time.monotonic() >= end:
                    break
                self._changed.wait(BEAT_S / 5)
        return done

    def _refuse(self) -> None:
        """Raise ConfigError if there are issues or a node is lost."""
        if lost := self.lost():
            self._issues.append(Issue("--nnodes", "not_found", lost, hint="check the output of that node"))
        if self._issues:
            raise ConfigError(self._issues)

    def gather(self, hello: Message) -> None:
        """Wait for the launchers of all nodes. `hello`: node 0's `hello` message. Raise ConfigError if a
        launcher does not connect, or if nodes differ in facts that must be equal."""
        self._hellos[0] = hello
        others = range(1, self.place.nodes)
        self._wait(lambda: self._members.keys() >= {*others}, ARRIVE_S)
        for rank in list(self._members):
            self._issues += _differences(hello, self._hellos[rank])
        self._refuse()
        if missing := [f"node {k}" for k in others if k not in self._members]:
            message = f"{', '.join(missing)} did not connect within {ARRIVE_S:.0f} s"
            hint = "start `bert-dp train` with the same --rendezvous on every node, and check its output"
            raise refusal("--nnodes", "missing", message, hint, self.place.nodes)
        with_ranks = (f"{self.name(k)} with {count_of(n, 'rank')}" for k, n in enumerate(self.counts))
        self._log(f"nodes: {', '.join(with_ranks)}")

    def name(self, rank: int) -> str:
        return _name(rank, self._hellos[rank]["host"])

    @property
    def counts(self) -> list[int]:
        """Return the number of ranks on each node."""
        return [int(self._hellos[rank]["nproc"]) for rank in range(self.place.nodes)]

    @property
    def nodes(self) -> list[int]:
        """Return the node number of each rank."""
        return [node for node, count in enumerate(self.counts) for _ in range(count)]

    def lost(self) -> str | None:
        """Describe a lost node (see `Link.lost`). Return None if no node is lost."""
        links = list(self._members.items())
        return next(filter(None, (link.lost(self.name(k)) for k, link in links)), None)

    def _send(self, kind: str, **facts: Any) -> None:
        for link in self._links:
            link.send(kind, **facts)

    def _all(self, kind: str, attempt: int | None = None) -> dict[int, Message]:
        """Return {node: newest message of this kind}. With `attempt`, omit messages of other attempts."""
        with self._changed:
            newest = {k: self._newest[k, kind] for k in self._members if (k, kind) in self._newest}
        return {k: message for k, message in newest.items() if attempt in (None, message.get("attempt"))}

    def check_data(self, data_hash: str) -> None:
        """Raise ConfigError if the data on a node is unusable or differs from node 0's."""
        self._wait(lambda: len(self._all("data")) == len(self._members), None)
        for rank, message in self._all("data").items():
            self._issues += [Issue(**issue).within(self.name(rank)) for issue in message["issues"]]
            if not message["issues"] and message["hash"] != data_hash:
                text = f"{message['hash'][:16]} on {self.name(rank)} and {data_hash[:16]} on node 0"
                hint = "use the same shards on every node"
                self._issues.append(Issue("data", "conflict", text, hint=hint))
        self._refuse()

    def ask(self, rank: int, kind: str, **facts: Any) -> None:
        """Send a message to one node."""
        self._members[rank].send(kind, **facts)

    def clock_offset(self, rank: int) -> tuple[float, float]:
        """Return (node's clock minus node 0's, error) in seconds. Raise ConfigError if the node is lost."""
        began_s, began_ns = time.time(), time.monotonic_ns()
        self.ask(rank, "clock")
        if not self._wait(lambda: rank in self._all("clock"), None):
            raise ConfigError([Issue("--nnodes", "not_found", self.lost() or "")])
        message = self._all("clock")[rank]
        half_s = (message["heard_ns"] - began_ns) / 2e9
        return message["now_s"] - began_s - half_s, half_s

    def begin(self, start: RankStart, config: str) -> RankStart:
        """Make the members start their ranks; return node 0's RankStart. `config`: text of config.yaml."""
        self._attempt, self._sent_failed = self._attempt + 1, False
        store = listen(self.place.address, 0)
        port: int = store.getsockname()[1]
        shared: dict[str, Any] = {"attempt": self._attempt, "config": config, "store_port": port}
        for rank, link in self._members.items():
            first_rank = sum(self.counts[:rank])
            link.send("start", worker=list(start.worker), node={**shared, "first_rank": first_rank})
        node = NodeStart(self.place, **shared, first_rank=0, store=store)
        return dataclasses.replace(start, nproc=self.counts[0], node=node)

    def exchange(self, failed: bool, signal: int, *, left: bool) -> Order:
        """Notify the members if a rank of node 0 has failed, and return instructions for node 0's ranks. A
        rank that exits before summary.json is written counts as failed, whatever its exit code."""
        if failed and not self._sent_failed:
            self._sent_failed = True
            self._send("failed")
        beats = self._all("beat", self._attempt).values()
        ended = self._all("ended", self._attempt).values()
        has_failed = any(beat.get("failed") for beat in beats) or any(each["ended"]["code"] for each in ended)
        with contextlib.suppress(OSError):  # raised if a file server does not answer
            if any(beat.get("left") for beat in beats) and not (self._file.parent / "summary.json").exists():
                has_failed = True
        return Order(has_failed, self.lost() is not None, max((b.get("signal", 0) for b in beats), default=0))

    def unheard_s(self) -> float:
        """Return the seconds since the last message of the member that has been silent the longest."""
        return max((link.silent_s() for link in self._members.values()), default=0.0)

    def heartbeats(self) -> dict[int, tuple[Heartbeat, str]]:
        """Return the latest heartbeat and process state of each rank on the other nodes."""
        beats = self._all("beat", self._attempt).values()
        return {
            int(k): (Heartbeat(*beat), s) for each in beats for k, (beat, s) in each.get("ranks", {}).items()
        }

    def ask_for_evidence(self) -> None:
        """Request the stacks and collectives of all members' ranks."""
        with self._changed:
            self._newest = {key: each for key, each in self._newest.items() if key[1] != "evidence"}
        self._send("look")

    def evidence(self) -> dict[int, tuple[tuple[hangs.Frame, ...], hangs.Collectives]]:
        """Return (stack, collectives) of the members' ranks. Omit nodes not answering within ANSWER_S."""
        self._wait(lambda: len(self._all("evidence")) == len(self._members), hangs.ANSWER_S)
        return {
            int(rank): (tuple(hangs.Frame(*frame) for frame in stack), collectives)
            for message in self._all("evidence").values()
            for rank, (stack, collectives) in message["ranks"].items()
        }

    def collect(self, own: RanksEnded) -> dict[int, RanksEnded]:
        """Return how the ranks of each node ended, with times converted to node 0's clock. Omit nodes that
        send no result. If node 0's ranks failed, or the members' ranks have not ended after ENDING_S, the
        members first kill their ranks. `own`: result of node 0's ranks."""

        def all_have_ended() -> bool:
            return len(self._all("ended", self._attempt)) == len(self._members)

        if own.code or not self._wait(all_have_ended, ENDING_S):
            self._send("abort")
            self._wait(all_have_ended, ENDING_S)
        ended = {0: own}
        for rank, message in self._all("ended", self._attempt).items():
            ahead_ns = message["now_ns"] - message["heard_ns"]
            ended[rank] = RanksEnded.model_validate(message["ended"], strict=False).by_clock(ahead_ns)
        for rank in self._members.keys() - ended:
            self._members[rank].drop()  # the node's ranks must not join the next attempt
        return ended

    def blame(self, cause: Failure | None, unknown: Failure, failed_first: int) -> tuple[Failure | None, int]:
        """Return a failed attempt's cause with its node's name, and the node's number (0 if unknown or lost).
        If `cause` is None or only a consequence (`peer_gone`, `no_cause`), replace it: with the loss of a
        node if one is lost, else with `unknown` on node `failed_first` if `failed_first` is not 0."""
        node = 0
        if cause is None or cause.kind in ("peer_gone", "no_cause"):
            if lost := self.lost():
                cause = Failure(kind="node_lost", message=lost)
            elif failed_first:
                cause, node = unknown.model_copy(update={"node": self.name(failed_first)}), failed_first
        if cause is not None and cause.rank is not None:
            node = self.nodes[cause.rank]
            cause = cause.model_copy(update={"node": self.name(node)})
        self._cause = cause
        return cause, node

    def end(self, code: int, issues: Sequence[Issue] = ()) -> None:
        """Send the outcome of the run to every node and close all links. Later calls have no effect."""
        if self._has_ended:
            return
        self._has_ended = True
        line = f"failed: {first_line(self._cause.headline())}" if self._cause and code == 1 else ""
        self._send("end", code=code, line=line, issues=[issue.to_json() for issue in issues])
        for link in self._links:
            link.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts connections
        self._listener.close()
        self._file.unlink(missing_ok=True)


@contextlib.contextmanager
def coordinating(place: Place, run_dir: Path, log: Log, limit_s: float) -> Iterator[Coordinator]:
    """Provide a Coordinator for a `with` block. Send a ConfigError raised in the block to all members."""
    coordinator = Coordinator(place, run_dir, log, limit_s)
    try:
        yield coordinator
    except ConfigError as error:
        coordinator._issues.clear()
        coordinator._wait(lambda: len(coordinator._members) == place.nodes - 1, REFUSE_S)
        coordinator.end(2, error.issues)
        raise
    finally:
        coordinator.end(1)


class Member:
    """Launcher on a node other than 0. It receives instructions from node 0 and reports on its own ranks."""

    def __init__(self, link: Link, run_dir: Path):
        self.link, self._run_dir = link, run_dir
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._received: set[str] = set()  # kinds of messages since the last `start`
        self._looked_s = 0.0
        self._ranks: dict[int, tuple[Heartbeat, str]] = {}
        self.heartbeats: Path | None = None  # directory with the heartbeats of this node's ranks
        link.start(self._hear)

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "start":
            self._received.clear()
            self.link.status = {"attempt": message["node"]["attempt"] if "node" in message else 0}
        if kind in ("start", "end"):
            self._messages.put(message)
        elif kind == "clock":
            self.link.send("clock", now_s=time.time())
        else:
            self._received.add(kind)

    def next(self, pending: Sequence[int] = ()) -> Message | None:
        """Wait for the next `start` or `end` message and return it. Return None if node 0 is lost, or if a
        stop signal is in `pending` before the first `start`. `exchange` reports later signals to node 0."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._messages.get(timeout=BEAT_S / 5)
            # node 0's last message may have only just arrived
            if self.lost() or (pending and not self.link.status):
                return None if self._messages.empty() else self._messages.get()

    def lost(self) -> str | None:
        return self.link.lost("node 0")

    def poll(self, workers: Mapping[int, psutil.Process]) -> None:
        """Put the state of this node's ranks into the next beat. Send stacks and collectives if requested."""
        now = time.monotonic()
        if now - self._looked_s >= hangs.LOOK_EVERY_S:
            self._looked_s = now
            self._ranks = hangs.look(self._run_dir, workers, self.heartbeats)
            shown = {rank: [dataclasses.astuple(beat), state] for rank, (beat, state) in self._ranks.items()}
            self.link.status = {**self.link.status, "ranks": shown}
        if "look" in self._received:
            self._received.remove("look")
            seen = [
                hangs.RankSnapshot(k, beat, 0, 0, s) for k, (beat, s) in self._ranks.items() if k in workers
            ]
            self.link.send("evidence", ranks=hangs.evidence(self._run_dir, workers, seen))

    def exchange(self, failed: bool, signal: int, *, left: bool) -> Order:
        """Report a failure, a stop signal or a rank's exit to node 0, and return node 0's instructions."""
        before, now = self.link.status, {"failed": failed, "signal": signal, "left": left}
        self.link.status = {**before, **now}
        if not now.items() <= before.items():
            self.link.send("beat", **self.link.status)
        return Order("failed" in self._received, "abort" in self._received or self.lost() is not None)


def join(place: Place, run_dir: Path, hello: Message, limit_s: float) -> Member:
    """Connect to node 0, which may start later. Raise ConfigError if the connection or a check fails."""
    endpoint = f"{place.address}:{place.port}"
    end = time.monotonic() + ARRIVE_S
    while True:
        try:
            link = Link(socket.create_connection((place.address, place.port), timeout=5.0), limit_s)
            break
        except OSError as error:
            if time.monotonic() >= end:
                message = f"node 0 did not answer at {endpoint} within {ARRIVE_S:.0f} s ({error})"
                hint = "start `bert-dp train --node-rank 0` on node 0, and check its output"
                raise refusal("--rendezvous", "not_found", message, hint, endpoint) from None
            time.sleep(0.5)
    try:
        challenge = link.next()
        name, nonce = str(challenge["file"]), str(challenge["nonce"])
        if not SECRET.fullmatch(name):
            raise ValueError("its first message is not one that node 0 sends")
    except (OSError, ValueError, KeyError) as error:
        message = f"the process at {endpoint} is not node 0 of this run ({error})"
        hint = "check the output of node 0, or choose another port on every node"
        raise refusal("--rendezvous", "conflict", message, hint, endpoint) from None
    file = run_dir / name
    if not files.appears(file, lambda file: bool(file.read_text())):
        message = f"{_name(place.rank, hello['host'])} does not see node 0's files in {run_dir}"
        hint = "use a directory that all nodes share"
        unseen = refusal("--run-dir", "not_found", message, hint, str(run_dir))
        link.send("unseen", issue=unseen.issues[0].to_json())
        raise unseen
    link.send("hello", **hello, proof=_proof(file.read_text(), nonce))
    return Member(link, run_dir)
