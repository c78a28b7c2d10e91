"""Benchmarks of the replay: `python -m tests.benchmarks` (or `scripts/bench`); `--help` lists its parts."""
