"""Links between the GPUs of this machine, from the tables of `nvidia-smi topo`. Torch-free."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

from launcher.children import run_command

Pair = tuple[int, int]
LIMIT_S = 4.0
# of topo -m, nearest first; NV# = so many NVLinks
PATHS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}


@dataclasses.dataclass(frozen=True)
class Links:
    """Links between GPUs by their indices; empty where nvidia-smi did not answer."""

    paths: Mapping[Pair, str]
    """NV12, PIX, ... SYS for each pair."""
    p2p: Mapping[Pair, str]
    """OK, or the code of the reason why direct access is off."""


def read_links(topology: str | None, gpus: Collection[int]) -> Links:
    """Read the links between `gpus`. `topology`: output of `nvidia-smi topo -m`."""
    p2p = run_command(["nvidia-smi", "topo", "-p2p", "r"], LIMIT_S)[0]
    return Links(*(read_matrix(text or "", gpus) for text in (topology, p2p)))


def read_matrix(text: str, gpus: Collection[int]) -> dict[Pair, str]:
    """Return the cells above the diagonal of a table whose rows and columns are headed GPU0 GPU1 ..."""
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
    return {pair: cell for pair, cell in cells.items() if set(pair) <= set(gpus)}


def describe_path(kind: str) -> str:
    """Return a cell of `topo -m` in words."""
    return f"{kind[2:]} NVLinks" if kind.startswith("NV") else PATHS.get(kind, kind)


def describe_pairs(pairs: Collection[Pair]) -> str:
    """List the first pairs: `0-1, 0-2, ...`."""
    shown = ", ".join(f"{a}-{b}" for a, b in sorted(pairs)[:6])
    return f"{shown}, ..." if len(pairs) > 6 else shown
