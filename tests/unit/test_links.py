"""Links between GPUs from nvidia-smi's own tables, and what doctor makes of them."""

from __future__ import annotations

from launcher.machine.gpu_links import Links, parse

from launcher.machine.doctor import link_findings

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
NVLINK = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbb)
\t Link 0: 25 GB/s
\t Link 1: <inactive>
GPU 2: NVIDIA A100-PCIE-40GB (UUID: GPU-cccc)
"""


def test_tables_are_read() -> None:
    links = parse(TOPOLOGY, P2P, NVLINK)
    assert links.paths == {
        (0, 1): "NV12",
        (0, 2): "SYS",
        (0, 3): "SYS",
        (1, 2): "SYS",
        (1, 3): "SYS",
        (2, 3): "PIX",
    }
    assert links.p2p[0, 3] == "CNS"
    assert [why for pair, why in links.p2p.items() if pair != (0, 3)] == ["OK"] * 5
    assert links.nvlinks == {0: (2, 2), 1: (1, 2)}
    assert parse("", "No devices were found", "") == Links({}, {}, {})


def test_each_kind_of_trouble_says_consequence_and_fix() -> None:
    findings = link_findings(parse(TOPOLOGY, P2P, NVLINK), [0, 1, 2, 3])
    assert [f.level for f in findings] == ["warn"] * 3
    assert all(f.consequence and f.fix for f in findings)
    far, p2p, nvlink = (f.what for f in findings)
    assert (
        "12 NVLinks between 0-1, one PCIe switch between 2-3, the link between CPU sockets between 0-2" in far
    )
    assert "off between 0-3 (the chipset does not support it)" in p2p
    assert "GPU 1 has 1 of 2" in nvlink


def test_only_the_visible_gpus_count() -> None:
    near = link_findings(parse(TOPOLOGY, P2P, ""), [2, 3])
    assert [f.level for f in near] == ["ok", "ok"]
    assert near[0].what == "GPU links: one PCIe switch between 2-3"
    whole = link_findings(parse(TOPOLOGY, P2P, NVLINK), [0])
    assert [f.what for f in whole if f.level != "ok"] == []
    assert link_findings(Links({}, {}, {}), [0, 1]) == []
    (far,) = link_findings(Links({(0, k): "NODE" for k in range(1, 9)}, {}, {}), range(9))
    assert (far.level, "0-5, 0-6, ... cross host bridges" in far.consequence) == ("warn", True)
    (even,) = link_findings(Links({}, {}, {0: (1, 2), 1: (1, 2)}), [0, 1])
    assert (even.level, even.what) == ("ok", "NVLink: 1 active on each GPU")
