"""`python -m headmix_vision.distill fit --model.teacher RUN --model.name NAME`: see `training.distillation`."""

from headmix_vision.cli.distill import main

if __name__ == "__main__":
    main()
