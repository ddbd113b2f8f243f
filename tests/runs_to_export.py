"""Write untrained runs in which no parameter has its initial value, and make their transformers models."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bert_dp import files
from bert_dp.config import Config, Kind, read_yaml, resolve
from bert_dp.data import tokenizer
from bert_dp.exporting.hf import settings_of, tensors_of
from bert_dp.model.bert import CrammedBert
from bert_dp.model.classifier import Classifier
from bert_dp.model.load import make_model
from bert_dp.training import checkpoint
from tests.helpers import CONFIGS
from tests.states import FACTS

SPECIAL = {"pad": 0, "unk": 3, "cls": 4, "sep": 5, "mask": 6}
WORDS = (
    "the crew of an old ship sailed past seven grey islands while rain fell on every quiet harbour".split()
)
VOCABULARY = 300
LABELS: dict[str, Any] = {"kind": "single_label", "labels": ["sea", "land", "sky"]}


def config_of(name: str, **sections: Any) -> Config:
    """Return a shipped configuration with its own widths, two layers and a small vocabulary."""
    small = {"model": {"num_layers": 2, "vocab_size": VOCABULARY}}
    return resolve([read_yaml(CONFIGS / f"{name}.yaml"), {"run": {"init_from": None}}, small, sections])


def tiny_config() -> Config:
    """Return a configuration with the model of tests.e2e.cli.TINY and the vocabulary of `write_run`."""
    sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    return config_of("quickstart", model=sizes, data={"sequence_length": 16})


def finetuned(config: Config, head: str, **finetune: Any) -> Config:
    """Return the configuration of a classifier that starts from a run of `config`."""
    more = {
        "data": {"path": "examples", "sources": None},
        "objective": {"name": "finetune"},
        "finetune": {**LABELS, "head": head, **finetune},
        "batch": {"ramp_fraction": 0.0, "ramp_quantum": None},
        "schedule": {"hours": None, "tokens": None, "steps": 9},
    }
    return resolve([config.model_dump(mode="json"), more])


def perturbed(config: Config, seed: int = 0) -> CrammedBert | Classifier:
    """Return a model whose outputs depend on each of its parameters."""
    model = make_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            spread = 0.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def padded_batch(length: int, vocabulary: int, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and token types (0 or 1) of three sequences, two of which are padded."""
    ids_BS = torch.randint(7, vocabulary, (3, length), generator=torch.Generator().manual_seed(1))
    mask_BS = (torch.arange(length) < torch.tensor([[length], [2 * length // 3], [1]])).long()
    return ids_BS * mask_BS + pad * (1 - mask_BS), mask_BS, ids_BS % 2


def write_run(path: Path, config: Config, *, step: int = 3) -> Path:
    """Write a run with a checkpoint of the perturbed model, whose weights at step 0 are different."""
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    texts = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 12)) for i in range(1, 40)]
    words = tokenizer.train(texts, model="wordpiece", vocab_size=200, with_normalizer=True)
    words.save(str(path / files.TOKENIZER))
    model = perturbed(config, seed=int(step == 0)).state_dict()
    optimizer = {f"{name}/step": torch.tensor(1.0) for name in model} if step else {}
    state = {"model": model, "optimizer": optimizer, "scaler": {}}
    facts = {**FACTS, "samples": 24, "config": config.model_dump(mode="json")}
    checkpoint.save_checkpoint(path / "checkpoints", step, state, facts, keep=2)
    return path


def peer_of(model: CrammedBert | Classifier, config: Config, kind: Kind, **more: Any) -> nn.Module:
    """Make the transformers model to which `model` is exported, with its weights, in memory."""
    import transformers

    settings = {**settings_of(config, SPECIAL, kind), **more}
    (name,) = settings.pop("architectures")
    del settings["dtype"]
    peer: nn.Module = getattr(transformers, name)(transformers.AutoConfig.for_model(**settings))
    missing, unexpected = peer.load_state_dict(tensors_of(model, config, SPECIAL, kind), strict=False)
    assert not unexpected
    assert {name.rpartition("decoder.")[2] for name in missing} <= {"weight", "bias"}, missing  # tied decoder
    for module in peer.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # bert-dp trains the embedding of padding like any other
    return peer.eval()
