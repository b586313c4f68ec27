"""Kernels of short sequences for Hopper GPUs, in Gluon."""
