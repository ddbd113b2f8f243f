"""Define the verbs as functions. Their parameters become command-line options. `app` registers them."""
