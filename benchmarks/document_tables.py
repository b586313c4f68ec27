"""Write the tables of the documents, and plots of times, anew from the CSV files beside them.

    python benchmarks/document_tables.py            # after a benchmark has written its CSV
    python benchmarks/document_tables.py --check    # names the documents that say something else; exit status 1

A line `<!-- table NAME -->` in a document is followed by the table of that name, which is made here from files
of docs/. Deviations are those of samples (n - 1). Plots are written in any case: the check leaves them out.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

import emoji_report
import head_mixes_report
import hih_report
import mhla_report
import plan_scale
import sweeps_report
from compare_moving_digits import parse_arguments
from counting_report import accuracy_table, read_runs, tuned
from measuring import read_csv
from model_families import read_spelling
from moving_digits_report import Report, open_table
from moving_digits_runs import Runs
from tested_versions import PAIRS
from training_runs import REPOSITORY

from headmix_vision.analysis.sweeps.runs import read_test
from headmix_vision.console.tables import markdown_table, mean_and_deviation
from headmix_vision.doctor.known_gpus import COMPILED, KNOWN_GPUS, MEASURED
from headmix_vision.files.origins import origin_path

DOCS = REPOSITORY / "docs"
MARKER = re.compile(r"(?m)^<!-- table (?P<name>\S+) -->\n(?P<table>(?:\|.*\n)*)")
CORES = ("softmax", "linear", "mhla", "hih")
MHLA_SHAPES = {
    "deit": "DeiT-S 128·6·256·64, 4x4",
    "n196": "DeiT-S at 224 px, N = 196",
    "n197": "with a class token, N = 197",
    "dit256": "DiT-XL/2 256 px 32·16·256·72, 4x4",
    "dit512": "DiT-XL/2 512 px 32·16·1024·72, 4x4",
    "k4": "4k tokens 8·16·4096·64, 8x8",
    "k16": "16k tokens 2·16·16384·64, 8x8",
    "wan": "Wan video 1·12·31500·128, 3x5x10",
}
HIH_COLUMNS = {
    "r1": "r = 1",
    "r2": "r = 2",
    "r4": "r = 4",
    "r8": "r = 8",
    "fla": "fla, r = 1",
    "torch_r1": "torch form, r = 1",
    "torch_r4": "torch form, r = 4",
    "loop_r1": "loop, r = 1",
    "flash": "FlashAttention",
    "cudnn": "cuDNN",
}
CONV_SHAPES = {
    "deit_s_224": "CPE, DeiT-S at 224 px",
    "deit_s_512": "CPE, DeiT-S at 512 px",
    "dit_xl_256": "CPE, DiT-XL/2 at 256 px",
    "hih_deit_s": "Head-in-Head, DeiT-S at 224 px",
    "video": "CPE, clips",
    "hih_video": "Head-in-Head, clips",
    "wan": "Wan",
}
HEAD_MIX_SHAPES = {"n196_p2": "196, 2", "n196_p4": "196, 4", "n1024_p2": "1,024, 2", "n1024_p4": "1,024, 4"}
WAN_TOKENS = ("31500", "32760", "75600")
WAN_MODES = {"forward": "denoising forward", "train": "training step"}
CLAIMS = {
    "mhla_h200": "MHLA's speed and memory",
    "hih_h200": "Head-in-Head's speed and memory",
    "models_deit_h200": "DeiT-S, MHLA against softmax",
    "wan_h200": "Wan's shape, MHLA against softmax",
    "emoji": "attention in models that draw emoji",
    "digits": "cores on digits",
    "head_mixes": "cores with and without head mixes",
    "compress": "fewer heads of keys and values",
}
FURTHER_CLAIMS = {
    "attention_rank": "rank of attention matrices",
    "attention_entropy": "entropy and reach of attention matrices",
    "mhla_causal_h200": "causal MHLA",
    "head_mixes_h200": "interleaved heads, as ops and layers",
    "models_deit_iha_h200": "DeiT-S with interleaved heads",
    "models_deit_mea_h200": "DeiT-S with explicit heads",
    "models_dit_h200": "DiT-XL/2, MHLA against softmax",
    "conv_h200": "depthwise convolution of tokens",
    "training_h200": "training loop around a step",
    "scale_losses_h100": "equal losses on one GPU and two",
    "scale_h100": "training on two GPUs against one",
    "scale_h200": "the same with the memory of an H200",
    "scale_checkpointing_h100": "memory of sharded training, blocks computed anew",
    "context_parallel_h200": "tokens of a clip on two GPUs",
    "counting": "how many heads count pairs",
    "expressivity": "rank of Head-in-Head's transition",
    "moving_digits": "attention in models of clips",
    "moving_digits_distilled": "clip models distilled from softmax",
    "emoji_large": "a larger model that draws emoji",
    "emoji_groups": "attention in classifiers of emoji, 9 groups",
    "emoji_subgroups": "the same, 37 subgroups",
    "emoji_groups_lite0": "a pretrained network on the 9 groups",
    "emoji_subgroups_lite0": "a pretrained network on the 37 subgroups",
    "emoji_rank": "rank of attention matrices in the course of training",
    "emoji_rank_curves": "the same ranks by epoch",
    "emoji_modules": "modules of MHLA in classifiers of emoji",
    "emoji_block_count": "token blocks of MHLA in classifiers of emoji",
    "emoji_block_count_curves": "rank and validation by epoch and token blocks",
    "emoji_length": "256 and 1,024 tokens in classifiers of emoji",
    "emoji_speeds": "images per second of these classifiers",
    "stable_rates": "learning rates of explicit heads",
    "demos": "the demos, and the weights of the package",
    "mhla_cpu": "MHLA's PyTorch form on a CPU",
}
STABLE_VARIANTS = {
    ("plain", "{}"): "core alone",
    ("plain", '{"output_norm": true}'): "core with norm",
    ("mea", "{}"): "MEA",
    ("mea", '{"output_norm": false}'): "MEA without norm",
}
RANKS = ("rank", "stable_rank", "entropy")
Row = dict[str, str]


def read(name: str, **wanted: str) -> list[Row]:
    """The rows of docs/NAME.csv with these texts in their columns."""
    return read_csv(DOCS / f"{name}.csv", **wanted)


def claims(of: dict[str, str], links: str) -> str:
    """What was measured by which script, and with which code; the file of origin has the whole commands."""
    lines = []
    for name, claim in of.items():
        calls = json.loads(origin_path(DOCS / f"{name}.csv").read_text())
        words = (takewhile(lambda word: not word.startswith("--"), call["command"].split()) for call in calls)
        (script,) = set(map(" ".join, words))
        command = f"[`{script}`]({links}{name}.origin.json)"
        commits = ", ".join(dict.fromkeys(call["commit"] for call in calls))
        lines.append([claim, command, f"[{name}.csv]({links}{name}.csv)", commits])
    return markdown_table(["claim", "command", "measured in", "commit"], lines)


def gpus() -> str:
    """The GPUs by what is known of the kernels there, with their compute capability or architecture."""
    lines = [
        [status, ", ".join(f"{x.cards} ({name})" for name, x in KNOWN_GPUS.items() if x.status == status)]
        for status in (MEASURED, COMPILED)
    ]
    return markdown_table(["kernels", "GPUs"], [*lines, ["PyTorch form instead", "older ones, CPU"]])


def numbers(rows: Sequence[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def ms(text: str) -> str:
    """Three digits of a time in ms; a dash for none."""
    if not text:
        return "–"
    return f"{float(text):.3f}".lstrip("0") if float(text) < 1 else f"{float(text):#.3g}".rstrip(".")


def both(row: Row | None) -> str:
    """Forward / forward with backward; nothing where a row is missing or has neither."""
    if row is None or not row["forward_ms"]:
        return ""
    return f"{ms(row['forward_ms'])} / {ms(row['forward_backward_ms'])}"


def over_floor(row: Row, time: str, form: str = ".1f") -> str:
    """A time, and in brackets how many times the floor it is."""
    return f"{ms(row[f'{time}_ms'])} ({float(row[f'{time}_ms']) / float(row[f'{time}_floor_ms']):{form}})"


def digits() -> str:
    """Attention cores on digits, over seeds."""
    lines = []
    for cpe in ("True", "False"):
        for core in CORES:
            rows = read("digits", core=core, cpe=cpe)
            scores = [mean_and_deviation(numbers(rows, f"{which}_top1_percent")) for which in ("last", "best")]
            lines.append([core, "on" if cpe == "True" else "off", *scores])
    return markdown_table(["attention", "CPE", "last epoch", "best epoch"], lines)


def accuracies(task: str, core: str, mix: str, full_mlp: bool) -> list[float]:
    """Top-1 of `compare_head_mixes.py` over seeds, at the rate that was chosen."""
    rows = [row for row in read("head_mixes", task=task, core=core, mix=mix) if row["dataset"] != "digits-tuning"]
    rows = [row for row in rows if (row["mlp_ratio"] == "4.0") is full_mlp]
    rates = {rate: [row for row in rows if row["rate"] == rate] for rate in {row["rate"] for row in rows}}
    return numbers(max(rates.values(), key=len), "test_top1_percent")  # only the chosen one has all seeds


def shipped_weights() -> str:
    """What the weights in the package say of held-out digits."""
    lines = []
    for row in read("demos", part="weights"):
        right = round(float(row["value"]) / 100 * int(row["count"]))
        lines.append([f"`{row['what']}`", str(right), f"{float(row['value']):.2f}"])
    return markdown_table(["`pretrained=True`", "right of 360 held-out digits", "top-1 in %"], lines)


def demo_classifier() -> str:
    """The classifier of the demo, at its best epoch and at the end."""
    rows = read("demos", part="classifier")
    lines = [
        [epoch["what"], epoch["value"], f"{float(top1['value']):.2f}"]
        for epoch, top1 in zip(rows[::2], rows[1::2], strict=True)
    ]
    return markdown_table(["checkpoint", "epochs", "top-1, %"], lines)


def demo_generator() -> str:
    """Samples of the demo's generator as its classifier sees them, and FID of real digits beside theirs."""
    lines = []
    for row in read("demos", part="generator"):
        what = {"top1_percent": "classified as their label, %", "fid": "FID"}[row["number"]]
        lines.append([row["what"], f"{int(row['count']):,}", what, f"{float(row['value']):.4g}"])
    return markdown_table(["images", "how many", "score", "value"], lines)


