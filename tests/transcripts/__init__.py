"""One recorded transcript per verb: its help, a success and a refusal.

`python -m tests.transcripts --record [VERB...]` (`make transcripts`) records them; the diff is reviewed.
"""

import re
import shlex
import sys
from pathlib import Path

from bert_dp.config import dump_config, find_config, load_config
from tests.e2e.cli import TINY, here
from tests.glue_fixture import write_two_tasks

FOLDER = Path(__file__).parent
VERBS = {  # verb -> a success, a refusal; empty where it depends on the machine or takes minutes
    "": ("--version", "nosuch"),
    "train": ("train tiny.yaml --nproc 1 --run-dir run", "train tiny.yaml schedule.stepz=2 optim.lr=-1"),
    "finetune": (
        "finetune run precision=fp32 --train train.csv --dev dev.csv --dry-run",
        "finetune run --task RTE",
    ),
    "distill": (
        "distill run precision=fp32 --train train.csv --dev dev.csv --teacher-logits logits.jsonl --dry-run",
        "distill nowhere --train train.csv --dev dev.csv",
    ),
    "configs": ("configs", "configs quick"),
    "runs": ("runs glue", "runs nowhere"),
    "checkpoints": ("checkpoints run", "checkpoints nowhere"),
    "predict": ("predict run lines.txt --out encodings.jsonl", "predict nowhere lines.txt"),
    "scale": ("scale tiny.yaml --nproc 1,2 --dry-run", "scale tiny.yaml --engines ddp,magic"),
    "report": ("report run --out page.html", "report nowhere"),
    "doctor": ("", "doctor extra"),
    "data build": (
        "data build corpus.txt --out shards --vocab-size 200 --sequence-length 16 "
        "data.build.max_tokens_per_char=0 data.build.held_out_fraction=0.1",
        "data build nowhere.txt --out other",
    ),
    "data inspect": ("data inspect shards", "data inspect nowhere"),
    "eval glue": ("eval glue run precision=fp32 --data glue --dry-run", "eval glue run"),
    "eval mlm": ("eval mlm run corpus.txt", "eval mlm nowhere corpus.txt"),
    "export hf": ("export hf run --out exported", "export hf nowhere --out other"),
    "export onnx": ("export onnx run --out run.onnx", "export onnx nowhere --out other"),
    "export aoti": ("", "export aoti nowhere --out other"),
    "export check": ("export check exported --run run", "export check shards"),
    "plan": (
        "plan --hours 24 --gpu H100-SXM-80G --tokens-per-parameter 200 --price 2.5 --g-per-kwh 400",
        "plan --hours 24 --gpu H100-SXM",
    ),
    "plan fit": ("plan fit --table runs.csv", "plan fit"),
    "plan scaling": (
        "plan scaling --model bert-large --seq-per-s 580 --micro 256 --gpu A100-80G --link nvswitch3 "
        "--inter ib-hdr --nproc 1..16",
        "plan scaling --model bert-large --seq-per-s 580 --micro 256 --nproc 1..16",
    ),
    "tune batch": ("tune batch tiny.yaml --dry-run", "tune batch --budget 5"),
    "tune lr": ("tune lr tiny.yaml --tokens 1024 --dry-run", "tune lr --budget 5"),
}
NEEDS = {  # verb -> verbs whose success comes before it
    "train": ["data build"],
    "data inspect": ["data build"],
    "export check": ["export hf"],
    **{verb: ["data build"] for verb in ("scale", "tune batch", "tune lr")},
    **{verb: ["train"] for verb in ("finetune", "distill", "checkpoints", "predict", "report")},
    **{verb: ["train"] for verb in ("eval glue", "eval mlm")},
    **{verb: ["train"] for verb in ("export hf", "export onnx", "export aoti")},
}
WORDS = (
    "the crew of an old ship sailed past seven grey islands while rain fell on every quiet harbour".split()
)
UNITS = r"(?:ms|s|min|h|%|k|M|KiB|MiB|GiB|B|bytes?|tokens|GFLOP/s|TFLOP/s|MB/s|GB/s)\b"


