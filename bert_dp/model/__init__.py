"""Define the models and load them.

`build_model` of a task (bert_dp/tasks) builds the model that a run trains, with its initial weights;
`make_model` in load.py builds it for a checkpoint's weights. ModelConfig in config/schema.py has the
settings.
"""
