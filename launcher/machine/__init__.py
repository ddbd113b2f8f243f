"""Facts about this machine, and checks of it."""
