"""Laboratory of headmix_vision: training sweeps (`headmix analyze sweep`) and the builder of the emoji data set."""
