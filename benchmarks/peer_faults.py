"""The same faults under plain torchrun, accelerate launch and deepspeed, and under `bert-dp train`.

    python benchmarks/peer_faults.py [--faults raise,kill,...] [--launchers ...] [--json FILE] [--hang-s 40]

Two CPU ranks train our own worker on synthetic shards; the plain launchers are given one loopback port and
nothing else of ours. Faults inside a rank come from tests/faults/inject, in optimizer step 20 of rank 1; the
others are signals: SIGKILL and SIGTERM to the process that the user started, Ctrl-C to its process group, as
a terminal does. Recorded of each: exit code and seconds until the end, the lines printed after the fault and
in which of them the rank, the cause and the file:line stand, listening sockets while training, and processes
that live 5 s after the end. A hang is watched for --hang-s seconds and then ended.

Every process carries a mark in its environment, by which all of them are found and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records
from benchmarks.records import ROOT
from benchmarks.turns import tell
from bert_dp.config import dump_config, load_config
from tests.e2e.cli import TINY
from tests.faults.harness import broken
from tests.shards import write_shards

MARK = "BERT_DP_PEER_FAULTS"
PEERS = {
    "torchrun": "torch.distributed.run --nproc-per-node=2 --master-addr=127.0.0.1 --master-port={port} -m",
    "accelerate": (
        "accelerate.commands.launch --multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no "
        "--dynamo_backend=no --main_process_ip=127.0.0.1 --main_process_port={port} --module"
    ),
    "deepspeed": (
        "deepspeed.launcher.runner --num_gpus=2 --hostfile=none --master_addr=127.0.0.1 "
        "--master_port={port} --module"
    ),
}
LAUNCHERS = ("bert-dp", *PEERS)
INJECTED = {"raise": "raise", "kill": "kill", "segv": "segv", "hang": "sleep"}
SIGNALS = {"launcher killed": signal.SIGKILL, "Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
CAUSE = {
    "raise": r"ValueError: injected by a test",
    "kill": r"SIGKILL|[Ss]ignal 9\b|code = -9\b",
    "segv": r"SIGSEGV|Segmentation fault|[Ss]ignal 11\b|code = -11\b",
    "hang": r"rank 1\b.*(hang|hung|asleep|no progress|stands still|stuck)",
}
PLACE = r'sitecustomize\.py(:|", line )\d+,? in break_now'
BEFORE = re.compile(
    r"(run directory|launcher|ranks|batch|model|learning rate|data|ready|weights)\b.*: |step \d"
)
STEP = 20
END_S = 120.0  # a launcher that has not ended by then is recorded as such


def command(launcher: str, config: Path, run_dir: Path, port: int) -> list[str]:
    """How a user starts two ranks of the worker with this launcher."""
    if launcher == "bert-dp":
        return records.bert_dp_command("train", str(config), "--nproc=2", f"--run-dir={run_dir}")
    options = PEERS[launcher].format(port=port).split()
    return [sys.executable, "-m", *options, "bert_dp.worker", str(config), "--run-dir", str(run_dir)]


def environment(fault: str, folder: Path, mark: str) -> dict[str, str]:
    """Ours without any variable of a launcher, the fault, and the mark."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BERT_DP_", "MASTER_", "PET_"))}
    site = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    more = {"PYTHONPATH": site, "DS_ACCELERATOR": "cpu", "HF_HOME": str(folder / "hf"), MARK: mark}
    if fault in INJECTED:
        more |= broken(INJECTED[fault], rank=1, step=STEP, once=str(folder / "broken"))
        more["PYTHONPATH"] += os.pathsep + site
    return {**kept, **more}


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of a run."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def listeners(processes: list[psutil.Process]) -> list[str]:
    """address:port of every listening TCP socket."""
    addresses = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for c in process.net_connections("inet"):
                if c.status == psutil.CONN_LISTEN:
                    addresses.add(f"{c.laddr.ip}:{c.laddr.port}")
    return sorted(addresses)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def observe(launcher: str, fault: str, config: Path, root: Path, hang_s: float) -> dict[str, Any]:
    """One run with one fault, from its start until nothing of it is left."""
    folder = Path(tempfile.mkdtemp(dir=root))
    run_dir, output, mark = folder / "run", folder / "output.txt", uuid.uuid4().hex
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = command(launcher, config, run_dir, port)
    try:
        with output.open("w") as file:
            process = subprocess.Popen(
                line,
                cwd=folder,
                env=environment(fault, folder, mark),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        seen = _break_and_wait(process, fault, folder, run_dir, mark, hang_s)
        time.sleep(5.0)
        left = [" ".join(p.cmdline())[:120] for p in marked(mark)]
    finally:
        for member in marked(mark):
            with contextlib.suppress(psutil.Error):
                member.kill()
        process.wait()
    checkpoints = [p.parent.name for p in run_dir.glob("checkpoints/step-*/manifest.json")]
    text = output.read_text(errors="replace")
    return {
        "launcher": launcher,
        "fault": fault,
        "command": line,
        **seen,
        "left_alive": left,
        "checkpoints": checkpoints,
        **read(text, fault),
        "output": text[-20_000:],
    }


def _break_and_wait(
    process: subprocess.Popen[bytes], fault: str, folder: Path, run_dir: Path, mark: str, hang_s: float
) -> dict[str, Any]:
    metrics, sign = run_dir / "metrics.jsonl", folder / "broken"

    def training() -> bool:
        return process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 3)

    started = wait_until(training, 180) and process.poll() is None
    sockets = listeners(marked(mark)) if fault not in ("raise", "kill", "segv") else None
    if fault in INJECTED:
        wait_until(lambda: sign.exists() or process.poll() is not None, 60)
        since = sign.stat().st_mtime if sign.exists() else time.time()
    else:
        since = time.time()
        if fault == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(SIGNALS[fault])
    ended = wait_until(lambda: process.poll() is not None, hang_s if fault == "hang" else END_S)
    seconds = round(time.time() - since, 2)
    return {
        "trained": started or sign.exists(),
        "exit_code": process.returncode if ended else None,
        "seconds": seconds if ended else None,
        "listening": sockets,
    }


