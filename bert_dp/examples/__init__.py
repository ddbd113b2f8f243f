"""Read labelled texts, from GLUE or a user, and prepare them for finetuning. Torch-free."""
