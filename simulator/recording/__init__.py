"""Runs a program unmodified on a GPU that is not there, and records what its allocator did.

`allocator` serves each allocation as it happens, `message` has PyTorch's words for one that fails. `process` is the
fresh process in which the program runs (`python -m simulator.recording`), `launch` starts it and reads what it leaves,
`trace` makes a trace of that, `result` what `--json` says.
"""
