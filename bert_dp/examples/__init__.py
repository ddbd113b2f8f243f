"""Read labelled texts of GLUE or of a user and prepare them for finetuning. Torch-free."""
