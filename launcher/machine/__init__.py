"""Read facts about this machine and check it for problems."""
