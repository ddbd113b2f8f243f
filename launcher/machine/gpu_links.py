"""How the GPUs of this machine reach each other, from nvidia-smi's tables. Torch-free.

Formats: `nvidia-smi topo -m`, `nvidia-smi topo -p2p r` and `nvidia-smi nvlink --status` (nvidia-smi(1)).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from launcher.children import run_command

Pair = tuple[int, int]
LIMIT_S = 4.0
QUERIES = {
    "topology": ["nvidia-smi", "topo", "-m"],
    "p2p": ["nvidia-smi", "topo", "-p2p", "r"],
    "nvlink": ["nvidia-smi", "nvlink", "--status"],
}
# of topo -m, nearest first; NV# = so many NVLinks
PATHS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}
NO_P2P = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPUs do not support it",
    "TNS": "the topology does not support it",
    "DR": "disabled in the driver's registry",
    "NS": "not supported",
    "U": "unknown",
}


@dataclasses.dataclass(frozen=True)
class Links:
    """Of the machine's GPUs by their index; empty where nvidia-smi does not tell."""

    paths: Mapping[Pair, str]
    """NV12, PIX, ... SYS for each pair."""
    p2p: Mapping[Pair, str]
    """OK or a reason of NO_P2P."""
    nvlinks: Mapping[int, tuple[int, int]]
    """(active, all) NVLinks of each GPU that has some."""


def query() -> Links:
    """Ask nvidia-smi, for LIMIT_S at most."""
    with ThreadPoolExecutor(len(QUERIES)) as pool:
        answers = dict(
            zip(QUERIES, pool.map(lambda q: run_command(q, LIMIT_S)[0], QUERIES.values()), strict=True)
        )
    return parse(answers["topology"] or "", answers["p2p"] or "", answers["nvlink"] or "")


def parse(topology: str, p2p: str, nvlink: str) -> Links:
    """From the three outputs; what cannot be read is left out."""
    return Links(_matrix(topology), _matrix(p2p), _nvlinks(nvlink))


def _matrix(text: str) -> dict[Pair, str]:
    """The cells above the diagonal of a table with GPU0 GPU1 ... as heads of rows and columns."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)  # the head is underlined
    columns: list[int] = []
    cells: dict[Pair, str] = {}
    for line in text.splitlines():
        words = line.split()
        heads = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
        if len(heads) > 1 and not columns:
            columns = heads
        elif columns and len(heads) == 1 and words[0] == f"GPU{heads[0]}":
            row = zip(columns, words[1:], strict=False)
            cells |= {(heads[0], column): cell for column, cell in row if heads[0] < column}
    return cells


def _nvlinks(text: str) -> dict[int, tuple[int, int]]:
    counts: dict[int, tuple[int, int]] = {}
    gpu = None
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = int(head[1])
        elif gpu is not None and (link := re.match(r"\s+Link \d+: (.+)", line)):
            active, count = counts.get(gpu, (0, 0))
            counts[gpu] = active + ("inactive" not in link[1]), count + 1
    return counts
