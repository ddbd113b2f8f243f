"""Define the verbs as functions, which `app` registers. Their parameters become arguments and options."""
