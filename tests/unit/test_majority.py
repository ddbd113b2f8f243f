"""What a constant answer scores, of prepared directories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bert_dp.config import read_examples
from bert_dp.examples.store import Examples
from bert_dp.measure.majority import main
from tests.example_files import write_examples


def test_each_labelled_split_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_examples(tmp_path / "one", test=3)
    two = write_examples(tmp_path / "two", kind="regression")
    assert main([str(one), str(two)]) == 0
    told = json.loads(capsys.readouterr().out)
    train, dev = (Examples.open(one, read_examples(one), split).labels for split in ("train", "dev"))
    assert train is not None
    assert dev is not None
    most = np.bincount(train).argmax()
    assert told[str(one)] == {"dev": {"accuracy": pytest.approx((dev == most).mean())}}
    assert told[str(two)] == {"dev": {"pearson": None, "spearman": None}}  # of what is constant


def test_a_directory_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
