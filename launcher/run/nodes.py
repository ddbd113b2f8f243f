"""Determine this launcher's node in a multi-node run from the options or from the environment variables of
Slurm, Kubeflow's trainer or SkyPilot."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from bert_dp.config import MAX_RANKS, ConfigError, Issue
from bert_dp.config.errors import IssueKind

PORT = 29400  # default if the cluster manager sets no port
SLURM_PORTS = range(15000, 31000)  # all below the ephemeral port range; the job ID selects the port


class Place(NamedTuple):
    """One node of a multi-node run."""

    nodes: int
    rank: int  # number of this node, from 0
    address: str  # IP address of node 0, where the nodes rendezvous
    port: int
    interface: str  # network interface for the ranks of this node
    nproc: str = "auto"  # number of ranks on this node if --nproc is not passed


class Variables(NamedTuple):
    """Values that a cluster manager has set. None = not set."""

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
    """Return this launcher's node, or None for a run on one node. Options override environment variables.

    Raise ConfigError if a value is missing, out of range or contradictory, or if the rendezvous host cannot
    be resolved or is a loopback address.
    """
    manager = Variables() if nnodes == 1 else manager_variables(environ)
    nodes = _number("--nnodes", nnodes, manager.nodes)
    options = {"--node-rank": node_rank, "--rendezvous": rendezvous, "--interface": interface}
    named = [name for name, value in options.items() if value is not None]
    if nodes is None and named:
        message = f"is needed with {' and '.join(named)}"
        raise refusal("--nnodes", "missing", message, "pass the number of nodes")
    if nodes in (None, 1):
        return None
    rank = _number("--node-rank", node_rank, manager.rank)
    endpoint = rendezvous or (manager.host and f"{manager.host}:{manager.port}")
    needed = f"is needed for {nodes} nodes"
    if rank is None:
        raise refusal("--node-rank", "missing", needed, "number the nodes from 0")
    if not 0 <= rank < nodes:
        message, hint = f"{rank} is out of range for {nodes} nodes", f"use 0 to {nodes - 1}"
        raise refusal("--node-rank", "out_of_range", message, hint, rank)
    if not endpoint:
        raise refusal("--rendezvous", "missing", needed, "pass the HOST:PORT of node 0")
    address, port = _resolve(endpoint)
    return Place(nodes, rank, address, port, _interface(interface, address), manager.nproc)


def manager_variables(environ: Mapping[str, str]) -> Variables:
    """Return the values set by the cluster manager that started launchers on several nodes, or `Variables()`.
    Raise ConfigError if managers contradict each other, or if srun started several launchers on a node."""
    get, found = environ.get, {}
    # not SLURM_NNODES, which is also set in a batch script, where only one launcher runs
    if (nodes := get("SLURM_STEP_NUM_NODES", "1")) != "1":
        if (tasks := get("SLURM_STEP_NUM_TASKS", nodes)) != nodes:
            message = f"{tasks} tasks on {nodes} nodes, but each node needs exactly one launcher"
            raise refusal("srun", "conflict", message, "use srun --ntasks-per-node=1", tasks)
        first = first_host(get("SLURM_STEP_NODELIST", ""))
        job_port = SLURM_PORTS[int(get("SLURM_JOB_ID", "0")) % len(SLURM_PORTS)]
        found["Slurm"] = Variables(nodes, get("SLURM_NODEID"), first, job_port)
    if nodes := get("PET_NNODES", ""):
        given = get("PET_NPROC_PER_NODE", "auto")  # torchrun also accepts gpu and cpu; they count as auto
        nproc = given if given.isdecimal() else "auto"
        rank, host, port = get("PET_NODE_RANK"), get("PET_MASTER_ADDR"), get("PET_MASTER_PORT", str(PORT))
        found["Kubeflow"] = Variables(nodes, rank, host, port, nproc)
    if nodes := get("SKYPILOT_NUM_NODES", ""):
        hosts = get("SKYPILOT_NODE_IPS", "").split()
        found["SkyPilot"] = Variables(nodes, get("SKYPILOT_NODE_RANK"), hosts[0] if hosts else None)
    if len({each[:2] for each in found.values()}) > 1:
        each = ", ".join(f"{name}: node {found[name].rank} of {found[name].nodes}" for name in found)
        hint = "unset the variables of one manager, or pass --nnodes 1 to use one node"
        raise refusal("--nnodes", "conflict", f"cluster managers contradict each other ({each})", hint)
    return next(iter(found.values()), Variables())


def first_host(names: str) -> str:
    """Return the first host in a Slurm node list, for example `node01` for `node[01-03,7],gpu2`."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^,]*)", names)
    return "".join(part or "" for part in match.groups()) if match else ""


def _number(option: str, given: int | None, text: str | None) -> int | None:
    """Return `given`, the value of `option`. If it is None, parse `text`, the value of an environment
    variable. Raise ConfigError if `text` is not a whole number or exceeds MAX_RANKS."""
    if given is not None or text is None:
        return given
    if not text.isdecimal() or int(text) > MAX_RANKS:
        hint = f"pass a number with {option}; ranges are not supported"
        raise refusal(option, "wrong_type", f"{text} is not a whole number up to {MAX_RANKS}", hint, text)
    return int(text)


def _resolve(endpoint: str) -> tuple[str, int]:
    """Resolve HOST:PORT to an IP address and a port. Raise ConfigError if this fails or HOST is loopback."""
    host, _, port = endpoint.rpartition(":")
    hint = "pass HOST:PORT: an address of node 0 that the other nodes can reach, and a free port"
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise refusal("--rendezvous", "wrong_type", f"{endpoint} is not HOST:PORT", hint, endpoint)
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        message = f"{host} cannot be resolved ({error})"
        raise refusal("--rendezvous", "not_found", message, hint, endpoint) from None
    address = str(found[0][4][0])
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback or ip.is_unspecified:
        message = f"{host} ({address}) cannot be reached from other nodes"
        raise refusal("--rendezvous", "unsupported", message, hint, endpoint)
    return address, int(port)


def _interface(name: str | None, address: str) -> str:
    """Return `name`; if it is None, return the name of the interface that routes to `address`. Raise
    ConfigError if the interface does not exist or no route is found."""
    interfaces, here = psutil.net_if_addrs(), socket.gethostname()
    if name is None:
        try:
            with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
                probe.connect((address, PORT))  # sends no packet; the kernel chooses the route
                own = probe.getsockname()[0]
        except OSError as error:
            message = f"{here} has no route to {address} ({error.strerror})"
            raise refusal("--rendezvous", "not_found", message, "see `ip route`", address) from None
        with_it = (k for k, all_ in interfaces.items() if own in {a.address.partition("%")[0] for a in all_})
        name = next(with_it, f"an interface with the address {own}")
    if name not in interfaces:
        hint = f"use one of {', '.join(sorted(interfaces))}"
        raise refusal("--interface", "not_found", f"{name} does not exist on {here}", hint, name)
    return name


def family(address: str) -> socket.AddressFamily:
    """Return the address family of an IPv6 or IPv4 address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