def demo_clips() -> str:
    """What the judge says of clips by guidance, of real ones, and what guessing would have."""
    rows = read("demos", part="clips")
    sides = sorted({row["what"] for row in rows})
    lines = []
    for number, guessed in {"digit": "0.10", "motion": "", "direction": "0.25"}.items():
        values = {row["what"]: f"{float(row['value']):.2f}" for row in rows if row["number"] == number}
        lines.append([number, *(values[side] for side in sides), guessed])
    return markdown_table(["", *sides, "guessing"], lines)


def mhla_cpu() -> str:
    """Times on a CPU, and how often those of a quarter of the tokens they take."""
    before, lines = None, []
    for row in read("mhla_cpu"):
        times = [float(row["forward_ms"]), float(row["both_ms"])]
        ratios = [f"{now / then:.2f}" for now, then in zip(times, before, strict=True)] if before else ["", ""]
        lines.append([f"{int(row['tokens']):,}", *(f"{time:.3g}" for time in times), *ratios])
        before = times
    header = ["tokens", "forward, ms", "forward + backward, ms", "ratio forward", "ratio forward + backward"]
    return markdown_table(header, lines)


def attention_numbers() -> str:
    """Numbers of attention matrices of the digits models, means over layers and heads."""
    labels = {
        "rank": "rank",
        "stable_rank": "stable rank",
        "entropy": "entropy of a row, nats",
        "distance": "mean distance, tokens",
    }
    ranks, entropies = read("attention_rank"), read("attention_entropy")
    rows = [rank | entropy for rank, entropy in zip(ranks, entropies, strict=True)]
    lines = []
    for core in dict.fromkeys(row["core"] for row in rows):
        of_core = [row for row in rows if row["core"] == core]
        lines.append([core, *(f"{statistics.mean(numbers(of_core, column)):.2f}" for column in labels)])
    return markdown_table(["core", *labels.values()], lines)


