"""`bert-dp eval mlm` as a user calls it, on a run of before: what it prints, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bert_dp.corpus import tokenizer
from launcher import results
from tests.e2e.cli import bert_dp, refused

RUN = Path(__file__).parents[1] / "golden/made/run-stopped"
WORDS = "a cat sat on a mat while seven old ships sailed slowly past the quiet harbour in rain".split()
LINES = [" ".join(WORDS[(i * j + i) % len(WORDS)] for j in range(1, 30)) for i in range(1, 200)]

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with a vocabulary of 64, and a tokenizer for it."""
    path = shutil.copytree(RUN, tmp_path_factory.mktemp("evaluate") / "run")
    words = tokenizer.train(LINES, model="wordpiece", vocab_size=64, with_normalizer=True)
    words.save(str(path / "tokenizer.json"))
    return path


def test_eval_mlm_prints_a_table_or_json(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    asked = ("eval", "mlm", str(run_dir), "a.txt")
    printed = bert_dp(*asked, "--json", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    found = results.parse(json.loads(printed.stdout), results.TextLoss, "stdout")
    assert found.documents == found.sources[0]["documents"] == len(LINES)
    assert found.hidden.bits_per_byte is not None
    assert 0 < found.hidden.bits_per_byte < 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in reversed(LINES)))
    shown = bert_dp("eval", "mlm", str(run_dir), "a.jsonl", "--text-key", "body", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert f"{found.hidden.bytes:,} bytes in {found.hidden.words} hidden words" in shown.stdout
    assert f"{found.predicted[1].tokens:,} " in shown.stdout  # <mask>: the same tokens in another order


def test_eval_mlm_refuses(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat sat")
    text = str(tmp_path / "a.txt")
    bare = shutil.copytree(RUN, tmp_path / "bare")
    for arguments, said in (
        ([str(tmp_path), text], "holds no checkpoint; name a run directory or a checkpoint"),
        ([str(bare), text], f"put the tokenizer.json of its shards at {bare / 'tokenizer.json'}"),
        ([str(run_dir), str(tmp_path / "none.txt")], "none.txt matches no file"),
        (
            [str(run_dir), text, "--documents", "page"],
            "data.build.documents: expected 'line' or 'blank_line'",
        ),
        ([str(run_dir), text, "--max-bytes", "0"], "--max-bytes"),
        ([str(run_dir)], "TEXTS is missing"),
    ):
        errors = refused("eval", "mlm", *arguments)
        assert said in errors
        assert errors.count("\n") == 1
    (tmp_path / "b.txt").write_bytes(b"fine\n\xff\n")
    done = bert_dp("eval", "mlm", str(run_dir), str(tmp_path / "b.txt"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "b.txt: line 2, byte 1 is not UTF-8" in done.stderr
