"""What a rank leaves behind of the error that ends it."""

from pathlib import Path

import pytest

from bert_dp.rank_process import record_error
from bert_dp.record import LOG_DIR

SECRET = "q7Zx-81kkd-Pw04ff"


def test_the_message_of_an_error_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setenv(LOG_DIR, str(tmp_path))
    record_error(1, RuntimeError(f"login with {SECRET} failed"))
    for told in ((tmp_path / "rank-1.error.json").read_text(), capsys.readouterr().err):
        assert "login with" in told
        assert SECRET not in told
