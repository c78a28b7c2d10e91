"""Tests of `strategies.megatron`."""
