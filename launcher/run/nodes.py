"""Find the place of this launcher in a run over several nodes: by options, or by the variables of Slurm,
Kubeflow's trainer and SkyPilot."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from bert_dp.config import MAX_RANKS, ConfigError, Issue
from bert_dp.config.errors import IssueKind

PORT = 29400  # where an engine names no port
SLURM_PORTS = range(15000, 31000)  # below those that systems give out; one job, one port


class Place(NamedTuple):
    """One node among those of a run."""

    nodes: int
    rank: int
    address: str
    """IP address of the rendezvous, which is one of node 0."""
    port: int
    interface: str
    """Network interface that the ranks of this node use."""
    nproc: str = "auto"
    """Ranks here where --nproc gives no number."""


class Variables(NamedTuple):
    """Hold what an engine has set; None = nothing."""

    nodes: str | None = None
    rank: str | None = None
    host: str | None = None
    port: int | str = PORT
    nproc: str = "auto"


def refusal(setting: str, kind: IssueKind, message: str, hint: str, value: object = None) -> ConfigError:
    """Return the error for one problem."""
    return ConfigError([Issue(setting, kind, message, value, hint=hint)])


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
    engine = Variables() if nnodes == 1 else engine_variables(environ)
    nodes = _number("--nnodes", nnodes, engine.nodes)
    options = {"--node-rank": node_rank, "--rendezvous": rendezvous, "--interface": interface}
    named = [name for name, value in options.items() if value is not None]
    if nodes is None and named:
        message = f"is needed with {' and '.join(named)}"
        raise refusal("--nnodes", "missing", message, "give the number of nodes")
    if nodes in (None, 1):
        return None
    rank = _number("--node-rank", node_rank, engine.rank)
    meet = rendezvous or (engine.host and f"{engine.host}:{engine.port}")
    needed = f"is needed for {nodes} nodes"
    if rank is None:
        raise refusal("--node-rank", "missing", needed, "give each node its own, from 0")
    if not 0 <= rank < nodes:
        message, hint = f"{rank}, of {nodes} nodes", f"use 0 to {nodes - 1}"
        raise refusal("--node-rank", "out_of_range", message, hint, rank)
    if not meet:
        raise refusal("--rendezvous", "missing", needed, "give HOST:PORT of node 0")
    address, port = _resolve(meet)
    return Place(nodes, rank, address, port, _interface(interface, address), engine.nproc)


def engine_variables(environ: Mapping[str, str]) -> Variables:
    """Return the variables of the engine that started this process on several nodes.

    Raises ConfigError where two engines contradict each other, or srun has started several launchers on a
    node.
    """
    get, found = environ.get, {}
    # a step's own: a batch script, which is no step, has SLURM_NNODES and would start one launcher of many
    if (nodes := get("SLURM_STEP_NUM_NODES", "1")) != "1":
        if (tasks := get("SLURM_STEP_NUM_TASKS", nodes)) != nodes:
            message = f"{tasks} tasks on {nodes} nodes, which need a launcher each"
            raise refusal("srun", "conflict", message, "use srun --ntasks-per-node=1", tasks)
        port = SLURM_PORTS[int(get("SLURM_JOB_ID", "0")) % len(SLURM_PORTS)]
        host = first_host(get("SLURM_STEP_NODELIST", ""))
        found["Slurm"] = Variables(nodes, get("SLURM_NODEID"), host, port)
    if nodes := get("PET_NNODES", ""):
        nproc = get("PET_NPROC_PER_NODE", "auto")  # gpu and cpu are torchrun's other words
        found["Kubeflow"] = Variables(
            nodes,
            get("PET_NODE_RANK"),
            get("PET_MASTER_ADDR"),
            get("PET_MASTER_PORT", str(PORT)),
            nproc if nproc.isdecimal() else "auto",
        )
    if nodes := get("SKYPILOT_NUM_NODES", ""):
        hosts = get("SKYPILOT_NODE_IPS", "").split()
        found["SkyPilot"] = Variables(nodes, get("SKYPILOT_NODE_RANK"), hosts[0] if hosts else None)
    if len({each[:2] for each in found.values()}) > 1:
        each = ", ".join(f"{name}: node {found[name].rank} of {found[name].nodes}" for name in found)
        hint = "unset the variables of one, or give --nnodes 1 for one node"
        raise refusal("--nnodes", "conflict", f"engines contradict each other ({each})", hint)
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
        hint = "give the number by the option; one that may change is not supported"
        raise refusal(option, "wrong_type", f"{text} is no whole number", hint, text)
    return int(text)


def _resolve(meet: str) -> tuple[str, int]:
    """Return IP address and port of HOST:PORT. Raises ConfigError."""
    host, _, port = meet.rpartition(":")
    hint = "give HOST:PORT, an address of node 0 that the other nodes reach and a free port"
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
        message = f"{host} is an address ({address}) that no other node reaches"
        raise refusal("--rendezvous", "unsupported", message, hint, meet)
    return address, int(port)


def _interface(name: str | None, address: str) -> str:
    """Check the interface, or return that of the route to the rendezvous. Raises ConfigError."""
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
    """Return IPv6 or IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
