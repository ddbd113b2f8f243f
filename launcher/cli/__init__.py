"""Define the command line: a function per verb, its options in its signature. `app` registers them."""
