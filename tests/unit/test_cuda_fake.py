"""What a build for CPUs can know of a GPU: nothing is left on the host, and no step waits for the device.

Not seen: autocast, which such a build switches off for a GPU, and with it bf16 and fp16; the gradient scaler;
numbers, speed, and the order of streams; pinned memory; what Timers read; ddp, whose reducer is C++ and asks
collectives that do nothing for their results, and the engines of other packages; checkpoints of zero1, whose
owners exchange numbers; code that inductor makes. `make gpu` sees them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_cuda import CHECKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By check: nothing, or a traceback."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: autograd asks for a device, which a compiled file pretends to be")
    folder = tmp_path_factory.mktemp("fake_cuda")
    home = Path(torch.__file__).parent
    library = folder / "fake_cuda.so"
    link = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
    source = ROOT / "tests" / "fake_cuda.cpp"
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", source, "-o", library, *link],
        check=True,
    )
    results = folder / "results.json"
    subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda", library, results], cwd=ROOT, check=True, timeout=300
    )
    found: dict[str, str] = json.loads(results.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu_that_does_not_exist(told: dict[str, str], name: str) -> None:
    assert not told[name], told[name]
