"""`python -m headmix_vision.evaluate METRIC --real X --fake Y`: see `headmix_vision.cli.evaluate`."""

from headmix_vision.cli.evaluate import main

if __name__ == "__main__":
    main()
