"""Runs a program unmodified on a GPU that is not there, and records what its allocator did.

`allocator` serves each allocation as it happens, `message` has PyTorch's words for one that fails. `process` is the
fresh process in which the program runs (`python -m simulator.recording`), `launch` starts it and reads what it leaves,
`repeats` says when a program's steps repeat, `cycles` what Python's collector freed. `trace` makes a trace of what was
left, `result` what `--json` says.
"""
