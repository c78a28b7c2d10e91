"""Torch memory snapshots above the allocator: verified by a replay."""