def attentions() -> str:
    """The cores side by side: cost, time at two lengths and peak memory at the longer, accuracy on two tasks."""
    columns = {"softmax": "cudnn_packed", "linear": "linear", "mhla": "auto"}
    names = {
        "softmax": "softmax (cuDNN)",
        "linear": "linear (eager PyTorch)",
        "mhla": "MHLA",
        "hih": "Head-in-Head, r = 4",
    }
    lines = []
    for core in CORES:
        times = []
        for shape, hih_shape in (("deit", "n256"), ("k16", "n16384")):
            found = read("hih_h200", shape=hih_shape, column="r4")
            found = found if core == "hih" else read("mhla_h200", shape=shape, column=columns[core])
            times.append(ms(found[0]["forward_backward_ms"]))
        times.append(f"{float(found[0]['peak_mib']):,.0f}")
        scores = [mean_and_deviation(accuracies(task, core, "plain", True), 1) for task in ("digits", "canvas")]
        lines.append([names[core], "N²" if core == "softmax" else "N", *times, *scores])
    header = ["attention", "cost", "128 images of 256 tokens, ms", "2 of 16,384, ms", "MiB", "digits, %", "canvases, %"]
    return markdown_table(header, lines)


def head_mixes(task: str) -> str:
    """Each core alone and under each mix at the rate that was chosen for it, with differences of means."""
    lines = []
    for core in CORES:
        alone = accuracies(task, core, "plain", True)
        cells = [mean_and_deviation(alone)]
        for mix, full_mlp in (("iha", True), ("iha", False), ("mea", True)):
            mixed = accuracies(task, core, mix, full_mlp)
            gain = statistics.mean(mixed) - statistics.mean(alone)
            error = math.sqrt(sum(statistics.variance(sample) / len(sample) for sample in (mixed, alone)))
            cells.append(f"{mean_and_deviation(mixed)} ({gain:+.2f} ± {error:.2f})".replace("-", "−"))
        lines.append([core, *cells])
    return markdown_table(["core", "alone", "IHA, equal parameters", "IHA, equal operations", "MEA"], lines)


