"""Find the place of this launcher in a run over several nodes: by options, or by the variables of Slurm,
Kubeflow's trainer and SkyPilot."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import socket
from collections.abc import Mapping

import psutil

from bert_dp.config import MAX_RANKS, ConfigError, Issue

DEFAULT_PORT = 29400  # where SkyPilot names hosts alone
SLURM_PORTS = range(15000, 31000)  # below the ports that systems give out; one job, one port


@dataclasses.dataclass(frozen=True)
class Place:
    """One node among those of a run."""

    nodes: int
    rank: int
    address: str
    """IP address of the rendezvous, which is one of node 0."""
    port: int
    interface: str
    """Network interface that the ranks of this node use."""


@dataclasses.dataclass(frozen=True)
class Given:
    """Hold the values of an engine's variables; None = not set."""

    nodes: str | None = None
    rank: str | None = None
    rendezvous: str | None = None


def find_place(
    nnodes: int | None,
    node_rank: int | None,
    rendezvous: str | None,
    interface: str | None,
    environ: Mapping[str, str] = os.environ,
) -> Place | None:
    """Return the place of this launcher; None for a run on one node. Options win over variables.

    Raises ConfigError for what is missing, out of range or contradicts itself, and for a rendezvous that
    other nodes cannot reach.
    """
    engine, given = _of_engine(environ) if nnodes is None else ("", Given())
    if nnodes is not None and nnodes > 1:
        _, given = _of_engine(environ)
    nodes = nnodes if nnodes is not None else _number("--nnodes", given.nodes, engine)
    if nodes is None or nodes == 1:
        options = {"--node-rank": node_rank, "--rendezvous": rendezvous, "--interface": interface}
        named = [name for name, value in options.items() if value is not None]
        if nodes is None and named:
            message, hint = "is needed with " + " and ".join(named), "give the number of nodes"
            raise ConfigError([Issue("--nnodes", "missing", message, None, named[0], hint)])
        return None
    rank = node_rank if node_rank is not None else _number("--node-rank", given.rank, engine)
    meet = rendezvous or given.rendezvous
    issues = []
    if rank is None:
        hint = "give each node its number, from 0"
        issues.append(Issue("--node-rank", "missing", f"is needed for {nodes} nodes", hint=hint))
    elif not 0 <= rank < nodes:
        hint = f"use 0 to {nodes - 1}"
        issues.append(
            Issue("--node-rank", "out_of_range", f"{rank}, of {nodes} nodes", rank, "--nnodes", hint)
        )
    if meet is None:
        hint = "give HOST:PORT of node 0"
        issues.append(Issue("--rendezvous", "missing", f"is needed for {nodes} nodes", hint=hint))
    if issues:
        raise ConfigError(issues)
    assert rank is not None
    assert meet is not None
    address, port = _resolve(meet)
    return Place(nodes, rank, address, port, _interface(interface, address, meet))


def _of_engine(environ: Mapping[str, str]) -> tuple[str, Given]:
    """Return the engine that started this process on several nodes, and what its variables say. Raises
    ConfigError where two engines contradict each other, or srun has started several launchers on a node."""
    found: dict[str, Given] = {}
    # a step's own: a batch script, which is no step, has SLURM_NNODES and would start one launcher of many
    if int(environ.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        tasks, nodes = environ.get("SLURM_STEP_NUM_TASKS", "?"), environ["SLURM_STEP_NUM_NODES"]
        if tasks != nodes:
            message = f"{tasks} tasks on {nodes} nodes, and each node needs one launcher"
            hint = "use srun --ntasks-per-node=1"
            raise ConfigError([Issue("srun", "conflict", message, tasks, "--ntasks-per-node", hint)])
        port = SLURM_PORTS[int(environ.get("SLURM_JOB_ID", "0")) % len(SLURM_PORTS)]
        host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
        meet = f"{host}:{port}" if host else None
        found["Slurm"] = Given(nodes, environ.get("SLURM_NODEID"), meet)
    if "PET_NNODES" in environ:
        master, at = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT", DEFAULT_PORT)
        meet = f"{master}:{at}" if master else None
        found["PET_*"] = Given(environ["PET_NNODES"], environ.get("PET_NODE_RANK"), meet)
    if "SKYPILOT_NUM_NODES" in environ:
        hosts = environ.get("SKYPILOT_NODE_IPS", "").split()
        meet = f"{hosts[0]}:{DEFAULT_PORT}" if hosts else None
        found["SkyPilot"] = Given(environ["SKYPILOT_NUM_NODES"], environ.get("SKYPILOT_NODE_RANK"), meet)
    if len({(given.nodes, given.rank) for given in found.values()}) > 1:
        each = ", ".join(f"{name}: node {g.rank} of {g.nodes}" for name, g in found.items())
        hint = "unset the variables of one, or give --nnodes 1 for one node"
        raise ConfigError(
            [Issue("--nnodes", "conflict", f"two engines contradict each other ({each})", hint=hint)]
        )
    return next(iter(found.items()), ("", Given()))


def first_host(names: str) -> str:
    """Return the first host of Slurm's list: `node[01-03,7],gpu2` -> node01."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^,]*)", names)
    assert match is not None
    return "".join(part or "" for part in match.groups())


def _number(option: str, text: str | None, engine: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) > MAX_RANKS:
        message = f"{text} of {engine} is no whole number" if engine else f"{text} is no whole number"
        hint = "a number of nodes that may change is not supported" if ":" in text else None
        raise ConfigError([Issue(option, "wrong_type", message, text, hint=hint)])
    return int(text)


def _resolve(meet: str) -> tuple[str, int]:
    """Return IP address and port of HOST:PORT. Raises ConfigError."""
    host, _, port = meet.rpartition(":")
    hint = "give HOST:PORT, an address of node 0 that the other nodes reach and a free port"
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError([Issue("--rendezvous", "wrong_type", f"{meet} is not HOST:PORT", meet, hint=hint)])
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        message = f"{host} cannot be resolved ({getattr(error, 'strerror', None) or error})"
        raise ConfigError([Issue("--rendezvous", "not_found", message, meet, hint=hint)]) from None
    address = str(found[0][4][0])
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback or ip.is_unspecified:
        message = f"{host} is {address}, which no other node reaches"
        raise ConfigError([Issue("--rendezvous", "unsupported", message, meet, hint=hint)])
    return address, int(port)


def _interface(name: str | None, address: str, meet: str) -> str:
    """Check the interface, or return that of the route to the rendezvous. Raises ConfigError."""
    interfaces = psutil.net_if_addrs()
    if name is not None:
        if name in interfaces:
            return name
        message = f"{name} does not exist on {socket.gethostname()}"
        hint = f"use one of {', '.join(sorted(interfaces))}"
        raise ConfigError([Issue("--interface", "not_found", message, name, hint=hint)])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: the kernel chooses the route
            own = probe.getsockname()[0]
    except OSError as error:
        message = f"{socket.gethostname()} has no route to {meet} ({error.strerror})"
        hint = "see `ip route`, or give another address of node 0"
        raise ConfigError([Issue("--rendezvous", "not_found", message, meet, hint=hint)]) from None
    for interface, addresses in interfaces.items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return interface
    raise ConfigError([Issue("--interface", "missing", f"none has the address {own}", hint="name one")])
