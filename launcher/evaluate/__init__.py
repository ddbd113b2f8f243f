"""Evaluate a pretrained run: finetuning, GLUE, and the loss on any text."""

FILE = "glue.json"
