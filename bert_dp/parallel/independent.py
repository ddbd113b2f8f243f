"""Run N copies of one process that exchange nothing: what the machine does when all its devices work, the
ceiling of every engine. They become N different models."""

from bert_dp.parallel.single import Engine

__all__ = ["Engine"]
