"""Programs that measure one rank, or what ranks share; each prints JSON lines for the launcher."""
