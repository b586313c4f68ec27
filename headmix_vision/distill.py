"""`python -m headmix_vision.distill fit --model.teacher RUN --model.name NAME`: see `training.distillation`."""

from headmix_vision.commands import distill as main

if __name__ == "__main__":
    main()
