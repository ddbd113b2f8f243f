"""`make export`: which cells there are, and that one of them says what `export check` finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bert_dp.config import shipped_configs
from tests import export_all
from tests.helpers import read_json


def test_every_configuration_is_in_every_format_that_holds_it() -> None:
    cells = list(export_all.cells("python"))
    names = {path.stem for path in shipped_configs().glob("*.yaml")} - {"glue"}
    by_form = {
        form: sorted(
            name for cell in cells if (cell.form, cell.python) == (form, "") for name in cell.configs
        )
        for form in export_all.FORMATS
    }
    assert by_form["onnx"] == by_form["aoti"] == sorted(names)
    assert by_form["hf"] == ["bert-simple", "crammed-rope", "small-text"]
    assert [str(cell) for cell in cells if cell.python] == [
        "bert-simple hf transformers4",
        "crammed-rope hf transformers4",
    ]
    assert len(cells) == len(set(map(str, cells)))


@pytest.mark.slow
def test_a_cell_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    asked = ["--only", "small-text", "--format", "hf", "--out", str(tmp_path)]
    assert export_all.main(asked) == 0
    (cell,) = read_json(tmp_path / "record.json")["cells"]
    assert (cell["cell"], cell["architecture"], cell["ok"]) == ("small-text hf", "EuroBERT", True)
    assert {row["length"] for row in cell["rows"]} == {5, 37, 128}
    assert "small-text hf: ok" in capsys.readouterr().out
    before = (tmp_path / "results.jsonl").read_text()
    assert export_all.main(asked) == 0
    assert (tmp_path / "results.jsonl").read_text() == before