def read(text: str, fault: str) -> dict[str, Any]:
    """What the output says after the fault: how many lines, and the first line (from 1) that names each."""
    lines = text.splitlines()
    start = max((i + 1 for i, line in enumerate(lines) if BEFORE.match(line)), default=0)
    after = lines[start:]

    def first(pattern: str) -> int | None:
        return next((i for i, line in enumerate(after, 1) if re.search(pattern, line)), None)

    named = fault in CAUSE
    return {
        "lines": len(after),
        "rank_in_line": first(r"\brank\s*:?\s*1\b") if named else None,
        "cause_in_line": first(CAUSE[fault]) if named else None,
        "place_in_line": first(PLACE) if fault in ("raise", "segv") else None,
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown; a dash = not told, or does not apply."""
    head = (
        "fault",
        "launcher",
        "exit code",
        "ended after, s",
        "lines printed",
        "rank in line",
        "cause in line",
        "file:line in line",
        "alive 5 s later",
        "listening beyond loopback",
        "saved at the end",
    )
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for run in runs:
        sockets = run["listening"]
        wild = None if sockets is None else sum(not s.startswith(("127.", "::1:")) for s in sockets)
        cells = (
            run["fault"],
            run["launcher"],
            "still runs" if run["exit_code"] is None else run["exit_code"],
            run["seconds"],
            run["lines"],
            run["rank_in_line"],
            run["cause_in_line"],
            run["place_in_line"],
            len(run["left_alive"]) if run["exit_code"] is not None else None,
            wild,
            "yes" if set(run["checkpoints"]) - {"step-00000000"} else "no",  # that one precedes the fault
        )
        rows.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = records.make_parser(__doc__, "--json")
    parser.add_argument("--faults", default=",".join([*INJECTED, *SIGNALS]))
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--hang-s", type=float, default=40.0)
    o = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shards = write_shards(root / "shards")
        config = root / "config.yaml"
        settings = [*TINY, f"data.path={shards}", "schedule.steps=100000", "compile=off", "run.device=cpu"]
        config.write_text(dump_config(load_config(ROOT / "configs/quickstart.yaml", settings)))
        for fault in o.faults.split(","):
            for launcher in o.launchers.split(","):
                run = observe(launcher, fault, config, root, o.hang_s)
                runs.append(anonymous(run, {str(root): "TMP", str(ROOT): "REPO"}))
                tell(str({k: v for k, v in runs[-1].items() if k not in ("output", "command")}))
                packages = ("torch", "accelerate", "deepspeed")
                records.write(o.json, {"environment": records.environment(None, packages), "runs": runs})
    print(table(runs))


def anonymous(run: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """The record without the paths of this machine."""
    text = json.dumps(run)
    for path, name in {**places, sys.prefix: "VENV", sys.base_prefix: "PYTHON"}.items():
        text = text.replace(path, name)
    cleaned: dict[str, Any] = json.loads(text)
    return cleaned


if __name__ == "__main__":
    main()
