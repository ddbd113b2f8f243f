"""The numbers of ten fixed reports, recorded in told.json.

`python -m tests.golden check` names each number that changed; `record` writes them anew.
"""
