"""Out-of-memory messages and snapshots explained: what failed, the arithmetic behind it, and what to try first."""
