"""Two runs beside each other, and a run against a budget."""
