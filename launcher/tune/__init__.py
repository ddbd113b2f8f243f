"""`bert-dp tune`: the per-GPU batch and the learning rate, from real short runs."""

FILE = "tune.json"