def stable_rates() -> str:
    """Accuracy against the learning rate; the highest rate within 10 points of the best, from the best upward, bold."""
    rates = sorted({row["rate"] for row in read("stable_rates")}, key=float)
    lines = []
    for core in ("softmax", "mhla"):
        for (mix, options), name in STABLE_VARIANTS.items():
            cells = []
            for rate in rates:
                found = read("stable_rates", core=core, mix=mix, options=options, rate=rate)
                cells.append([0.0 if math.isnan(x) else x for x in numbers(found, "test_top1_percent")])
            means = [statistics.mean(cell) if cell else -math.inf for cell in cells]
            stable = best = means.index(max(means))
            while stable + 1 < len(rates) and means[stable + 1] >= means[best] - 10:
                stable += 1
            texts = [mean_and_deviation(cell, 1) if cell else "" for cell in cells]
            texts[stable] = f"**{texts[stable]}**"
            lines.append([core, name, *texts])
    return markdown_table(["core", "variant", *(f"{float(rate):.2g}" for rate in rates)], lines)


def compress() -> str:
    """What compressing heads loses and training on recovers, over seeds."""
    lines = []
    for core in ("softmax", "mhla"):
        for heads in range(1, 9):
            rows = read("compress", core=core, component_heads=str(heads))
            missed = ", ".join(
                f"{statistics.mean(numbers(rows, f'{x}_error_percent')):.1f}" for x in ("keys", "values")
            )
            scores = [
                mean_and_deviation(numbers(rows, f"{x}_top1_percent")) for x in ("compressed", "recovered", "scratch")
            ]
            lines.append([core, str(heads), f"{int(rows[0]['parameters']):,}", missed, *scores])
    header = ["", "h'", "parameters", "missed of keys, values, %", "compressed", "trained on", "new weights, as long"]
    return markdown_table(header, lines)


def counting() -> str:
    """Counts that are exactly right, at the learning rate of 3e-3."""
    runs = read_runs(DOCS / "counting.csv")
    settings = sorted(runs, key=lambda setting: (setting.encoding == "symbol", setting.width, setting.pseudo_heads))
    return accuracy_table(tuned({setting: runs[setting] for setting in settings if setting.lr == 3e-3}, 3), 64)


