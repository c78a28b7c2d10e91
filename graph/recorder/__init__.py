"""Recording one run of a model: every operator and storage becomes a step graph."""
