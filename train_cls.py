"""Train, validate, test and use image classifiers.

python train_cls.py fit                                                    # handwritten digits, nothing to download
python train_cls.py fit -c imagenet --data.root imagenet
python train_cls.py fit --run-dir runs/digits --ckpt-path last             # continue an interrupted run
python train_cls.py validate --run-dir runs/digits
python train_cls.py predict --run-dir runs/digits --data.predict_path IMAGE_OR_FOLDER
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C during the imports, which take seconds

    from headmix_vision.cli.train_cls import main

    main()