def expressivity() -> str:
    """Glyphs and dots recalled after the last step, by places per write and rank of the transition."""
    rows = read("expressivity", age="all")
    rows = [row for row in rows if row["step"] == max((row["step"] for row in rows), key=int)]
    lines = []
    for attributes, sub_heads in dict.fromkeys((row["attributes"], row["sub_heads"]) for row in rows):
        seeds = [row for row in rows if (row["attributes"], row["sub_heads"]) == (attributes, sub_heads)]
        recalled = [mean_and_deviation(numbers(seeds, f"{what}_percent")) for what in ("glyphs", "dots")]
        lines.append([attributes, sub_heads, *recalled, f"{int(seeds[0]['parameters']):,}"])
    return markdown_table(["places per write", "r", "glyphs recalled, %", "dots right, %", "parameters"], lines)


def wan() -> str:
    """Wan's shape: times, ratios to softmax as installed and by cuDNN, and memory."""
    lines = []
    for tokens in WAN_TOKENS:
        for mode, name in WAN_MODES.items():
            rows = {row["row"]: row for row in read("wan_h200", tokens=tokens, mode=mode)}
            softmax = [f"{float(rows[name]['ms']):,.0f}" for name in ("installed", "cudnn")]
            ours = [
                f"{float(rows[name]['ms']):,.0f} ({float(rows[name]['speed_of_installed']):.2f}, "
                f"{float(rows[name]['speed_of_cudnn']):.2f})"
                for name in ("converted", "hybrid")
            ]
            peaks = ", ".join(f"{float(rows[name]['peak_gib']):.1f}" for name in ("installed", "converted"))
            lines.append([f"{int(tokens):,}, {name}", *softmax, *ours, peaks])
    header = ["tokens", "installed", "cuDNN", "MHLA", "hybrid", "peak memory, GiB, installed and MHLA"]
    return markdown_table(header, lines)


def moving_digits(part: Callable[[Report], str], name: str = "moving_digits", seeds: str = "0123") -> str:
    """A table of `compare_moving_digits.py`, of these seeds: not every row has each of them."""
    arguments = parse_arguments(["--out", str(DOCS / f"{name}.csv"), "--seeds", *seeds])
    return part(Report(open_table(arguments.out), Runs(arguments, math.inf)))


def mhla(name: str, last: str) -> str:
    """Times of the op at the shapes of models, and over the floor, beside softmax and one more column."""
    lines = []
    for shape, title in MHLA_SHAPES.items():
        rows = {row["column"]: row for row in read(name, shape=shape)}
        ours = [over_floor(rows["auto"], time) for time in ("forward", "forward_backward")]
        lines.append([title, *ours, *(both(rows[x]) for x in ("flash_packed", "cudnn_packed", last))])
    header = ["shape (B·H·N·D, blocks)", "forward", "forward + backward", "FlashAttention f / f+b", "cuDNN f / f+b"]
    return markdown_table([*header, f"{last} f / f+b"], lines)


def hih() -> str:
    """Times of Head-in-Head at the shapes of models beside others."""
    rows = {(row["shape"], row["column"]): row for row in read("hih_h200") if row["group"] != "scaling"}
    shapes = list(dict.fromkeys(shape for shape, _ in rows))
    first = {shape: rows[shape, "r1"] for shape in shapes}
    header = [
        "B·N·H·D",
        *("·".join(row[x] for x in ("batch", "tokens", "heads", "head_dim")) for row in first.values()),
    ]
    lines = [[name, *(both(rows.get((shape, key))) for shape in shapes)] for key, name in HIH_COLUMNS.items()]

    def ratio(shape: str, one: str, other: str, time: str, form: str) -> str:
        return f"{float(rows[shape, one][time]) / float(rows[shape, other][time]):{form}}"

    lines.append(["r = 1 against fla, forward", *(ratio(shape, "r1", "fla", "forward_ms", ".2f") for shape in shapes)])
    both_ratios = [
        " / ".join(ratio(shape, "r4", "r1", time, ".1f") for time in ("forward_ms", "forward_backward_ms"))
        for shape in shapes
    ]
    return markdown_table(header, [*lines, ["r = 4 against r = 1", *both_ratios]])


