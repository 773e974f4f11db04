"""Autograd operators: forward and backward of each kernel tied together. Nothing here knows a layer."""
