"""Train, finetune, predict and export with byte-level BPE on text in two languages."""

import json
import random
from pathlib import Path

import pytest

from bert_dp.config import read_manifest
from tests.e2e.cli import TINY, accepted, bert_dp
from tests.helpers import read_json

LANGUAGES = (  # word separator and words; the first and the fifth word determine the label
    (" ", "мир жизнь время человек дом год работа слово дело страна".split()),
    ("", "世界 生活 时间 人们 房子 一年 工作 词语 事情 国家".split()),
)
BUILD = "tokenizer_model=byte_bpe normalize=false max_tokens_per_char=0 held_out_fraction=0.1"
BYTES = [f"data.build.{item}" for item in BUILD.split()]
SIZES = ("data.sequence_length=32", "model.vocab_size=400", "model.num_layers=1")
MODEL = ("objective.mask_rate=0.15", *SIZES)


def test_russian_and_chinese_text_works_from_the_build_to_the_exports(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    draw = random.Random(0)
    lines, rows = [], []
    for gap, words in LANGUAGES:
        lines += [gap.join(draw.choices(words, k=20)) + f", {i}." for i in range(200)]
        ends = ((words[0], "a"), (words[4], "b"))
        rows += [f"{gap.join((*draw.choices(words, k=5), end))},{label}" for end, label in ends * 4]
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    text, table, shards, run, tuned = (
        str(tmp_path / name) for name in ("text.txt", "train.csv", "shards", "run", "tuned")
    )
    accepted("data", "build", text, "--out", shards, "--vocab-size", "400", "--sequence-length", "32", *BYTES)
    manifest = read_manifest(Path(shards))
    assert (manifest.vocab_size, manifest.dropped) == (400, dict.fromkeys(manifest.dropped, 0))
    (source,) = manifest.sources
    assert (source.lost_letters, source.unknown_tokens) == (0, 0)
    assert source.letters == sum(map(str.isalpha, "".join(lines)))
    shown = accepted("data", "inspect", shards)
    assert all(words[0] in shown for _, words in LANGUAGES)

    bert_dp("train", f"data.path={shards}", *TINY, *MODEL, "--nproc", "1", "--run-dir", run)
    mlm = json.loads(accepted("eval", "mlm", run, text, "--json"))
    assert (mlm["hidden"]["unknown_tokens"], mlm["hidden"]["words_without_token"]) == (0, 0)
    assert mlm["hidden"]["bytes"] > 0
    few = ("schedule.epochs=1", "batch.global_size=8", "batch.micro_size=4", "--kind", "single_label")
    bert_dp("finetune", run, "--train", table, "--dev", table, *few, "--nproc", "1", "--run-dir", tuned)
    assert read_json(Path(tuned) / "summary.json")["status"] == "done"
    labels = [json.loads(line) for line in accepted("predict", tuned, table).splitlines()]
    assert len(labels) == 16
    assert {each["label"] for each in labels} <= {"a", "b"}
    for form, of in (("hf", run), ("onnx", tuned)):
        out = str(tmp_path / form)
        accepted("export", form, of, "--out", out)
        assert json.loads(accepted("export", "check", out, "--json", "--run", of))["ok"]
    # transformers' tokenizer encodes and decodes a text without loss
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    for line in (lines[0], lines[-1]):
        ids = loaded(line)["input_ids"]
        assert loaded.unk_token_id not in ids
        assert loaded.decode(ids, skip_special_tokens=True) == line
