"""What a run is worth after training: the work in `python -m bert_dp...`, what it found as a Report."""
