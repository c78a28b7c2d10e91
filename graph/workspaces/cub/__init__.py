"""Operators whose kernels call CUB: sorts, scans, selections, and what is made of them; and what CUB asks for itself.

`temporary` says how large CUB's temporary storage is; the other modules are rules, each of a family of operators.
"""
