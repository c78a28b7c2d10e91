"""Durations: kernels by a roofline, collectives by their links, the host's launches."""
