"""Train, validate, test and use image classifiers.

python train_cls.py fit                                                    # handwritten digits, nothing to download
python train_cls.py fit -c imagenet -c models/deit_small_mhla --data.root imagenet
python train_cls.py fit -c runs/digits/config.yaml --ckpt_path last        # continue an interrupted run
python train_cls.py validate -c runs/digits/config.yaml --ckpt_path best
python train_cls.py predict -c runs/digits/config.yaml --ckpt_path best --data.predict_path IMAGE_OR_FOLDER
"""

from headmix_vision.commands import train_cls

if __name__ == "__main__":
    train_cls()
