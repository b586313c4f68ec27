"""Checks of the kernels on the device at hand: random cases of every op against float64."""
