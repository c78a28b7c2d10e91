"""The repository itself: its README, packages and imports."""
