"""The numbers of fixed reports, recorded in told.json.

`python -m tests.golden check` shows each line that changed; `record` writes them anew.
"""
