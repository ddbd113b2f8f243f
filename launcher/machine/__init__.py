"""What this machine is and whether a run would work here."""
