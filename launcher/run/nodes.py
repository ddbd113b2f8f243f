"""Find this launcher's node in a multi-node run, from options or from the variables of Slurm, Kubeflow's
trainer or SkyPilot."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from bert_dp.config import MAX_RANKS, ConfigError, Issue
from bert_dp.config.errors import IssueKind

PORT = 29400  # default if the cluster manager sets none
SLURM_PORTS = range(15000, 31000)  # below the ephemeral ports; one port per job


class Place(NamedTuple):
    """One node of a multi-node run."""

    nodes: int
    rank: int
    address: str  # IP address of the rendezvous, on node 0
    port: int
    interface: str  # network interface for the ranks of this node
    nproc: str = "auto"  # number of ranks on this node if --nproc gives none


class Variables(NamedTuple):
    """Values set by a cluster manager (None = not set)."""

    nodes: str | None = None
    rank: str | None = None
    host: str | None = None
    port: int | str = PORT
    nproc: str = "auto"


def refusal(setting: str, kind: IssueKind, message: str, hint: str, value: object = None) -> ConfigError:
    """Create a ConfigError with one issue."""
    return ConfigError([Issue(setting, kind, message, value, hint=hint)])


def find_place(
    nnodes: int | None,
    node_rank: int | None,
    rendezvous: str | None,
    interface: str | None,
    environ: Mapping[str, str] = os.environ,
) -> Place | None:
    """Return the node of this launcher; None for a run on one node. Options override variables.

    Raises ConfigError for missing, out-of-range or contradictory values, and for a rendezvous that other
    nodes cannot reach.
    """
    engine = Variables() if nnodes == 1 else engine_variables(environ)
    nodes = _number("--nnodes", nnodes, engine.nodes)
    options = {"--node-rank": node_rank, "--rendezvous": rendezvous, "--interface": interface}
    named = [name for name, value in options.items() if value is not None]
    if nodes is None and named:
        message = f"is needed with {' and '.join(named)}"
        raise refusal("--nnodes", "missing", message, "pass the number of nodes")
    if nodes in (None, 1):
        return None
    rank = _number("--node-rank", node_rank, engine.rank)
    meet = rendezvous or (engine.host and f"{engine.host}:{engine.port}")
    needed = f"is needed for {nodes} nodes"
    if rank is None:
        raise refusal("--node-rank", "missing", needed, "number the nodes from 0")
    if not 0 <= rank < nodes:
        message, hint = f"{rank} with {nodes} nodes", f"use 0 to {nodes - 1}"
        raise refusal("--node-rank", "out_of_range", message, hint, rank)
    if not meet:
        raise refusal("--rendezvous", "missing", needed, "pass HOST:PORT of node 0")
    address, port = _resolve(meet)
    return Place(nodes, rank, address, port, _interface(interface, address), engine.nproc)


def engine_variables(environ: Mapping[str, str]) -> Variables:
    """Read the variables of the cluster manager that started this process on several nodes. Raises
    ConfigError if two managers contradict each other, or srun started several launchers on a node."""
    get, found = environ.get, {}
    # variables of a step; a batch script has SLURM_NNODES too, but runs only one launcher
    if (nodes := get("SLURM_STEP_NUM_NODES", "1")) != "1":
        if (tasks := get("SLURM_STEP_NUM_TASKS", nodes)) != nodes:
            message = f"{tasks} tasks on {nodes} nodes, but each node needs one launcher"
            raise refusal("srun", "conflict", message, "use srun --ntasks-per-node=1", tasks)
        first = first_host(get("SLURM_STEP_NODELIST", ""))
        job_port = SLURM_PORTS[int(get("SLURM_JOB_ID", "0")) % len(SLURM_PORTS)]
        found["Slurm"] = Variables(nodes, get("SLURM_NODEID"), first, job_port)
    if nodes := get("PET_NNODES", ""):
        given = get("PET_NPROC_PER_NODE", "auto")  # torchrun also accepts gpu and cpu
        nproc = given if given.isdecimal() else "auto"
        rank, host, port = get("PET_NODE_RANK"), get("PET_MASTER_ADDR"), get("PET_MASTER_PORT", str(PORT))
        found["Kubeflow"] = Variables(nodes, rank, host, port, nproc)
    if nodes := get("SKYPILOT_NUM_NODES", ""):
        hosts = get("SKYPILOT_NODE_IPS", "").split()
        found["SkyPilot"] = Variables(nodes, get("SKYPILOT_NODE_RANK"), hosts[0] if hosts else None)
    if len({each[:2] for each in found.values()}) > 1:
        each = ", ".join(f"{name}: node {found[name].rank} of {found[name].nodes}" for name in found)
        hint = "unset the variables of one, or pass --nnodes 1 for one node"
        raise refusal("--nnodes", "conflict", f"cluster managers contradict each other ({each})", hint)
    return next(iter(found.values()), Variables())


def first_host(names: str) -> str:
    """Return the first host of Slurm's list: `node[01-03,7],gpu2` -> node01."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^,]*)", names)
    return "".join(part or "" for part in match.groups()) if match else ""


def _number(option: str, given: int | None, text: str | None) -> int | None:
    """Return the option's value, else the variable's. Raises ConfigError."""
    if given is not None or text is None:
        return given
    if not text.isdecimal() or int(text) > MAX_RANKS:
        hint = "pass the number with the option; ranges are not supported"
        raise refusal(option, "wrong_type", f"{text} is not a whole number", hint, text)
    return int(text)


def _resolve(meet: str) -> tuple[str, int]:
    """Return IP address and port of HOST:PORT. Raises ConfigError."""
    host, _, port = meet.rpartition(":")
    hint = "pass HOST:PORT: an address of node 0 that the other nodes can reach, and a free port"
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise refusal("--rendezvous", "wrong_type", f"{meet} is not HOST:PORT", hint, meet)
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        message = f"{host} cannot be resolved ({error})"
        raise refusal("--rendezvous", "not_found", message, hint, meet) from None
    address = str(found[0][4][0])
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback or ip.is_unspecified:
        message = f"{host} ({address}) cannot be reached from other nodes"
        raise refusal("--rendezvous", "unsupported", message, hint, meet)
    return address, int(port)


def _interface(name: str | None, address: str) -> str:
    """Check interface `name`; None: find the one on the route to the rendezvous. Raises ConfigError."""
    interfaces, here = psutil.net_if_addrs(), socket.gethostname()
    if name is None:
        try:
            with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
                probe.connect((address, PORT))  # sends nothing: the kernel chooses the route
                own = probe.getsockname()[0]
        except OSError as error:
            message = f"{here} has no route to {address} ({error.strerror})"
            raise refusal("--rendezvous", "not_found", message, "see `ip route`", address) from None
        with_it = (k for k, all_ in interfaces.items() if own in {a.address.partition("%")[0] for a in all_})
        name = next(with_it, f"the interface of {own}")
    if name not in interfaces:
        hint = f"use one of {', '.join(sorted(interfaces))}"
        raise refusal("--interface", "not_found", f"{name} does not exist on {here}", hint, name)
    return name


def family(address: str) -> socket.AddressFamily:
    """Return the family of `address`, IPv6 or IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
