"""The scheduler of the engine: which sequence computes what in the next step, and in which blocks.

Pure Python and a pure function of its calls: no torch, no input or output, no clock of its own.
"""
