"""Train image generators.

python train_gen.py fit                                                  # handwritten digits, nothing to download
python train_gen.py fit -c imagenet256
python train_gen.py fit --run-dir runs/gen/digits --ckpt-path last       # continue an interrupted run
python train_gen.py validate --run-dir runs/gen/digits
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C during the imports, which take seconds

    from headmix_vision.cli.train_gen import main

    main()
