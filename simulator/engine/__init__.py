"""The discrete-event replay of a trace through the allocator, and its result."""
