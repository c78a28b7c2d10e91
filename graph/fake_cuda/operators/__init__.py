"""Operators of CUDA builds: `native` says which have a kernel of their own; the others, what some kernels are made of.

`composed` has kernels that are written in other operators, `fft` and `least_squares` some of them, `rnn` those that
are cuDNN's, `sparse` those of sparse and nested tensors; `iterated` says how results of elementwise operators lie,
`fits` whether operands fit together.
"""
