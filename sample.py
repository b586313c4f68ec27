"""Draw samples, images or videos, from trained generators.

python sample.py images --model runs/gen/digits --num 64 --classes balanced --guidance 1.5
python sample.py images --model exported/ --classes 0,3,7 --steps 25 --scheduler dpm++ --out out --npz
python sample.py videos --model runs/gen/moving_digits --num 40 --frames 16 --first-frame first.png
python sample.py videos --model runs/gen/moving_digits --frames 64 --extend clip.mp4
torchrun --nproc-per-node 8 -- sample.py images --model runs/gen/imagenet256-dit_mhla_s_2 --num 50000 --npz

The `--` keeps torchrun from taking `--num` for an abbreviation of an option of its own.
"""

from headmix_vision.cli.sample import main

if __name__ == "__main__":
    main()
