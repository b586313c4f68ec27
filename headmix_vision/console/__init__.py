"""Parts that command lines share: what a terminal sees of them, their processes and devices."""
