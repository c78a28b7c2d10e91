"""Where people are: pytest, notebooks, AI assistants. Each is imported by what it serves, and runs the command line."""
