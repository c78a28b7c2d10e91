"""Compiled code of others that a recorded program calls: each library's stand-in, and what puts them in place
(`stand_ins.launching_nothing`); Triton, installed or not.
"""
