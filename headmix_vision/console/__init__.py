"""What command lines share: options, devices and the progress of long jobs."""
