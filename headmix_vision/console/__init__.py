"""What command lines share: options, devices, processes, the progress of long jobs, commands they start, tables."""
