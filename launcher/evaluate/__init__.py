"""Evaluate, finetune, distill and export pretrained runs."""

FILE = "glue.json"
