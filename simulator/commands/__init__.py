"""The commands: each parses its options, calls one Python function and hands the result to a reporter."""
