"""For every test."""

from hypothesis import settings

settings.register_profile("no timing decides a test", deadline=None)
settings.load_profile("no timing decides a test")
