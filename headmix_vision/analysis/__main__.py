"""`python -m headmix_vision.analysis rank|entropy|maps|mixing|sweep ...`: see `headmix_vision.cli.analyze`."""

from headmix_vision.cli.analyze import main

if __name__ == "__main__":
    main()
