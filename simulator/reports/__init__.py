"""Results for people: the terminal, Markdown, JSON and files."""
