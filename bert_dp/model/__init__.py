"""Define the models and load them. A task's `build_model` (bert_dp/tasks) builds the model that a run trains,
`make_model` in load.py that of a checkpoint's weights; ModelConfig in config/schema.py has the settings."""