def conv() -> str:
    """Times of the depthwise convolution, over the floor, and PyTorch's."""
    lines = []
    for shape, name in CONV_SHAPES.items():
        rows = {row["column"]: row for row in read("conv_h200", shape=shape)}
        size = "·".join(rows["ours"][x] for x in ("batch", "grid", "channels"))
        ours = [over_floor(rows["ours"], time) for time in ("forward", "forward_backward")]
        lines.append([name, size, *ours, *(both(rows[column]) for column in ("pytorch", "compiled"))])
    return markdown_table(
        ["", "B·grid·C", "forward", "forward + backward", "PyTorch f / f+b", "compiled f / f+b"], lines
    )


def head_mix_parts() -> str:
    """Times of the mix and of the collapse of interleaved heads, by kernels and by einsum."""
    lines = []
    for shape, name in HEAD_MIX_SHAPES.items():
        cells = []
        for part in ("mix", "collapse"):
            rows = {row["form"]: row for row in read("head_mixes_h200", shape=shape, part=part)}
            cells.append(
                " / ".join(over_floor(rows["kernel"], time, ".2f") for time in ("forward", "forward_backward"))
            )
            cells += [both(rows[form]) for form in ("compiled_einsum", "einsum")]
        lines.append([name, *cells])
    forms = ["einsum, compiled", "einsum"]
    return markdown_table(["tokens, P", "mix: kernel", *forms, "collapse: kernel", *forms], lines)


def head_mix_attention() -> str:
    """Times of interleaved heads as an op and as a layer, over MHLA and over softmax, and their ratios."""
    lines = []
    for shape, name in HEAD_MIX_SHAPES.items():
        rows = {(row["part"], row["form"]): row for row in read("head_mixes_h200", shape=shape)}
        cells = [name]
        for part, forms in (("op", ("mhla", "cudnn", "flash")), ("layer", ("mhla", "softmax"))):
            ours, softmax, *_ = found = [rows[part, form] for form in forms]
            times = ("forward_ms", "forward_backward_ms")
            cells += [both(row) for row in found]
            cells.append(" / ".join(f"{float(softmax[time]) / float(ours[time]):.2f}" for time in times))
        lines.append(cells)
    header = ["tokens, P", "op: MHLA", "softmax, cuDNN", "softmax, FlashAttention", "ratio"]
    return markdown_table([*header, "layer: MHLA", "softmax", "ratio"], lines)


def scale() -> str:
    """Training on one GPU and on several, and the memory of a GPU, also where blocks are computed anew."""
    lines = []
    for name in ("scale_h100", "scale_h200", "scale_checkpointing_h100"):
        rows = read(name)
        timed = {(row["model"], row["batch"]) for row in rows if row["what"] == "one"}  # others ran side by side
        for row in rows:
            model = f"{row['model']}, {row['batch']}" + (", checkpointing" if "checkpointing" in name else "")
            gpus, cells = f"{row['gpus']} {row['device'].split()[1]}", ["", ""]
            if (row["model"], row["batch"]) in timed:
                cells = [f"{float(row['imgs_per_s']):,.0f}", f"{float(row['ratio']):.2f}"]
            lines.append([model, row["what"], gpus, *cells, f"{float(row['peak_gib']):.1f}"])
    return markdown_table(["model, samples a GPU", "way", "GPUs", "samples/s", "over one GPU", "peak GiB a GPU"], lines)


def context_parallel() -> str:
    """One GPU with all tokens against several: op, layer and model, and what a GPU sends in a layer."""
    lines = []
    rows = {(row["tokens"], row["blocks"], row["pass"], row["what"]): row for row in read("context_parallel_h200")}
    for tokens, blocks, mode in dict.fromkeys(key[:3] for key in rows):
        found = [rows[tokens, blocks, mode, what] for what in ("mhla", "layer", "model")]
        sent = sum(int(found[1][name]) for name in found[1] if name.endswith("_bytes"))
        cells = [
            f"{float(row['one_ms']):.2f} / {float(row['spread_ms']):.2f} ({float(row['ratio']):.2f}x)" for row in found
        ]
        named = {"forward": "forward", "both": "forward + backward"}[mode]
        lines.append([f"{int(tokens):,}, {blocks}", named, *cells, f"{sent / 1e6:.0f} MB"])
    return markdown_table(["tokens, blocks", "", "MHLA", "layer", "model", "sent in a layer"], lines)


