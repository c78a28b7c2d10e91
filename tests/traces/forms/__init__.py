"""Tests of `traces.forms`."""
