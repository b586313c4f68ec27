"""Train image generators.

python train_gen.py fit                                                  # handwritten digits, nothing to download
python train_gen.py fit -c configs/gen/imagenet256.yaml -c configs/gen/models/dit_mhla_s_2.yaml
python train_gen.py fit -c runs/gen/digits/config.yaml --ckpt_path last  # continue an interrupted run
python train_gen.py validate -c runs/gen/digits/config.yaml --ckpt_path last
"""

from pathlib import Path

from headmix_vision.training.generation_cli import main

if __name__ == "__main__":
    main(default_config=Path(__file__).parent / "configs" / "gen" / "digits.yaml")
