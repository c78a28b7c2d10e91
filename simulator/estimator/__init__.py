"""From a case to an answer, for one or many: estimate, sweep, what lies outside the allocator."""
