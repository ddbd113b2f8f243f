"""Run one rank: `python -m bert_dp.worker CONFIG --run-dir DIR`."""

from bert_dp.training.rank import run_process

if __name__ == "__main__":
    run_process()
