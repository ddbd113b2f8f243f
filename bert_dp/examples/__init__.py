"""Read labelled texts from GLUE or the user's own data, and prepare them for finetuning. Torch-free."""
