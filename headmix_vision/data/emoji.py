"""Earlier name of `headmix_lab.emoji`; `python -m headmix_vision.data.emoji` still builds the data set."""

from headmix_lab.emoji import build, main

__all__ = ["build", "main"]

if __name__ == "__main__":
    main()
