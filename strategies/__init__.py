"""Strategies: how a step graph becomes the memory events of every rank, one module for each way to train.

Nothing is here yet. To come: one GPU, data parallelism, ZeRO and FSDP, tensor and pipeline parallelism, offloading.
This package imports `graph` and `traces`, and never the simulator.
"""
