"""How close predictions come to recorded training runs: `python -m tests.accuracy`."""
