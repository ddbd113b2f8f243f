"""Issues: how one is shown, serialised and passed on."""

from __future__ import annotations

import json
import pickle

from bert_dp.config import ConfigError, Issue
from tests.e2e.cli import here

ISSUE = Issue("optim.lr", "out_of_range", "must be above 0", value=-1.0, hint="use 1e-3")


def test_an_issue_is_shown_as_setting_message_and_hint() -> None:
    assert str(ISSUE) == "optim.lr: must be above 0; use 1e-3"
    assert str(ISSUE.within("a.yaml")) == "a.yaml: optim.lr: must be above 0; use 1e-3"
    assert ISSUE.within("a.yaml").kind == "out_of_range"


def test_an_issue_survives_pickling_and_json() -> None:
    assert pickle.loads(pickle.dumps(ConfigError([ISSUE]))).issues == (ISSUE,)
    fields = {"setting": "optim.lr", "kind": "out_of_range", "message": "must be above 0"}
    assert json.loads(json.dumps(ISSUE.to_json())) == {**fields, "value": -1.0, "hint": "use 1e-3"}


def test_json_output_has_the_issues_of_bad_input() -> None:
    done = here("tune", "lr", "no-such-configuration", "--json")
    assert done.returncode == 2
    (issue,) = json.loads(done.stdout)["issues"]
    assert issue["setting"] == "no-such-configuration"
