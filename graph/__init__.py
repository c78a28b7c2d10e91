"""Step graphs: one training or inference step of a model as a graph of operations and the tensors they hold.

Nothing is here yet. To come: model sources, the capture of a step without a GPU, and analyses of the graph (what is
alive where, the peak of a perfect allocator). This package imports `traces` alone, and never the simulator.
"""
