"""What a run is worth after training: finetuned runs and their scores, and the loss on any text."""

FILE = "glue.json"
