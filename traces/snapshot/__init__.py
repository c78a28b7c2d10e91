"""Torch memory snapshots: their pickles read without running code, and written."""