def masked(text: str) -> str:
    """Replace dates, versions, figures with decimals or units, and the widths that result."""
    text = text.replace(str(Path(sys.executable).with_name("bert-dp")), "bert-dp")
    text = re.sub(r"\d{4}-?\d\d-?\d\d[-T ][\d:+]{6,}", "DATE", text)
    text = re.sub(r"\d+\.\d+\.\d+[\w.+]*", "VERSION", text)
    text = re.sub(r"<?\d[\d,]*(\.\d+)?[eE][-+]\d+|<?\d[\d,]*\.\d+", "#", text)
    text = re.sub(rf"<?\d[\d,]*(?= (?:{UNITS}|(?:global )?steps/s))", "#", text)
    text = re.sub(r"(# (ms|s|min|h)\b ?)+", lambda times: f"# s{' ' * times[0].endswith(' ')}", text)
    text = re.sub(r"# [kM](?= tokens|$)", "#", text, flags=re.MULTILINE)
    text = re.sub(r"\d+ threads? per rank, cores [\d |,-]+", "# threads per rank, cores #", text)
    text = re.sub(r"\d+ at a time", "# at a time", text)
    return re.sub(r" {2,}|\u2500+", "  ", text)


class Stage:
    """A folder in which verbs are played, with the text and the tables that they read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._played: dict[str, str] = {}
        lines = [" ".join(WORDS[i * j % len(WORDS)] for j in range(1, 40)) + f" {i}" for i in range(1, 600)]
        (folder / "corpus.txt").write_text("\n".join(lines))
        (folder / "lines.txt").write_text("\n".join(lines[:3]))
        for name in ("train", "dev"):
            rows = [f"the {WORDS[i % 17]},{('sea', 'land')[i % 2]}" for i in range(20)]
            (folder / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
        logits = (f'{{"text": "{line}", "logits": [0.5, -1]}}' for line in lines[:30])
        (folder / "logits.jsonl").write_text("\n".join(logits))
        write_two_tasks(folder / "glue")
        runs = ["budget_flops,parameters,loss"]
        for flops in (1e17, 3e17, 1e18, 3e18):
            for size in (1e6, 3e6, 1e7, 3e7, 1e8):
                loss = 1.7 + 400 * size**-0.34 + 410 * (flops / 6 / size) ** -0.28
                runs.append(f"{flops},{size},{loss}")
        (folder / "runs.csv").write_text("\n".join(runs))
        settings = [
            *TINY,
            "model.vocab_size=200",
            "run.device=cpu",
            "precision=fp32",  # auto is bf16 on some CPUs
            "checkpoint.every_steps=2",
            "data.path=shards",
        ]
        config = load_config(find_config("crammed-rope"), settings)
        (folder / "tiny.yaml").write_text(dump_config(config))

    def success(self, verb: str) -> str:
        """Play the success of a verb, once, after those that it needs."""
        if verb not in self._played:
            for before in NEEDS.get(verb, ()):
                self.success(before)
            self._played[verb] = masked(self._play(VERBS[verb][0], 0, columns=1000))
        return self._played[verb]

    def help_and_refusal(self, verb: str) -> str:
        """Play the help of a verb and its refusal."""
        return self._play(f"{verb} --help".strip(), 0) + "\n" + self._play(VERBS[verb][1], 2)

    def _play(self, command: str, code: int, columns: int = 110) -> str:
        environ = {"BERT_DP_CACHE": str(self.folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        done = here(*shlex.split(command), cwd=self.folder, COLUMNS=str(columns), **environ)
        assert done.returncode == code, done.stdout + done.stderr
        errors = done.stderr if code else ""  # of a success: progress, by the speed of the machine
        text = f"$ bert-dp {command}\n{done.stdout}{errors}".replace(str(self.folder), "STAGE")
        return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def recorded(verb: str, part: str) -> Path:
    """Return the file of a transcript; `part`: help or success."""
    return FOLDER / f"{verb.replace(' ', '-') or 'bert-dp'}.{part}.txt"
