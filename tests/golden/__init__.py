"""What every verb says of fixed inputs, as the code of commit bd72a94 said it.

`made/` holds directories that that code wrote, `expected/` what its verbs make of them. `python -m
tests.golden check` compares, `record SECTION` writes one section of `expected/` anew. `make` writes `made/`
anew, which is almost never right: it is there so that later code is seen to go on with what that code began.
"""