def models(name: str, columns: Sequence[str], pixels: int = 1) -> str:
    """Whole models: the baseline, then others with their ratios to it in speed and in peak memory, where counted.

    ``pixels`` are those of one number of the size: latents have eight.
    """
    rows, lines = read(name), []
    starts = [i for i, row in enumerate(rows) if float(row["ratio_to_baseline"]) == 1]
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        first, cells = rows[start], []
        for row in rows[start:end]:
            ratios = [f"{float(row[x]):.2f}" for x in ("ratio_to_baseline", "peak_ratio_to_baseline") if row[x]]
            speed = f"{float(row['imgs_per_s']):,.{int(float(row['imgs_per_s']) < 1000)}f}"
            cells.append(f"{speed} ({', '.join(ratios)})" if cells else speed)
        graphs = ", graphs" if first["compile"] == "reduce-overhead" else ""
        mode = {"train": "training"}.get(first["mode"], first["mode"])
        title = f"{pixels * int(first['size']):,} px, batch {first['batch']}, {mode}{graphs}"
        lines.append([title, *cells, *[""] * (len(columns) - len(cells))])
    return markdown_table(["images/s", *columns], lines)


def emoji_speeds() -> str:
    """Images per second of classifiers of emoji in training, by the size of the pictures."""
    rows, sizes = read("emoji_speeds"), {"64": "256 tokens", "128": "1,024 tokens"}
    lines = []
    for spelling in dict.fromkeys(row["model"] for row in rows):
        name, options = read_spelling(spelling)
        core, side = name.split("_")[1], options.get("block_grid")
        network = core + (f", M = {side**2}" if side else "") + ("+CPE" if options.get("cpe") else "")
        found = [next(row for row in rows if (row["model"], row["size"]) == (spelling, size)) for size in sizes]
        numbers = [(float(row["imgs_per_s"]), float(row["ratio_to_baseline"])) for row in found]
        lines.append([network, *(f"{speed:,.0f} ({ratio:.2f})" for speed, ratio in numbers)])
    return markdown_table(["images/s", *sizes.values()], lines)


def emoji_classifiers() -> str:
    """Accuracies of classifiers of emoji on both tasks, and of a pretrained network."""
    tasks = {"groups": "9 groups", "subgroups": "37 subgroups"}
    return sweeps_report.classifiers(
        {title: read(f"emoji_{task}") for task, title in tasks.items()},
        {title: read_test(DOCS / f"emoji_{task}_lite0.csv") for task, title in tasks.items()},
    )


def explicit_heads() -> str:
    """Whole models with explicit heads beside their core alone."""
    rows, lines = read("models_deit_mea_h200"), []
    for name, group in (("softmax", rows[:4]), ("MHLA", rows[4:])):
        cells = [f"{float(row['imgs_per_s']):,.0f} ({float(row['ratio_to_baseline']):.2f})" for row in group]
        lines.append([name, cells[0].partition(" ")[0], *cells[1:]])
    header = ["training, images/s", "core alone", "MEA, folded", "each key and value", "three component heads"]
    return markdown_table(header, lines)


def versions() -> str:
    """The supported pairs of torch and Triton, and how it is known that the kernels work with them."""
    return markdown_table(["torch", "Triton", "kernels on Hopper", "known"], PAIRS)


