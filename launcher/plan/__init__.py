"""Plan budgets, model sizes and scaling before renting hardware or starting a run."""
