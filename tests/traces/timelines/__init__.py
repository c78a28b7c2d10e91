"""Tests of `traces.timelines`."""
