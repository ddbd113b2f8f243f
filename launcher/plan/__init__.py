"""Plan budgets, sizes and scaling before anything is bought or started."""
