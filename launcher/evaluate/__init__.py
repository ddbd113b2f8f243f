"""What a pretrained run is worth: finetuning, GLUE, and the loss on any text."""
