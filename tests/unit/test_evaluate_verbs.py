"""Test the configurations of `finetune` and `eval glue`, and the refusals of `data build`."""

from pathlib import Path

import pytest

from launcher import results
from launcher.evaluate import finetune, glue
from launcher.evaluate.glue_scores import GlueOptions
from launcher.job import Output
from tests.e2e.cli import refused
from tests.glue_fixture import make_task
from tests.helpers import make_config
from tests.runs_to_export import config_of, write_run

SMALL = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a pretrained run into the current directory and return its path."""
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "run", config_of("quickstart", model=SMALL))


def test_the_recipe_equals_the_crammed_paper_and_uses_the_tokenizer_of_the_checkpoint(run: Path) -> None:
    """The values are GLUE_sane of the cramming code; the five seeds are the default of `eval glue`."""
    start = finetune.find_pretrained(run)
    recipe = finetune.configuration(start, [], None, recipe=glue.RECIPE)
    optim, schedule, model, head = recipe.optim, recipe.schedule, recipe.model, recipe.finetune
    assert (optim.name, optim.lr, optim.beta1, optim.beta2, optim.eps) == ("adamw", 4e-5, 0.9, 0.98, 1e-6)
    assert (optim.weight_decay, optim.clip) == (0.0, 0.0)
    assert (schedule.name, schedule.epochs, schedule.warmup_fraction) == ("cosine", 5, 0.1)
    assert (model.dropout, model.attention_dropout, recipe.batch.global_size) == (0.1, 0.1, 16)
    assert (head.head, head.head_size, head.pooling) == ("recipe", 1024, "cls")
    assert (recipe.eval.every_steps, GlueOptions().seeds) == (0, 5)
    own = finetune.configuration(start, [], None)
    head = own.finetune.model_copy(update={"head": "recipe"})
    assert own.finetune.head == "auto", "the default of `finetune`, which differs from the recipe only here"
    assert own.model_copy(update={"finetune": head}) == recipe
    assert start.tokenizer == run / "checkpoints/step-00000003/tokenizer.json", "not the checkpoint's"
    start.tokenizer.unlink()
    assert finetune.find_pretrained(run).tokenizer == run / "tokenizer.json"


def test_a_refusal_of_a_build_names_the_option_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n")
    (tmp_path / "b.csv").write_text("id,text\n1,one\n")
    (tmp_path / "c.txt").write_bytes(b"fine\n\xff\xfe broken\n")
    (tmp_path / "t.json").write_text("{}")
    command = ["data", "build", "--out", str(tmp_path / "out")]
    for words, setting in (
        ([str(tmp_path / "b.csv")], "SOURCES"),
        ([str(tmp_path / "c.txt")], str(tmp_path / "c.txt")),
        (["builtin", "--format", "csv"], "--format"),
        (["builtin", "data.build.dedupe=exact"], "data.build.dedupe"),
        ([str(tmp_path / "gone")], "SOURCES"),
        ([str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "t.json")], "--tokenizer"),
        ([str(tmp_path / "a.txt"), "--vocab-size", "5"], "--vocab-size"),
        ([str(tmp_path / "a.txt"), "--tokenizer", "t", "--vocab-size", "99"], "--vocab-size"),
        ([str(tmp_path / "a.txt"), "optim.lr=1"], "optim.lr"),
        (["data.build.dedup=none"], "SOURCES"),
    ):
        assert refused(*command, *words).startswith(f"error: {setting}: ")
    assert "--format text" in refused(*command, str(tmp_path / "b.csv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.csv", "c.txt", "t.json"]


def test_finetuning_uses_the_largest_micro_batches_only_on_a_gpu() -> None:
    for on_gpu, on_cpu, ranks, settings, given in (
        (16, 8, 1, (), ()),
        (8, 8, 2, (), ()),
        (8, 8, 4, ("parallel.tensor=2",), ()),
        (8, 8, 3, (), ()),  # three ranks do not divide the batch, so nothing changes
        (4, 4, 1, (), ("batch.micro_size=4",)),
        (20, 20, 1, (), ("batch.global_size=20",)),
    ):
        config = make_config("batch.global_size=16", "batch.micro_size=8", *settings, *given)
        sized = [finetune.sized_micro_batches(config, ranks, given, on_gpu=gpu) for gpu in (True, False)]
        assert [each.batch.micro_size for each in sized] == [on_gpu, on_cpu]


@pytest.mark.parametrize("random", [False, True])
def test_finetuning_uses_the_labels_of_the_task_and_the_given_length(
    run: Path, monkeypatch: pytest.MonkeyPatch, random: bool
) -> None:
    """The recipe sets dropout, batch size and epochs; given settings take precedence over the recipe."""
    monkeypatch.setattr(finetune, "prepare", lambda start, source, length, seed: Path(f"/cache/{length}"))
    monkeypatch.setattr(finetune, "read_examples", lambda path: make_task("RTE").manifest)
    source = finetune.ExamplesSource("RTE", ["--task", "RTE"])
    settings = ["data.sequence_length=48", "optim.lr=1e-3"]
    config = finetune.load(run, source, settings, nproc="2", random_weights=random).config
    assert config.data.path == "/cache/48"
    assert config.finetune.kind == "single_label"
    assert config.finetune.labels == ("entailment", "not_entailment")
    assert config.run.init_from == (None if random else str(run))
    pretrained = finetune.find_pretrained(run).config
    assert (config.model.dropout, config.schedule.epochs, config.optim.lr) == (0.1, 5, 1e-3)
    assert config.model.hidden_size == pretrained.model.hidden_size == 16
    assert (config.batch.global_size, config.batch.micro_size) == (16, 8)
    longer = config_of("quickstart", model=SMALL, data={"sequence_length": 64})
    start = write_run(run.parent / "longer", longer)
    for gpus, micro in ((0, 8), (1, 16)):
        monkeypatch.setattr(finetune.job.Job, "gpus", gpus)
        plain = finetune.load(start, source, [], nproc="1", random_weights=random).config
        assert (plain.data.path, plain.batch.micro_size) == ("/cache/64", micro), "length of pretraining"


def test_an_evaluation_continues_only_with_at_least_as_many_seeds(tmp_path: Path) -> None:
    for then, now in ((2, 5), (2, 2), (5, 2)):
        before, plan = (
            glue.GluePlanFile(config_hash="abc", settings=results.plain(GlueOptions(seeds=n)), start={})
            for n in (then, now)
        )
        results.write(tmp_path / glue.STATE, before)
        output = Output(tmp_path, "evaluation", glue.STATE, plan, glue.MUST_MATCH, glue.MAY_INCREASE)
        assert (output.issues() == []) == (now >= then)
