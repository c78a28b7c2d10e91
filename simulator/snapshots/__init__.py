"""Torch memory snapshots above the allocator: the events that caused them, rebuilt and verified by a replay.

`reader.read` reads any file, a trace or a snapshot, and `reader.read_recording` a snapshot with what its replay has to
show; `verify` compares the two. On the way from a snapshot's columns (`traces.snapshot.layout`): `rules` (the settings
and the release), `rewind` (the state at the start, on an `address_map`), `survey` (what each call did), `guesses`
(sizes and ages that no entry names), `limits` (the device and the memory limit), `causes` (the events).
"""
