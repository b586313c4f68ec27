"""Puts small mistakes into a copy of the package, one by one, and says which test notices each.

python tests/slips.py                       # the known ones, some minutes
python tests/slips.py sampling              # those whose behaviour or file holds this word
python tests/slip_reach.py runs/reach       # record which tests run which lines, some twenty minutes
python tests/slips.py --draw 60 --seed 1    # mistakes that are drawn, an hour

What is never drawn, since a mistake there changes no result, is listed in `slip_drawing.py`. On a busy machine give
tests more time by ``--limit``: a run that ends at its limit has noticed nothing.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from slip_drawing import draw
from slip_reach import Reach
from slip_runs import ROOT, Copy, Verdict


class Slip(NamedTuple):
    """A mistake: in `file` of the package `old` becomes `new`; `tests` should fail then."""

    behaviour: str
    file: str
    old: str
    new: str
    tests: str


EPOCHS, STEPS = "tests/data/test_epochs.py tests/data/test_batches.py", "tests/training/test_steps.py"
OBJECTIVES = "tests/diffusion/test_objectives.py"
PIPELINE = "tests/diffusion/test_pipeline.py -k noise_levels or know_its or clipped"
GAUSSIAN = "tests/diffusion/test_gaussian.py -k may_predict_v or may_be_shifted or every_number"
DIT = "tests/models/test_dit.py -k dropout or initial or decayed or checkpointing_computes or unpickled"
ZOO, CONVERT = "tests/models/test_zoo.py -k position or dropout or contiguous", "tests/models/test_convert.py"
LAYER, CROP = "tests/layers/test_attention.py -k autocast", "tests/data/test_datasets.py -k adms or centre"
SCORES = "tests/evaluation/test_scores.py -k without_options or antialiasing"
RUNS, SAMPLING = "tests/runs/test_runs.py -k as_it_was_trained", "tests/sampling/test_sample.py -k another_seed"
ATOMIC = "tests/test_atomic.py"
IHA, MEA = "tests/layers/test_interleaved_heads.py", "tests/layers/test_explicit_heads.py"
CONV, CONV_OP = "tests/layers/test_convolutions.py", "tests/ops/test_grid_conv.py -k gradients"
CONV_KERNELS = "tests/ops/test_grid_conv_triton.py -k channels"
WINDOW, DEPTH = "tests/ops/test_token_window.py", "tests/models/test_depth.py"
MIX_NAMES = "tests/models/test_zoo.py -k names or published or decay"
SPREAD = "tests/training/test_context_parallel.py -k as_one"
PROCESSES, FIT = "tests/training/test_processes.py -k one_rank", "tests/training/test_fit.py -k seed"

FID = "tests/training/test_sample_fid.py -k average or grids or fit"
NEAREST = "tests/sampling/test_sample.py tests/sampling/test_videos.py -k nearest"
MIRRORED, WAN = "tests/data/test_latents.py -k mirrored", "tests/models/test_convert_wan.py -k dense"
HALF = "tests/models/test_convert_wan.py tests/models/test_convert_sana.py -k float16"
TIMES, TURN = "tests/diffusion/test_gaussian.py -k lead_from", "tests/models/test_video_dit.py -k prefix_tokens"
RATES = "tests/sampling/test_videos.py -k slow or nearly"
MASKS = "tests/layers/test_masks.py -k alone or axes or without_tokens"
LISTING, PIXELS = "tests/test_folder_listing.py", "tests/test_decoding.py"
FILMS, LABELS = "tests/test_video_files.py", "tests/test_labels.py"

SLIPS = [
    # data
    Slip("order differs by epoch", "data/batches.py", "derive_seed(self.seed, epoch)", "self.seed", EPOCHS),
    Slip(
        "order follows the position of the run",
        "data/data_module.py",
        "first_batch=self._batches_trained",
        "first_batch=lambda: 0",
        EPOCHS,
    ),
    Slip(
        "an epoch holds each image once",
        "data/batches.py",
        "torch.randperm(self.num_samples, generator",
        "torch.randint(self.num_samples, (self.num_samples,), generator",
        EPOCHS,
    ),
    Slip("an epoch holds each image once", "data/batches.py", "step % len(self) *", "step % 2 *", EPOCHS),
    Slip("latents differ by epoch", "data/batches.py", "draw=key.epoch", "draw=0", EPOCHS),
    Slip("latents differ by epoch", "data/datasets/latents.py", "self.seed, draw, index", "self.seed, index", EPOCHS),
    Slip("latents differ by image", "data/datasets/latents.py", "self.seed, draw, index", "self.seed, draw", EPOCHS),
    Slip(
        "validation is never flipped",
        "data/generation.py",
        '"""Crop and scale to [-1, 1]."""\n        return ImageToRange(self._shape[1:])',
        "return ImageToRange(self._shape[1:], self.hflip)",
        EPOCHS,
    ),
    Slip("training is flipped", "data/generation.py", "self._shape[1:], self.hflip)", "self._shape[1:])", EPOCHS),
    Slip(
        "shifts on both axes",
        "data/augmentation.py",
        "(augmentation.translate, augmentation.translate)",
        "(augmentation.translate, 0.0)",
        EPOCHS,
    ),
    Slip(
        "shifts on both axes",
        "data/augmentation.py",
        "(augmentation.translate, augmentation.translate)",
        "(0.0, augmentation.translate)",
        EPOCHS,
    ),
    Slip("crop of large pictures", "data/fitting.py", "Resampling.BOX", "Resampling.BICUBIC", CROP),
    Slip("crop of large pictures", "data/fitting.py", "image.width >= 2", "image.width > 2", CROP),
    Slip("crop of large pictures", "data/fitting.py", " and image.height >= 2 * height", "", CROP),
    Slip("crop of large pictures", "data/fitting.py", "while image.width", "if image.width", CROP),
    Slip("crop of portraits", "data/fitting.py", "max(width /", "min(width /", CROP),
    Slip("crop of portraits", "data/fitting.py", "(image.height - height) // 2", "0", CROP),
    Slip("crop of landscapes", "data/fitting.py", "(image.width - width) // 2", "0", CROP),
    Slip("antialiasing of pixels", "data/fitting.py", 'antialias=mode == "bilinear"', "antialias=False", EPOCHS),
    Slip("hard pixels", "data/fitting.py", '"nearest" if multiple else "bilinear"', '"bilinear"', EPOCHS),
    # files
    Slip("companions of macOS", "files/pictures.py", 'name.startswith(".")', 'name.startswith("..")', LISTING),
    Slip("loops of links", "files/pictures.py", "if inner.place in around:", "if inner.place in around[:1]:", LISTING),
    Slip(
        "photos are upright",
        "files/pictures.py",
        "6: Image.Transpose.ROTATE_270",
        "6: Image.Transpose.ROTATE_90",
        PIXELS,
    ),
    Slip("hidden colours", "files/pictures.py", "if image.has_transparency_data:", "if False:", PIXELS),
    Slip("upper bits", "files/pictures.py", "pixels >> 8", "pixels & 255", PIXELS),
    Slip(
        "display matrix", "files/video.py", "pixels[:: down[1], :: right[0]]", "pixels[:: right[0], :: down[1]]", FILMS
    ),
    Slip("times of frames", "data/clip_frames.py", "if times is not None:", "if times is None:", FILMS),
    Slip("labels below 0", "data/labels.py", "if label < 0:", "if label < -1:", LABELS),
    Slip("missing labels", "data/labels.py", '"", "None"', '"None"', LABELS),
    # steps of training
    Slip(
        "random numbers depend on the epoch",
        "training/base_module.py",
        "self.current_epoch, batch_idx",
        "batch_idx",
        STEPS,
    ),
    Slip(
        "random numbers depend on the rank",
        "training/base_module.py",
        "self.global_rank // self.sharers, stream",
        "stream",
        STEPS,
    ),
    Slip(
        "sharers draw alike", "training/base_module.py", "sharers, stream", "sharers + self.global_rank, stream", SPREAD
    ),
    Slip(
        "sharers have the same batches",
        "data/data_module.py",
        "trainer.global_rank // sharers",
        "trainer.global_rank",
        SPREAD,
    ),
    Slip("gradients under context parallelism", "training/generator.py", "loss * self.sharers if", "loss if", SPREAD),
    Slip(
        "random numbers depend on the batch", "training/base_module.py", "epoch, batch_idx, self", "epoch, self", STEPS
    ),
    Slip(
        "random numbers depend on the seed",
        "training/base_module.py",
        "self.seed, self.current",
        "0, self.current",
        STEPS,
    ),
    Slip(
        "sums of the loss survive two ranks once",
        "training/base_module.py",
        "saved.sum(0) if rank == 0 else torch.zeros_like(saved[0])",
        "saved.sum(0)",
        STEPS,
    ),
    Slip(
        "sums of the loss survive two ranks once",
        "training/base_module.py",
        '["train_loss"] = self.sums_of_processes(self.train_loss)',
        '["train_loss"] = self.train_loss',
        STEPS,
    ),
    Slip(
        "sums by level survive two ranks once",
        "training/generator.py",
        'self.own_sums(checkpoint["level_loss"].view(-1, LEVELS, 2))',
        'checkpoint["level_loss"][0]',
        STEPS,
    ),
    Slip(
        "warm-up counts shorter accumulations",
        "training/base_module.py",
        "math.ceil(batches / trainer.accumulate_grad_batches)",
        "batches // trainer.accumulate_grad_batches",
        "tests/training/test_fit.py -k warmup",
    ),
    Slip("layer_decay reaches the optimizer", "training/base_module.py", "layer_decay=config.layer_decay,", "", STEPS),
    Slip("arguments reach the optimizer", "training/base_module.py", "**config.args,", "", STEPS),
    Slip("ragged validation", "training/classifier.py", ", weight=len(targets)", "", STEPS),
    Slip("ragged validation", "training/generator.py", ", weight=len(x0)", "", STEPS),
    Slip("validation noise by batch", "training/generator.py", "self.seed, batch_idx, self", "self.seed, self", STEPS),
    Slip("validation noise by rank", "training/generator.py", "self.global_rank, _VALIDATION", "_VALIDATION", STEPS),
    Slip(
        "predictions with BCE",
        "training/classifier.py",
        'logits.sigmoid() if self.loss_config.kind == "bce" else logits.softmax(-1)',
        "logits.softmax(-1)",
        STEPS,
    ),
    Slip("target threshold", "training/classifier.py", ", config.bce_target_threshold", "", STEPS),
    Slip("smoothing with mixup", "training/classifier.py", "label_smoothing=loss.smoothing,", "", STEPS),
    Slip("smoothing with BCE", "training/classifier.py", "Entropy(config.smoothing, c", "Entropy(0.0, c", STEPS),
    Slip(
        "the average is float32",
        "training/callbacks/ema.py",
        ".to(pl_module.device, pl_module.dtype)",
        ".to(pl_module.device, torch.bfloat16)",
        STEPS,
    ),
    Slip(
        "seed_everything reaches the data",
        "training/base_cli.py",
        'parser.link_arguments("seed_everything", "data.seed")',
        "pass",
        FIT,
    ),
    Slip(
        "seed_everything reaches the model",
        "training/base_cli.py",
        'parser.link_arguments("seed_everything", "model.seed")',
        "pass",
        FIT,
    ),
    Slip(
        "one rank's interrupt stops all",
        "training/callbacks/checkpointing.py",
        "read(sum_of_processes(trainer, asked))",
        "read(asked)",
        PROCESSES,
    ),
    Slip(
        "torchrun passes on what a process has got",
        "training/signals.py",
        "if not launched:",
        "if True:",
        "tests/training/test_resume.py -k second_signal",
    ),
    # diffusion
    Slip("shift reaches Euler", "diffusion/denoising.py", "shift=objective.shift)", "shift=1.0)", PIPELINE),
    Slip(
        "shift reaches DPM++", "diffusion/denoising.py", '"flow_shift": objective.shift', '"flow_shift": 1.0', PIPELINE
    ),
    Slip("betas reach the sampler", "diffusion/denoising.py", ": objective.beta_start", ": 1e-4", PIPELINE),
    Slip("betas reach the sampler", "diffusion/denoising.py", ": objective.beta_end", ": 0.02", PIPELINE),
    Slip("v-prediction", "diffusion/denoising.py", '"v_prediction" if objective.prediction == "v" else ', "", PIPELINE),
    Slip("clipping of pixels", "diffusion/denoising.py", '["clip_sample"] = clip', '["clip_sample"] = False', PIPELINE),
    Slip("clipping of pixels alone", "diffusion/pipeline.py", "clip=self.vae is None", "clip=True", PIPELINE),
    Slip("clipping of pixels", "diffusion/pipeline.py", "clip=self.vae is None", "clip=False", PIPELINE),
    Slip("clipping of a run's pixels", "runs/pipelines.py", "objective, clip=", "objective, clip=False and ", RUNS),
    Slip(
        "a run's objective",
        "runs/pipelines.py",
        "create_scheduler(None, objective",
        "create_scheduler(None, ObjectiveConfig(kind=objective.kind)",
        RUNS,
    ),
    Slip("DDIM steps to the next time", "diffusion/denoising.py", "if isinstance(scheduler, _DDIM)", "if 0", GAUSSIAN),
    Slip("no time below 0", "diffusion/denoising.py", ".round()[:num_steps]", ".round()", GAUSSIAN),
    Slip("equal first times", "diffusion/denoising.py", "scheduler.set_begin_index(0)", "pass", GAUSSIAN),
    Slip("Heun shifts once", "diffusion/denoising.py", "scheduler.sigma_min = 1 / NUM_TIMESTEPS", "pass", GAUSSIAN),
    Slip("first step of the bound", "diffusion/objectives.py", "posterior[0] = posterior[1]", "pass", OBJECTIVES),
    Slip(
        "first step of the bound",
        "diffusion/objectives.py",
        "steps == 0, -likelihood",
        "steps == 0, likelihood",
        OBJECTIVES,
    ),
    Slip(
        "first step of the bound",
        "diffusion/objectives.py",
        "torch.where(steps == 0",
        "torch.where(steps < 0",
        OBJECTIVES,
    ),
    Slip(
        "first step of the bound",
        "diffusion/objectives.py",
        "mean, 0.5 * log_variance",
        "mean, log_variance",
        OBJECTIVES,
    ),
    Slip(
        "first step of the bound", "diffusion/objectives.py", "x < -0.999, log_below", "x < -9, log_below", OBJECTIVES
    ),
    Slip("--seed matters", "sampling/planning.py", "derive_seed(self.seed, index)", "derive_seed(0, index)", SAMPLING),
    # models
    Slip(
        "label dropout",
        "models/dit_blocks.py",
        "device=y.device) < self.dropout",
        "device=y.device) > self.dropout",
        DIT,
    ),
    Slip("initial scale of times and labels", "models/dit_blocks.py", "parameter, std=0.02", "parameter, std=0.2", DIT),
    Slip("initial scale of times and labels", "models/dit_blocks.py", "table.weight, std=0.02", "table.weight", DIT),
    Slip("initial scale of patches", "models/headmix_dit.py", "proj.weight.flatten(1))", "proj.weight)", DIT),
    Slip(
        "initial scale of times and labels", "models/headmix_dit.py", "self.t_embedder.reset_parameters()", "pass", DIT
    ),
    Slip(
        "initial scale of times and labels", "models/headmix_dit.py", "self.y_embedder.reset_parameters()", "pass", DIT
    ),
    Slip("mixing is not decayed", "models/headmix_dit.py", " | undecayed_parameters(self)", "", DIT),
    Slip("labels are not decayed", "models/headmix_dit.py", '{"y_embedder.embedding_table.weight"}', "set()", DIT),
    Slip("weights only", "files/tensors.py", "weights_only=True", "weights_only=False", DIT),
    Slip(
        "gradient checkpointing",
        "models/headmix_dit.py",
        "if torch.is_grad_enabled() and self.gradient_checkpointing",
        "if False",
        DIT,
    ),
    Slip(
        "prefix positions in conversion",
        "models/convert.py",
        "stored[:, first : first + count] if prefix",
        "stored[:, :count] if prefix",
        CONVERT,
    ),
    Slip("prefix positions in conversion", "models/convert.py", "(stored[:, prefix:]", "(stored[:, 1:]", CONVERT),
    Slip("no_embed_class in conversion", "models/convert.py", "if not model.no_embed_class:", "if True:", CONVERT),
    Slip("no_embed_class in conversion", "models/convert.py", "in (tokens, 0):", "in (tokens,):", CONVERT),
    Slip("tokens are contiguous", "models/headmix_vit.py", "_pos_embed(x).contiguous()", "_pos_embed(x)", ZOO),
    Slip(
        "no_embed_class in resizing",
        "models/headmix_vit.py",
        "0 if self.no_embed_class else ",
        "",
        ZOO,
    ),
    Slip(
        "prefix positions in resizing",
        "models/headmix_vit.py",
        "0 if self.no_embed_class else self.num_prefix_tokens",
        "0",
        ZOO,
    ),
    Slip(
        "no attention dropout in evaluation",
        "layers/cores/softmax.py",
        "self.attn_drop if self.training else 0.0",
        "self.attn_drop",
        ZOO,
    ),
    Slip(
        "attention dropout in training",
        "layers/cores/softmax.py",
        "self.attn_drop if self.training else 0.0",
        "0.0",
        ZOO,
    ),
    # padding
    Slip(
        "padding writes to no memory",
        "layers/cores/head_in_head.py",
        "y.masked_fill(~key_mask[..., None], 0) for y in (beta, log_decay)",
        "y for y in (beta, log_decay)",
        MASKS,
    ),
    Slip(
        "the eps of features leaves padding out",
        "layers/cores/mhla.py",
        "(y.masked_fill(padding, 0) for y in (q, k, v, ones))",
        "(q, k, v, ones)",
        MASKS,
    ),
    Slip("padding divides by no zero", "layers/cores/mhla.py", "sums.masked_fill(padding, 1)", "sums", MASKS),
    Slip(
        "padding between convolutions",
        "layers/convolutions.py",
        "clips = clips.masked_fill(~key_mask[:, first:, None], 0)",
        "pass",
        MASKS,
    ),
    Slip(
        "padding by the blocks of each sample",
        "ops/sample_grids.py",
        "sizes = self.sizes.maximum(counts)",
        "sizes = self.sizes.amax(0, keepdim=True).maximum(counts)",
        MASKS,
    ),
    Slip(
        "columns of samples with padding",
        "ops/sample_grids.py",
        '[:: 1 if order == "row_major" else -1]',
        "",
        MASKS,
    ),
    # head mixes
    Slip(
        "pseudo-heads are the paper's",
        "layers/head_mixes/interleaved.py",
        "self.mix.flatten",
        "self.mix.mT.flatten",
        IHA,
    ),
    Slip(
        "interleaved heads start as their core",
        "layers/head_mixes/interleaved.py",
        "(queries, values) if self.averages_places",
        "(queries, values, keys) if self.averages_places",
        IHA,
    ),
    Slip("pseudo-heads part", "layers/head_mixes/interleaved.py", "perturbed.mean(0) if", "perturbed if", IHA),
    Slip("a mix is not decayed", "layers/head_mixes/interleaved.py", '("mix", "collapse")', '("mix",)', MIX_NAMES),
    Slip("grouped queries", "layers/head_mixes/explicit.py", "components // composed", "components % composed", MEA),
    Slip(
        "grouped queries",
        "layers/head_mixes/explicit.py",
        "self.mix.repeat_interleave(self.queries_per_head, 1)",
        "self.mix.repeat(1, self.queries_per_head, 1)",
        MEA,
    ),
    Slip("hooks of a projection act", "layers/convolutions.py", " and not any(hooks)", "", MEA),
    Slip("hooks of a convolution act", "layers/convolutions.py", "if _is_plain(conv)", "if True", CONV),
    Slip("input gradients flip the kernel", "ops/grid_conv/triton_op.py", "flip=True", "flip=False", CONV_KERNELS),
    Slip("weight gradients of clips", "ops/grid_conv/torch_impl.py", "max(0, -shift)", "max(0, shift)", CONV_OP),
    Slip(
        "places weigh as one token",
        "layers/cores/mhla.py",
        'options["normalizer"] == "paper"',
        'options["normalizer"] is not None',
        IHA,
    ),
    Slip(
        "one decay for a token",
        "layers/cores/head_in_head.py",
        "F.pad(log_decay.unsqueeze(2), (0, 0, 0, grid.repeats - 1)).flatten(1, 2)",
        "log_decay.repeat_interleave(grid.repeats, 1)",
        IHA,
    ),
    Slip(
        "shares are from 0 to 1",
        "layers/cores/head_in_head.py",
        "clip_keep_inward_gradient(self.shares, 0.0, 1.0)",
        "self.shares",
        IHA,
    ),
    Slip(
        "places are read first to last",
        "ops/token_scan.py",
        "scan.grid.repeats + each)",
        "scan.grid.repeats + (each.flip(0) if scan.reverse else each))",
        "tests/ops/test_token_blocks.py -k scans",
    ),
    Slip(
        "full tiles",
        "ops/mhla/triton_pairwise.py",
        ' and t.num_places % c["BK"] == 0',
        "",
        "tests/ops/test_mhla_triton.py -k beyond",
    ),
    Slip(
        "alignment of output gradients",
        "ops/mix_heads/triton_kernels.py",
        "alignment(*inputs, *d_outs)",
        "alignment(*inputs)",
        "tests/ops/test_mix_heads_triton.py -k strides",
    ),
    Slip("extent of a window", "ops/token_window.py", "<= extent // 2", "<= extent", WINDOW),
    Slip(
        "prefix tokens see all",
        "ops/token_window.py",
        "0, prefix, 0), value=True",
        "0, prefix, 0), value=False",
        WINDOW,
    ),
    Slip("pairs of a window", "ops/token_window.py", "half * (half + 1)", "half * half", WINDOW),
    Slip(
        "a window fits the grid",
        "layers/cores/softmax.py",
        "            TokenWindow(grid, self.window)\n",
        "            pass\n",
        DEPTH,
    ),
    Slip(
        "the last of each k layers is plain",
        "layers/attention.py",
        "(index + 1) % global_every",
        "index % global_every",
        DEPTH,
    ),
    Slip("plain layers have no window", "layers/attention.py", ' if name != "window"', "", DEPTH),
    Slip(
        "a mix alone is over softmax", "models/names.py", 'named[f"softmax_{mix}"]', 'named[f"mhla_{mix}"]', MIX_NAMES
    ),
    Slip(
        "published accuracies are of plain models",
        "models/headmix_vit.py",
        " and head_mix is None else None",
        " else None",
        MIX_NAMES,
    ),
    Slip("float32 under autocast", "ops/numerics.py", "enabled=False", "enabled=True", LAYER),
    Slip("float32 under autocast", "ops/numerics.py", "torch.promote_types(dtype, torch.float32)", "dtype", LAYER),
    # scores and files
    Slip(
        "size of KID's subsets",
        "evaluation/score_request.py",
        "KID_SUBSET_SIZE = 100, 1000",
        "KID_SUBSET_SIZE = 100, 100",
        SCORES,
    ),
    Slip(
        "number of KID's subsets",
        "evaluation/score_request.py",
        "KID_SUBSET_SIZE = 100, 1000",
        "KID_SUBSET_SIZE = 10, 1000",
        SCORES,
    ),
    Slip(
        "KID's size is used",
        "evaluation/scores.py",
        '"kid_subset_size": subset_size, "rng',
        '"kid_subset_size": 50, "rng',
        SCORES,
    ),
    Slip("parts of the inception score", "evaluation/score_request.py", "SPLITS = 10", "SPLITS = 1", SCORES),
    Slip("parts of the inception score", "evaluation/scores.py", '"logits"), splits,', '"logits"), 1,', SCORES),
    Slip("antialiasing of features", "evaluation/extractors.py", ", antialias=True", "", SCORES),
    Slip("an interrupted write", "files/writing.py", "yield temporary\n", "yield target\n", ATOMIC),
    Slip("an interrupted write", "files/writing.py", "temporary.unlink(missing_ok=True)", "pass", ATOMIC),
    # kinds of mistakes that went unnoticed once
    Slip("val/fid is of the average", "training/callbacks/samples.py", "average or pl_module", "pl_module", FID),
    Slip(
        "names of sample grids",
        "training/callbacks/samples.py",
        '((pl_module, "raw"), (average, "ema"))',
        '((pl_module, "ema"), (average, "raw"))',
        FID,
    ),
    Slip(
        "validation is of the average",
        "training/callbacks/ema.py",
        "    @property\n    def average",
        "    def _swap_models(self, pl_module):\n        pass\n\n    @property\n    def average",
        "tests/training/test_fit.py -k reproduces",
    ),
    Slip("rounding to pixels", "sampling/planning.py", "np.rint(images * 255)", "(images * 255)", NEAREST),
    Slip(
        "rounding to pixels",
        "sampling/planning.py",
        "np.rint(drawn[:, known:] * 255)",
        "(drawn[:, known:] * 255)",
        NEAREST,
    ),
    Slip("moments of mirrored images", "data/datasets/latents.py", 'f"std{suffix}"', '"std"', MIRRORED),
    Slip(
        "moments of mirrored images",
        "data/latent_cache.py",
        'stored[f"std{suffix}"] = std',
        'stored[f"std{suffix}"] = stored.get("std", std)',
        MIRRORED,
    ),
    Slip("float16 sums", "models/wan_attention.py", "v.float() if v.dtype == torch.float16 else v", "v", HALF),
    Slip("float16 sums", "models/convert_sana.py", "torch.promote_types(v.dtype, torch.float32)", "v.dtype", HALF),
    Slip(
        "float16 sums",
        "layers/cores/mhla.py",
        "        mixing = mixing / largest",
        "        pass",
        "tests/models/test_video_dit.py -k low_precision",
    ),
    Slip(
        "float16 outputs",
        "models/convert_sana.py",
        "out.clip(-65504, 65504) if out.dtype == torch.float16 else out",
        "out",
        HALF,
    ),
    Slip("eps of Wan", "models/wan_attention.py", '"eps": self.eps,', '"eps": 1e-6,', WAN),
    Slip("first time", "diffusion/denoising.py", "highest - NUM_TIMESTEPS / num_steps)", "highest - 1000)", TIMES),
    Slip("last time", "diffusion/denoising.py", "times[-1] > 0 and takes", "times[-1] > 1 and takes", TIMES),
    Slip("offset of times", "diffusion/denoising.py", "times + scheduler.config.steps_offset", "times", TIMES),
    Slip(
        "scale of a sampler's noise",
        "diffusion/denoising.py",
        'float(getattr(scheduler, "init_noise_sigma", 1.0))',
        "1.0",
        "tests/diffusion/test_pipeline.py -k scale_of_their",
    ),
    Slip(
        "bounds of guidance",
        "diffusion/denoising.py",
        "<= ends[0] <= ends[1] <= 1",
        "<= ends[0] < ends[1] <= 1",
        "tests/diffusion/test_pipeline.py -k extrapolates",
    ),
    Slip(
        "bounds of betas",
        "diffusion/objectives.py",
        "self.beta_start <= self.beta_end",
        "self.beta_start < self.beta_end",
        OBJECTIVES,
    ),
    Slip("bounds of steps", "training/callbacks/samples.py", "plan.steps > NUM_", "plan.steps >= NUM_", FID),
    Slip("bounds of frame rates", "sampling/planning.py", "_RATE_TOLERANCE = 0.05", "_RATE_TOLERANCE = 0.1", RATES),
    Slip("bounds of frame rates", "sampling/planning.py", "_RATE_TOLERANCE = 0.05", "_RATE_TOLERANCE = 0.03", RATES),
    Slip(
        "swapped layers keep their parts",
        "layers/swapped_attention.py",
        "q, k = self.q_norm(q), self.k_norm(k)",
        "q, k = q, k",
        "tests/models/test_swap.py -k parts",
    ),
    Slip(
        "swapped layers keep their parts",
        "layers/swapped_attention.py",
        "self.gate(x).sigmoid()",
        "self.gate(x)",
        "tests/models/test_swap.py -k parts",
    ),
    Slip(
        "halves turn as pairs",
        "layers/swapped_attention.py",
        "slice(self.head_dim // 2) if",
        "slice(None, None, 2) if",
        "tests/models/test_swap.py -k rope or parts",
    ),
    Slip(
        "halves turn as pairs",
        "layers/swapped_attention.py",
        "unflatten(-1, (2, -1)).mT.flatten(-2)",
        "unflatten(-1, (2, -1)).flatten(-2)",
        "tests/models/test_swap.py -k parts or dinov3",
    ),
    Slip(
        "keys of groups",
        "layers/swapped_attention.py",
        "y.repeat_interleave(self.queries_per_key, 2)",
        "y.repeat(1, 1, self.queries_per_key, 1)",
        "tests/models/test_swap.py -k parts",
    ),
    Slip(
        "swapped convolutions start at zero",
        "layers/swapped_attention.py",
        "nn.init.zeros_(parameter)",
        "nn.init.ones_(parameter)",
        "tests/models/test_swap.py -k convolutions",
    ),
    Slip(
        "the grid follows the images",
        "models/call_grids.py",
        "self.seen = tuple(self.embed.dynamic_feat_size(inputs[0].shape[-2:]))",
        "pass",
        "tests/models/test_swap.py -k grid_follows",
    ),
    Slip(
        "the first of each k layers stays",
        "models/swap.py",
        "if index % softmax_every and name in found",
        "if (index + 1) % softmax_every and name in found",
        "tests/models/test_swap.py -k chosen",
    ),
    Slip(
        "weights of before a swap",
        "models/swap_files.py",
        "if is_swapped else {",
        "if True else {",
        "tests/models/test_swap.py -k start_from",
    ),
    Slip(
        "prefix tokens do not turn",
        "layers/positions.py",
        "F.pad(cos, padding, value=1.0)",
        "F.pad(cos, padding)",
        TURN,
    ),
    Slip(
        "prefix tokens do not turn",
        "layers/positions.py",
        "(0, 0, 0, 0, grid.num_prefix_tokens, 0)",
        "(0, 0, 0, 0, 0, grid.num_prefix_tokens)",
        TURN,
    ),
    Slip(
        "classes in another order",
        "data/data_module.py",
        "if names == self.class_names:",
        "if sorted(names) == sorted(self.class_names):",
        "tests/data/test_resume.py -k class_list",
    ),
    Slip(
        "classes in another order",
        "evaluation/scores.py",
        "known == wanted or",
        "sorted(known or []) == sorted(wanted) or",
        "tests/evaluation/test_refusals.py -k other_classes",
    ),
]


def arguments_of(tests: str) -> list[str]:
    """Split files and the words after -k."""
    files, _, words = tests.partition(" -k ")
    return [*files.split(), *(["-k", words] if words else [])]


def run_known(copy: Copy, word: str, limit_s: float) -> int:
    """Run the known slips with a word, after their tests without a slip; returns how many go unnoticed."""
    chosen = [slip for slip in SLIPS if word in slip.behaviour or word in slip.file]
    for tests in dict.fromkeys(slip.tests for slip in chosen):
        verdict = copy.run(arguments_of(tests), limit_s)
        if verdict.kind != "passed":
            sys.exit(f"without a slip {tests}: {verdict}")
    unnoticed = 0
    for number, slip in enumerate(chosen, 1):
        text = (ROOT / "headmix_vision" / slip.file).read_text()
        if text.count(slip.old) == 1:
            with copy.changed(slip.file, text.replace(slip.old, slip.new)):
                verdict = copy.run(arguments_of(slip.tests), limit_s)
        else:
            verdict = Verdict("broken", reason=f"{slip.old!r} is {text.count(slip.old)} times in the file")
        unnoticed += not verdict.is_notice
        print(f"{number:3d}/{len(chosen)} {slip.behaviour} ({slip.file}): {verdict}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} slips are noticed")
    return unnoticed


def main() -> None:
    """Run the slips that are asked for; ends with status 1 if one goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--draw", type=int, metavar="N", help="draw this number of mistakes instead of the known ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds of the tests of a mistake (300)")
    parser.add_argument("--reach", type=Path, default=Path("runs/reach"), help="a recording of slip_reach.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        if options.draw:
            unnoticed = draw(copy, Reach(ROOT, options.reach), options.draw, options.seed, options.limit)
        else:
            unnoticed = run_known(copy, options.word, options.limit)
    sys.exit(bool(unnoticed))


if __name__ == "__main__":
    main()
