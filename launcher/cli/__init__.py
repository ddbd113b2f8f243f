"""Define the command line: one function per verb, with the options as parameters. `app` registers them."""