TABLES: dict[str, Callable[[], str]] = {
    "versions": versions,
    "claims": partial(claims, CLAIMS, "docs/"),
    "further_claims": partial(claims, FURTHER_CLAIMS, ""),
    "gpus": gpus,
    "attentions": attentions,
    "digits": digits,
    "attention_numbers": attention_numbers,
    "weights": shipped_weights,
    "demo_classifier": demo_classifier,
    "demo_generator": demo_generator,
    "demo_clips": demo_clips,
    "mhla_cpu": mhla_cpu,
    "head_mixes_digits": partial(head_mixes, "digits"),
    "head_mixes_canvas": partial(head_mixes, "canvas"),
    "stable_rates": stable_rates,
    "compress": compress,
    "counting": counting,
    "expressivity": expressivity,
    "wan": wan,
    "emoji_classifiers": emoji_classifiers,
    "emoji_rank": lambda: sweeps_report.sweep(read("emoji_rank"), ("val_percent", "test_balanced_percent", *RANKS)),
    "emoji_modules": lambda: sweeps_report.sweep(read("emoji_modules"), sweeps_report.SCORES),
    "emoji_block_count": lambda: sweeps_report.sweep(read("emoji_block_count"), (*sweeps_report.SCORES, "rank")),
    "emoji_length": lambda: sweeps_report.sweep(read("emoji_length"), (*sweeps_report.SCORES, "rank")),
    "emoji_speeds": emoji_speeds,
    "emoji": lambda: emoji_report.quality(read("emoji", split="test")),
    "emoji_large": lambda: emoji_report.quality(read("emoji_large", split="test")),
    "moving_digits": partial(moving_digits, lambda report: report.quality("Attention")),
    "moving_digits_distilled": partial(
        moving_digits,
        lambda report: report.quality("Distilled"),
        "moving_digits_distilled",
        "01",  # with teachers
    ),
    "moving_digits_lengths": partial(moving_digits, Report.lengths),
    "moving_digits_windows": partial(moving_digits, Report.windows),
    "mhla": partial(mhla, "mhla_h200", "released"),
    "mhla_causal": partial(mhla, "mhla_causal_h200", "torch"),
    "hih": hih,
    "conv": conv,
    "scale": scale,
    "context_parallel": context_parallel,
    "head_mix_parts": head_mix_parts,
    "head_mix_attention": head_mix_attention,
    "models_iha": partial(models, "models_deit_iha_h200", ["IHA over softmax", "IHA over MHLA"]),
    "models_deit": partial(models, "models_deit_h200", ["softmax", "MHLA", "MHLA with CPE", "Head-in-Head, r = 4"]),
    "models_dit": partial(models, "models_dit_h200", ["softmax", "MHLA"], 8),
    "models_mea": explicit_heads,
    "scale_plan": lambda: markdown_table(plan_scale.HEADER, plan_scale.plan()),
}


def draw_head_mixes(rows: Sequence[Row], path: Path) -> None:
    """Accuracies of cores under head mixes."""

    def scores(task: str, core: str, mix: str, budget: str) -> list[float]:
        return accuracies(task, core, mix, full_mlp=budget == "parameters")

    head_mixes_report.draw(scores, ("digits", "canvas"), CORES, path)


PLOTS: dict[str, Callable[[Sequence[Row], Path], None]] = {
    "mhla_h200": mhla_report.draw,
    "hih_h200": hih_report.draw,
    "head_mixes": draw_head_mixes,
    "emoji_rank": lambda rows, path: sweeps_report.figure("rank_over_training", rows, path, read("emoji_rank_curves")),
    "emoji_block_count": partial(sweeps_report.figure, "block_count"),
    "emoji_length": partial(sweeps_report.figure, "length"),
    "emoji_block_count_curves": sweeps_report.training,
}


def renewed(text: str) -> str:
    """A document's text with all of its tables made anew.

    Raises:
        KeyError: A marker of an unknown name.
    """
    return MARKER.sub(lambda found: f"<!-- table {found['name']} -->\n{TABLES[found['name']]()}\n", text)


def documents() -> Iterator[tuple[Path, str]]:
    """All documents with tables of this script, and what they say."""
    for path in (REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))):
        if MARKER.search(text := path.read_text()):
            yield path, text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a table differs")
    check = parser.parse_args(argv).check
    stale = [(path, new) for path, old in documents() if (new := renewed(old)) != old]
    for path, new in stale:
        print(f"{path.relative_to(REPOSITORY)} {'differs from' if check else 'is renewed by'} its CSV files")
        if not check:
            path.write_text(new)
    for name, draw in {} if check else PLOTS.items():
        draw(read(name), DOCS / "images" / f"{name}.svg")
    raise SystemExit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
