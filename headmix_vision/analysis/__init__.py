"""Pictures and numbers of what trained networks have learned, from the command line: `headmix-analyze`."""
