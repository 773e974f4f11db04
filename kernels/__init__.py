"""Triton kernels and their PyTorch twins, installed as ``xmoe.kernels``. Importing this package imports neither."""
