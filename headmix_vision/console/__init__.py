"""What command lines share: options, devices, processes and the progress of long jobs."""
