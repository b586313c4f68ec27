"""Train, validate, test and use image classifiers.

python train_cls.py fit                                                    # handwritten digits, nothing to download
python train_cls.py fit -c configs/cls/imagenet.yaml -c configs/cls/models/deit_small_mhla.yaml --data.root imagenet
python train_cls.py fit -c runs/digits/config.yaml --ckpt_path last        # continue an interrupted run
python train_cls.py validate -c runs/digits/config.yaml --ckpt_path best
python train_cls.py predict -c runs/digits/config.yaml --ckpt_path best --data.predict_path IMAGE_OR_FOLDER
"""

from pathlib import Path

from headmix_vision.training.classification_cli import main

if __name__ == "__main__":
    main(default_config=Path(__file__).parent / "configs" / "cls" / "digits.yaml")
