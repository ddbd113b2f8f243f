"""Build the wheel, install it into an empty environment, and train with it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.cli import TINY
from tests.e2e.test_readme import ROOT
from tests.helpers import read_json

pytest.importorskip("hatchling", reason="hatchling builds the wheel")


def pip(verb: str, *words: str) -> None:
    options = "--no-deps --quiet --disable-pip-version-check".split()
    subprocess.run([sys.executable, "-m", "pip", verb, *options, *words], check=True, timeout=120)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "-w", str(folder), str(ROOT))
    (path,) = folder.glob("*.whl")
    return path


def test_an_installed_wheel_trains_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    (site,) = venv.glob("lib/python3*/site-packages")
    # makes torch and other dependencies importable but not an editable bert-dp: .pth files there are ignored
    (site / "dependencies.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    pip("install", "--no-index", "--prefix", str(venv), "--ignore-installed", str(wheel))
    program = venv / "bin/bert-dp"
    program.write_text(f"#!{venv}/bin/python\n" + program.read_text().partition("\n")[2])

    def bert_dp(*words: str) -> str:
        done = subprocess.run([program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = [venv / "bin/python", "-c", "import bert_dp; print(bert_dp.__file__)"]
    assert subprocess.run(where, cwd=tmp_path, capture_output=True, text=True).stdout.startswith(str(site))
    bert_dp("train", *TINY, "model.vocab_size=400", "--nproc", "2", "--run-dir", "run")
    assert read_json(tmp_path / "run/summary.json")["status"] == "done"
    assert (tmp_path / "run/report.html").stat().st_size > 10_000
    assert bert_dp("configs", "slurm.sbatch") == (ROOT / "configs/slurm.sbatch").read_text()


def test_every_link_of_the_package_page_is_absolute(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        page = archive.read(name).decode()
    assert "# bert-dp" in page
    targets = [part.partition(")")[0] for part in page.split("](")[1:]]
    assert targets
    assert all(target.startswith("https://") for target in targets)
