"""Define the verbs as functions whose parameters are the command line's options. `app` registers them."""
