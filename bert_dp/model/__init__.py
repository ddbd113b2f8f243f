"""Define and load models. A task's `build_model` (bert_dp/tasks) builds the model that a run trains;
`make_model` in load.py builds the model of a checkpoint. Settings: ModelConfig in config/schema.py."""
