"""Tests of `simulator.estimator`."""
