"""`python -m headmix_vision.train_cls fit`: `headmix-train-cls`, see `headmix_vision.cli.train_cls`."""

from headmix_vision.cli.train_cls import main

if __name__ == "__main__":
    main()
