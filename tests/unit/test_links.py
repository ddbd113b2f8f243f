"""Links between GPUs from nvidia-smi's own tables, and the findings of doctor about them."""

from __future__ import annotations

import pytest

from launcher.machine import links
from launcher.machine.doctor import link_findings
from launcher.machine.links import Links, read_matrix

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-23,48-71\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-23,48-71\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPIX\tSYS\t24-47,72-95\t1\t\tN/A
GPU3\tSYS\tSYS\tPIX\t X \tSYS\t24-47,72-95\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
P2P = """\
 \tGPU0\tGPU1\tGPU2\tGPU3\t
 GPU0\tX\tOK\tOK\tCNS\t
 GPU1\tOK\tX\tOK\tOK\t
 GPU2\tOK\tOK\tX\tOK\t
 GPU3\tCNS\tOK\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def test_tables_are_read() -> None:
    assert read_matrix(TOPOLOGY, range(4)) == {
        (0, 1): "NV12",
        (0, 2): "SYS",
        (0, 3): "SYS",
        (1, 2): "SYS",
        (1, 3): "SYS",
        (2, 3): "PIX",
    }
    p2p = read_matrix(P2P, range(4))
    assert (len(p2p), [pair for pair, code in p2p.items() if code != "OK"]) == (6, [(0, 3)])
    assert read_matrix("", range(4)) == read_matrix("No devices were found", range(4)) == {}


def test_only_the_visible_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "run_command", lambda *_: (P2P, None))
    found = links.read_links(TOPOLOGY, [2, 3])
    assert found == Links({(2, 3): "PIX"}, {(2, 3): "OK"})
    (near,) = link_findings(found)
    assert (near.level, near.what) == ("ok", "GPU links: one PCIe switch between 2-3")
    assert link_findings(Links({}, {})) == []


def test_each_kind_of_trouble_names_the_pairs_with_consequence_and_fix() -> None:
    far, p2p = link_findings(Links(read_matrix(TOPOLOGY, range(4)), read_matrix(P2P, range(4))))
    assert (far.level, p2p.level) == ("warn", "warn")
    assert all((far.consequence, far.fix, p2p.consequence, p2p.fix))
    for part in (
        "12 NVLinks between 0-1",
        "one PCIe switch between 2-3",
        "CPU sockets between 0-2, 0-3, 1-2",
    ):
        assert part in far.what
    assert "0-3 (CNS)" in p2p.what
    (far,) = link_findings(Links({(0, k): "NODE" for k in range(1, 9)}, {}))
    assert (far.level, "0-5, 0-6, ..." in far.consequence) == ("warn", True)
