"""Define the command line: one function per verb, whose parameters are the options. `app` registers verbs."""
