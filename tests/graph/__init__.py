"""Tests of `graph`."""
