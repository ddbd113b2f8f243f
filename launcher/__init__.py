"""The controlling process. Never imports torch at module level."""
