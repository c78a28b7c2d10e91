"""Torch memory snapshots as files: `unpickle` and `layout` read one as checked columns, `writer` writes one.

What the columns mean is the matter of `simulator.snapshots`.
"""
