"""`python -m bert_dp.export hf RUN --out DIR` and its kind; `check DIR` prints one JSON line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bert_dp.corpus.command import run_command
from bert_dp.export.as_function import open_run
from bert_dp.export.check import check
from bert_dp.export.trace import write_aoti, write_onnx
from bert_dp.export.write import new_directory, write_about, write_hf
from bert_dp.measure.peak import use_all_cores


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 bad input, 128 + signal. Errors go to stderr."""
    parser = argparse.ArgumentParser(prog="python -m bert_dp.export")
    forms = parser.add_subparsers(dest="form", required=True)
    hf, onnx, aoti = (forms.add_parser(name) for name in ("hf", "onnx", "aoti"))
    for form in (hf, onnx, aoti):
        form.add_argument("run")
        form.add_argument("--out", type=Path, required=True)
        form.add_argument("--encoder", action="store_true")
        form.add_argument("--command", required=True, help="what the model card says made it")
        form.set_defaults(precision="fp32")
    for form in (onnx, aoti):
        form.add_argument("--int8", dest="precision", action="store_const", const="int8")
    aoti.add_argument("--bf16", dest="precision", action="store_const", const="bf16")
    checking = forms.add_parser("check")
    checking.add_argument("directory", type=Path)
    checking.add_argument("--run", type=Path)
    checking.add_argument("--python", default=sys.executable, help="the interpreter that loads DIR")
    options = parser.parse_args(argv)
    use_all_cores()

    def answer() -> tuple[str, int]:
        if options.form == "check":
            comparison = check(options.directory, options.run, options.python)
            return json.dumps(comparison), 0 if comparison["ok"] else 1
        source = open_run(options.run, encoder=options.encoder)
        if source.facts.step == 0:
            sys.stderr.write("warning: RUN has not trained a step: its weights are random\n")
        with new_directory(options.out) as folder:
            if options.form == "hf":
                write_hf(source, folder)
            elif options.form == "onnx":
                write_onnx(source, folder, int8=options.precision == "int8")
            else:
                write_aoti(source, folder, options.precision)
            write_about(folder, source, options.form, options.command, options.precision)
        return "", 0

    return run_command(answer)


if __name__ == "__main__":
    sys.exit(main())
