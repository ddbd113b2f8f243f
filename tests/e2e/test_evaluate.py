"""`bert-dp eval mlm` and `predict` as a user calls them: what they print, and what they refuse."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from bert_dp import files
from bert_dp.data import tokenizer
from bert_dp.evaluation.text_loss import TextLoss
from bert_dp.training import checkpoint
from tests.e2e.cli import accepted, bert_dp, here, interrupted, refused, start
from tests.helpers import read_lines

RUN = Path(__file__).parents[1] / "fixtures/stopped-run"
WORDS = "a cat sat on a mat while seven old ships sailed slowly past the quiet harbour in rain".split()
LINES = [" ".join(WORDS[(i * j + i) % len(WORDS)] for j in range(1, 30)) for i in range(1, 200)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with a vocabulary of 64, and a tokenizer for it."""
    path = shutil.copytree(RUN, tmp_path_factory.mktemp("evaluate") / "run")
    words = tokenizer.train(LINES, model="wordpiece", vocab_size=64, with_normalizer=True)
    words.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.quick
def test_eval_mlm_prints_a_table_or_json(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    asked = ("eval", "mlm", str(run_dir), "a.txt")
    found = TextLoss.model_validate_json(accepted(*asked, "--json", cwd=tmp_path))
    assert found.documents == found.sources[0]["documents"] == len(LINES)
    assert found.hidden.bits_per_byte is not None
    assert 0 < found.hidden.bits_per_byte < 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in reversed(LINES)))
    shown = accepted("eval", "mlm", str(run_dir), "a.jsonl", "--text-key", "body", cwd=tmp_path)
    assert f"{found.hidden.bytes:,} bytes in {found.hidden.words} hidden words" in shown
    assert f"{found.predicted.tokens:,} tokens" in shown  # the same tokens in another order


@pytest.mark.quick
def test_eval_mlm_compares_runs_on_the_same_words(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    first = shutil.copytree(run_dir, tmp_path / "first")
    (saved,) = files.list_checkpoints(first / "checkpoints")
    state, _ = checkpoint.load(saved)
    state["model"] = {name: 1.5 * tensor for name, tensor in state["model"].items()}
    checkpoint.save_checkpoint(saved.parent, 9, state, json.loads((saved / "state.json").read_text()), keep=2)
    shutil.rmtree(saved)
    asked = ("eval", "mlm", str(first), str(run_dir), "a.txt")
    start, trained = json.loads(here(*asked, "--json", cwd=tmp_path).stdout)
    assert (start["run"], trained["run"]) == (str(first), str(run_dir))
    assert start["step"] < trained["step"]
    assert start["hidden"]["words"] == trained["hidden"]["words"]
    more = start["hidden"]["bits_per_byte"] - trained["hidden"]["bits_per_byte"]
    assert more != 0
    _, _, *rows, _ = here(*asked, cwd=tmp_path, COLUMNS="400").stdout.splitlines()
    best, other = sorted((start, trained), key=lambda loss: loss["hidden"]["bits_per_byte"])
    assert [row.split()[0] for row in rows] == [best["run"], other["run"]]
    assert f" {abs(more):.4f} \u00b1 " in rows[1]
    assert "error: TEXT: " in refused("eval", "mlm", str(run_dir), "a.txt", str(first), cwd=tmp_path)
    assert "error: TEXT: " in refused("eval", "mlm", str(run_dir), str(first), cwd=tmp_path)


@pytest.mark.quick
def test_eval_mlm_refuses(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat sat")
    text = str(tmp_path / "a.txt")
    bare = shutil.copytree(RUN, tmp_path / "bare")
    for arguments, said in (
        ([str(tmp_path), text], f"{tmp_path}: no valid checkpoint"),
        ([str(bare), text], f"copy the tokenizer.json of the run's shards to {bare / 'tokenizer.json'}"),
        ([str(run_dir), str(tmp_path / "none.txt")], "error: TEXT: "),
        ([str(run_dir), text, "--documents", "page"], "error: --documents: "),
        ([str(run_dir)], "Missing argument"),
    ):
        errors = refused("eval", "mlm", *arguments)
        assert said in errors
        assert errors.count("\n") == 1
    (tmp_path / "b.txt").write_bytes(b"fine\n\xff\n")
    done = here("eval", "mlm", str(run_dir), str(tmp_path / "b.txt"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "b.txt: line 2, byte 1 is not UTF-8" in done.stderr


@pytest.mark.quick
def test_predict_encodes_by_a_pretrained_run(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    assert bert_dp("predict", str(run_dir), "a.txt", "--out", "a.jsonl", cwd=tmp_path).stdout == ""
    found = read_lines(tmp_path / "a.jsonl")
    assert [line["index"] for line in found] == list(range(len(LINES)))
    assert {len(line["encoding"]) for line in found} == {16}
    left = start("predict", str(run_dir), "a.txt", cwd=tmp_path)
    assert left.stdout is not None
    left.stdout.close()  # as `head` does
    assert left.stderr is not None
    errors = left.stderr.read()
    assert (left.wait(60), "error" in errors) == (0, False), errors


@pytest.mark.quick
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_half_written_file(run_dir: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES * 500))
    words = ["predict", str(run_dir), str(tmp_path / "a.txt"), "--out", str(tmp_path / "new/out.jsonl")]
    done = interrupted(words, tmp_path / "new", number, lambda: list(tmp_path.glob("new/.out.jsonl.*")))
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "new").iterdir()) == []
