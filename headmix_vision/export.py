"""`python -m headmix_vision.export RUN --out TARGET`: see `headmix_vision.runs.exporting`."""

from headmix_vision.cli.export import main

if __name__ == "__main__":
    main()
