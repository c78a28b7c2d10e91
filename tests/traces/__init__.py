"""Tests of `traces`."""
