"""Run N copies of one process without communication: this measures the machine with all devices busy, the
upper limit for every engine. The copies train N different models."""

from bert_dp.parallel.single import Engine

__all__ = ["Engine"]
