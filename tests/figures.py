"""Figures in sentences and tables of documents, and how each follows from the data in the repository.

    python tests/figures.py              # 40 figures, drawn at random
    python tests/figures.py --seed 7     # 40 others

A claim names a document, a pattern whose groups are the printed figures, and the numbers out of CSV files. They are
read here row by row, not by the code that writes the tables. A figure is right if its number rounds to its digits.
"""

import argparse
import itertools
import random
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from headmix_lab.tables import read_csv

ROOT = Path(__file__).parents[1]
DRAWN = 40
SPEEDS = ("auto", "cudnn_packed")  # columns of MHLA and of softmax
TIMES = ("forward_ms", "forward_backward_ms")
SHORT = ("n196", "n197", "deit", "dit256", "sweep_256")  # shapes of 196 to 256 tokens
FIGURE = r"([-−+]?(?:\d[\d,]*)?\.?\d+)"  # stands for each # of a pattern


class Claim(NamedTuple):
    """Figures of one sentence or row.

    Attributes:
        document: its path.
        text: the sentence with a # in the place of each figure, as a regular expression.
        numbers: the numbers out of the data.
        source: the file that holds them.
    """

    document: str
    text: str
    numbers: Callable[[], Sequence[float]]
    source: str


class Figure(NamedTuple):
    """One printed figure, and the number that it must be."""

    document: str
    printed: str
    number: float
    source: str
    text: str

    @property
    def is_right(self) -> bool:
        """Whether the number rounds to the printed digits."""
        decimals = len(self.printed.partition(".")[2])
        return abs(float(self.printed.replace(",", "").replace("−", "-")) - self.number) <= 0.5 * 10**-decimals + 1e-9


@cache
def text_of(document: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / document).read_text(encoding="utf-8"))


def figures(claim: Claim) -> list[Figure]:
    """Return the figures of a claim.

    Raises:
        ValueError: The document does not hold the sentence once, or with another number of figures.
    """
    found = re.findall(claim.text.replace("#", FIGURE), text_of(claim.document))
    if len(found) != 1:
        raise ValueError(f"{claim.document} has {len(found)} times: {claim.text}")
    printed = found[0] if isinstance(found[0], tuple) else (found[0],)
    pairs = zip(printed, claim.numbers(), strict=True)
    return [Figure(claim.document, text, number, claim.source, claim.text) for text, number in pairs]


def column(path: str, name: str, **given: str) -> list[float]:
    """Return the numbers of a column, of the rows with these texts in others."""
    return [float(row[name]) for row in read_csv(ROOT / path, **given) if row[name]]


def cell(path: str, name: str, **given: str) -> float:
    """Return the one number of a column in the one row with these texts in others."""
    (number,) = column(path, name, **given)
    return number


def mean(path: str, name: str, **given: str) -> float:
    return statistics.mean(column(path, name, **given))


def mean_and_deviation(path: str, name: str, **given: str) -> list[float]:
    numbers = column(path, name, **given)
    assert len(numbers) == 3
    return [statistics.mean(numbers), statistics.stdev(numbers)]


RESULTS, OF = "benchmarks/results", "experiments"
MHLA, HIH, WAN = f"{RESULTS}/mhla_h200.csv", f"{RESULTS}/hih_h200.csv", f"{RESULTS}/wan_h200.csv"
CAUSAL, FLASH = f"{RESULTS}/mhla_causal_h200.csv", "flash_packed"
WAN_GPUS, WAN_STREAM = f"{RESULTS}/wan_gpus_h200.csv", f"{RESULTS}/wan_stream_h200.csv"
DEIT, SCALE_H100, SCALE_H200 = (
    f"{RESULTS}/models_deit_h200.csv",
    f"{RESULTS}/scale_h100.csv",
    f"{RESULTS}/scale_h200.csv",
)
MODELS, MODELS_H100 = f"{RESULTS}/models_h200.csv", f"{RESULTS}/models_h100.csv"
COMPILED, SOFTMAX = "replayed default", "deit_softmax_small:class_token=False,global_pool=avg"
PARALLEL, TRAINING = f"{RESULTS}/context_parallel_h200.csv", f"{RESULTS}/training_h200.csv"
CHECKPOINTING, IHA = f"{RESULTS}/scale_checkpointing_h100.csv", f"{RESULTS}/models_deit_iha_h200.csv"
EMOJI, LARGE = f"{OF}/emoji/results.csv", f"{OF}/emoji/large.csv"
DEMOS, DIGITS, RANK = f"{OF}/demos/results.csv", f"{OF}/digits/results.csv", f"{OF}/attention_matrices/rank.csv"
MIXES, COMPRESS, COUNTING = (f"{OF}/{name}/results.csv" for name in ("head_mixes", "compress", "counting"))
RECALL, RATES = f"{OF}/recall/results.csv", f"{OF}/stable_rates/results.csv"
EMOJI_CLIPS, LONG_CLIPS, LATENT_CLIPS, STILLS = (
    f"{OF}/animated_emoji/{name}.csv" for name in ("results", "long", "latents", "stills")
)
LONGER, REAL_CLIPS = ("softmax-cpe", "hybrid-cpe", "mhla-cpe", "linear-cpe"), "validation pictures"
CLIPS, DISTILLED = f"{OF}/moving_digits/results.csv", f"{OF}/moving_digits/distilled.csv"
CLOTHES, CLOTHES_CORES, CLOTHES_DRAWN = (f"{OF}/fashion_mnist/{x}.csv" for x in ("recipe", "cores", "generators"))
CLOTHES_ORDER = ("hih", "mhla", "softmax", "linear")  # best first
CLOTHES_WITH_CPE = ("hih", "mhla", "linear", "softmax")
CLOTHES_DRAWN_ORDER = ("hih", "softmax", "mhla", "linear")
SWAP, SWAP_EMOJI = f"{OF}/swap/fashion_mnist.csv", f"{OF}/swap/emoji.csv"
JUDGES = f"{OF}/emoji_classifiers"


def mixed(task: str, core: str, mix: str = "plain", narrow: bool = False) -> list[float]:
    """Return mean and deviation of a core, with a head mix, at the rate that all seeds have, in `head_mixes`."""
    rows = read_csv(ROOT / MIXES, task=task, core=core, mix=mix)
    rows = [row for row in rows if row["dataset"] != "digits-tuning" and (row["mlp_ratio"] != "4.0") == narrow]
    (rate,) = {row["rate"] for row in rows if row["seed"] == "2"}
    numbers = [float(row["test_top1_percent"]) for row in rows if row["rate"] == rate]
    assert len(numbers) == 3
    return [statistics.mean(numbers), statistics.stdev(numbers)]


def mixes(task: str, core: str) -> list[float]:
    """Return a row of `head_mixes`: the core alone, each mix, its difference from the core and the error of that."""
    alone, spread = found = mixed(task, core)
    for mix, narrow in (("iha", False), ("iha", True), ("mea", False)):
        one, deviation = mixed(task, core, mix, narrow)
        found += [one, deviation, one - alone, ((spread**2 + deviation**2) / 3) ** 0.5]
    return found


def mixed_size(mix: str, name: str) -> float:
    """Return the operations or parameters of softmax on digits, in `head_mixes`."""
    return mean(MIXES, name, task="digits", core="softmax", mix=mix, mlp_ratio="4.0")


def stable_rate(core: str, mix: str) -> float:
    """Return the highest rate whose mean is at most 10 points below the best rate's."""
    rows = read_csv(ROOT / RATES, core=core, mix=mix, options="{}")
    means = {
        rate: statistics.mean(float(row["test_top1_percent"]) for row in rows if float(row["rate"]) == rate)
        for rate in {float(row["rate"]) for row in rows}
    }
    return max(rate for rate, top1 in means.items() if top1 >= max(means.values()) - 10)


def stable_ratio(core: str) -> float:
    return stable_rate(core, "mea") / stable_rate(core, "plain")


def attention(core: str, name: str) -> list[float]:
    """Return the figures of a row of the table in README."""
    path, short, long = (HIH, "n256", "n16384") if core == "hih" else (MHLA, "deit", "k16")
    one, other = (cell(path, "forward_backward_ms", shape=shape, column=name) for shape in (short, long))
    return [one, other, cell(path, "peak_mib", shape=long, column=name), *mixed("digits", core), *mixed("canvas", core)]


def whole_model(
    *names: str, model: str = "deit_mhla_small", mode: str = "train", compile: str = "reduce-overhead"
) -> list[float]:
    """Return ratios of a DeiT-S at 224 px, MHLA's training with CUDA graphs by default."""
    given = {"size": "224", "batch": "256", "mode": mode, "compile": compile, "model": model}
    return [cell(MODELS, name, **given) for name in names]


def eager(
    compile: str,
    name: str = "ratio_to_baseline",
    model: str = "deit_mhla_small",
    mode: str = "train",
    table: str = MODELS,
) -> float:
    """Return a ratio of a DeiT-S at batch 32, MHLA's training by default; `compile` is `none` or `replayed`."""
    return cell(table, name, size="224", batch="32", mode=mode, compile=compile, model=model)


def image_dit(size: str, mode: str, core: str = "mhla") -> float:
    """Return the ratio of a DiT-S/2 to softmax, at a size of latents."""
    return cell(MODELS, "ratio_to_baseline", size=size, mode=mode, compile=COMPILED, model=f"dit_{core}_s_2")


def compiled_512(mode: str, compile: str = "default") -> float:
    given = {"size": "512", "batch": "32", "mode": mode, "compile": compile, "model": "deit_mhla_small"}
    return cell(MODELS, "ratio_to_baseline", **given)


def sized(size: str, batch: str, mode: str) -> list[float]:
    """Return MHLA's speed over softmax's and timm's, and linear attention's over softmax's, compiled, of a DeiT-S."""
    given = {"size": size, "batch": batch, "mode": mode, "compile": COMPILED}
    names = [("ratio_to_baseline", "mhla"), ("ratio_to_timm", "mhla"), ("ratio_to_baseline", "linear")]
    return [cell(MODELS, name, **given, model=f"deit_{core}_small") for name, core in names]


def spreads(mode: str = "", *ways: str, table: str = MODELS, **given: str) -> list[float]:
    """Return the range of the windows over their median in per cent, of each whole model timed in these ways."""
    rows = read_csv(ROOT / table, **given)
    rows = [row for row in rows if row["compile"] in ways and row["mode"].startswith(mode)]
    return [
        100 * (float(row["highest_imgs_per_s"]) - float(row["lowest_imgs_per_s"])) / float(row["imgs_per_s"])
        for row in rows
    ]


def fid(row: str) -> float:
    return mean(EMOJI, "fid", row=row, split="test")


def large(name: str, row: str = "mhla-cpe", **given: str) -> float:
    return cell(LARGE, name, row=row, **({"split": "test"} | given))


def wan(tokens: int, mode: str, row: str, name: str = "ms") -> float:
    return cell(WAN, name, tokens=str(tokens), mode=mode, row=row)


def wan_row(tokens: int, mode: str) -> list[float]:
    cells = [wan(tokens, mode, "installed"), wan(tokens, mode, "cudnn")]
    for row in ("converted", "hybrid"):
        cells += [wan(tokens, mode, row, name) for name in ("ms", "speed_of_installed", "speed_of_cudnn")]
    return [*cells, *(wan(tokens, mode, row, "peak_gib") for row in ("installed", "converted"))]


def flat_stream() -> list[int]:
    """Return the numbers of frames at which time, state and peak print as at the end."""
    rows = read_csv(ROOT / WAN_STREAM)
    names = ("ms_per_frame", "state_gib", "peak_gib")
    printed = {int(row["frames"]): [f"{float(row[name]):.1f}" for name in names] for row in rows}
    return [frames for frames, found in printed.items() if found == printed[1005]]


def two_gpus(path: str, what: str, batch: int, name: str = "ratio") -> float:
    return cell(path, name, model="dit_mhla_xl_2", what=what, batch=str(batch))


def clips(row: str, name: str, frames: int, way: str = "whole", **given: str) -> float:
    return mean(CLIPS, name, row=row, frames=str(frames), way=way, **given)


def longer(row: str, name: str) -> list[float]:
    """Return a score of animated emoji after 60 epochs and after 150."""
    return [cell(path, name, row=row, split="test") for path in (EMOJI_CLIPS, LONG_CLIPS)]


def clothes(network: str) -> list[float]:
    """Return mean and deviation of a network of Fashion-MNIST on the test split."""
    return mean_and_deviation(CLOTHES_CORES, "test_top1_percent", variant=network)


def drawn_clothes(core: str, name: str, split: str, guidance: str = "1") -> float:
    """Return a score of drawn clothes, of a model with CPE."""
    return cell(CLOTHES_DRAWN, name, row=f"{core}-cpe", split=split, guidance=guidance)


def faded(row: str) -> float:
    """Return the points of the digit that are lost over 64 frames, window by window; mean of all seeds."""
    return clips(row, "digit_percent", 16) - clips(row, "digit_percent", 64, "windows")


def growth_of_time(row: str) -> float:
    """Return by how many per cent the time of a frame grows from 64 to 256 frames."""
    return 100 * (clips(row, "ms", 256, "forward") / clips(row, "ms", 64, "forward") - 1)


def compressed(core: str, heads: int, name: str) -> float:
    return mean(COMPRESS, name, core=core, component_heads=str(heads))


def recovered(core: str, heads: int) -> float:
    return compressed(core, heads, "recovered_top1_percent") - compressed(core, heads, "base_top1_percent")


def dropped(core: str, heads: int) -> float:
    return compressed(core, heads, "base_top1_percent") - compressed(core, heads, "compressed_top1_percent")


def recalled(attributes: int, rank: int) -> list[float]:
    given = {"attributes": str(attributes), "sub_heads": str(rank), "step": "1000", "age": "all"}
    return mean_and_deviation(RECALL, "glyphs_percent", **given)


def top1(core: str) -> float:
    return cell(DEMOS, "value", what=f"deit_{core}_digits", number="top1_percent")


def of_layers(model: str, *layers: int) -> float:
    rows = read_csv(ROOT / RANK, model=f"deit_{model}_digits")
    return statistics.mean(float(row["rank"]) for row in rows if not layers or int(row["layer"]) in layers)


def halves(cpe: str, *cores: str) -> list[float]:
    means = sorted(mean(DIGITS, "last_top1_percent", core=core, cpe=cpe) for core in cores)
    return [means[0], means[-1]]


def training(model: str) -> list[float]:
    """Return images/s and their ratio to the bare step, without and with EMA."""
    given = {"model": model, "compile": "default"}
    names = ("imgs_per_s", "ratio_to_bare")
    return [cell(TRAINING, x, what=what, **given) for what in ("no averaging", "averaging") for x in names]


def launched() -> list[float]:
    """Return the speed of two GPUs without CUDA graphs: of models, least and most of 31,500 tokens, and of 262,144."""
    rows = [row for row in read_csv(ROOT / PARALLEL, what="model", ranks="2", **{"pass": "both"})]
    ratios = {row["tokens"]: [] for row in rows}
    for row in rows:
        ratios[row["tokens"]].append(float(row["one_launched_ms"]) / float(row["spread_launched_ms"]))
    return [min(ratios["31500"]), max(ratios["31500"]), *ratios["262144"]]


def counted(core: str, modulus: int, pseudo_heads: int, heads: int) -> float:
    given = {"encoding": "value", "core": core, "modulus": str(modulus), "step": "5000", "lr": "0.003"}
    return mean(COUNTING, "exact_percent", pseudo_heads=str(pseudo_heads), heads=str(heads), **given)


def counting_parameters() -> list[float]:
    return column(COUNTING, "parameters", width="64", encoding="value")


def counting_flops(pseudo_heads: int, heads: int) -> float:
    given = {
        "encoding": "value",
        "core": "softmax",
        "width": "64",
        "pseudo_heads": str(pseudo_heads),
        "heads": str(heads),
    }
    return mean(COUNTING, "attention_flops", **given) / 1e6


def distilled(core: str, seed: int) -> float:
    """Return by how much the FVD of a distilled model is below its teacher's."""
    fvd = {row: cell(DISTILLED, "fvd", row=row, seed=str(seed)) for row in ("softmax", f"{core}-distilled")}
    return fvd["softmax"] - fvd[f"{core}-distilled"]


def chosen(sweep: str, variant: str, name: str = "test_balanced_percent") -> float:
    """Return the mean of three seeds of a network of emoji at the rate that all of them have."""
    rows = read_csv(ROOT / JUDGES / f"{sweep}.csv", variant=variant)
    (rate,) = {row["rate"] for row in rows if row["seed"] == "2"}
    numbers = [float(row[name]) for row in rows if row["rate"] == rate]
    assert len(numbers) == 3
    return statistics.mean(numbers)


def gain(sweep: str, variant: str, other: str, name: str = "test_balanced_percent") -> float:
    return chosen(sweep, variant, name) - chosen(sweep, other, name)


def ranks(core: str) -> list[float]:
    """Return the lowest mean rank over the training, and the last."""
    found: dict[int, list[float]] = {}
    for row in read_csv(ROOT / JUDGES / "rank_curves.csv", variant=core):
        found.setdefault(int(row["epoch"]), []).append(float(row["rank"]))
    means = {epoch: statistics.mean(numbers) for epoch, numbers in found.items()}
    return [min(means.values()), means[max(means)]]


def lead(sweep: str, cpe: bool) -> float:
    """Return the lead of Head-in-Head over the best other core."""
    names = [f"{core}{'+CPE' * cpe}" for core in ("hih", "softmax", "linear", "mhla")]
    first, *others = (chosen(sweep, name) for name in names)
    return first - max(others)


def over_cudnn(shape: str, time: str) -> float:
    ours, softmax = (cell(MHLA, time, shape=shape, column=column) for column in SPEEDS)
    return softmax / ours


def over_mhla(column: str, *shapes: str, time: str = "forward_backward_ms") -> list[float]:
    """Return the lowest and the highest time of a column over MHLA's, at these shapes."""
    ratios = [cell(MHLA, time, shape=x, column=column) / cell(MHLA, time, shape=x, column="auto") for x in shapes]
    return [min(ratios), max(ratios)]


def shapes_of(group: str = "", least: int = 0, most: int = 10**9) -> list[str]:
    """Return the shapes that were timed beside softmax, of a group and of so many tokens."""
    rows = read_csv(ROOT / MHLA, column="cudnn_packed")
    return [x["shape"] for x in rows if x["group"].startswith(group) and least <= int(x["tokens"]) <= most]


def at_wan(column: str, other: str = "auto") -> float:
    """Return the time of an attention over another's at Wan's shape, with backward."""
    one, two = (cell(MHLA, "forward_backward_ms", shape="wan", column=x) for x in (column, other))
    return one / two


def launched_ms(shapes: Sequence[str], *columns: str) -> list[float]:
    """Return the lowest and the highest time with backward without CUDA graphs."""
    times = [cell(MHLA, "forward_backward_launched_ms", shape=x, column=y) for x in shapes for y in columns]
    return [min(times), max(times)]


CLAIMS = (
    Claim(
        "README.md",
        r"\| softmax \(cuDNN\) \| N² \| # \| # \| # \| # ± # \| # ± # \|",
        lambda: attention("softmax", "cudnn_packed"),
        MHLA,
    ),
    Claim(
        "README.md",
        r"\| linear \| N \| # \| # \| # \| # ± # \| # ± # \|",
        lambda: attention("linear", "linear_kernel"),
        MHLA,
    ),
    Claim(
        "README.md",
        r"\| MHLA \| N \| # \| # \| # \| # ± # \| # ± # \|",
        lambda: attention("mhla", "auto"),
        MHLA,
    ),
    Claim(
        "README.md",
        r"\| Head-in-Head, r = 4 \| N \| # \| # \| # \| # ± # \| # ± # \|",
        lambda: attention("hih", "r4"),
        HIH,
    ),
    Claim(
        "README.md",
        r"in the plot, # tokens take # ms, cuDNN's softmax #",
        lambda: [16_384, *(cell(MHLA, "forward_backward_ms", shape="sweep_16384", column=x) for x in SPEEDS)],
        MHLA,
    ),
    Claim(
        "README.md",
        r"\[#x\]\(docs/wan\.md.speed\) of softmax with 31,500 tokens, #x with 75,600",
        lambda: [wan(tokens, "train", "converted", "speed_of_installed") for tokens in (31500, 75600)],
        WAN,
    ),
    Claim(
        "README.md",
        r"DeiT-S/MHLA trains at #x of the equal softmax and #x of timm's\. DeiT-S/Head-in-Head, compiled without "
        r"graphs, trains at #x and #x",
        lambda: [
            *whole_model("ratio_to_baseline", "ratio_to_timm"),
            *whole_model("ratio_to_baseline", "ratio_to_timm", model="deit_hih_small", compile=COMPILED),
        ],
        MODELS,
    ),
    Claim(
        "README.md",
        r"at 1,024 px, compiled without graphs, trains at #x",
        lambda: sized("1024", "32", "train")[:1],
        MODELS,
    ),
    Claim(
        "README.md",
        r"measured on H200 \| #x to #x \| #x, #x with backward \| #x to #x with backward",
        lambda: [
            *(of(over_cudnn(shape, time) for shape in SHORT for time in TIMES) for of in (min, max)),
            *(over_cudnn("sweep_512", time) for time in TIMES),
            *over_mhla("cudnn_packed", *shapes_of(least=1024, most=16384)),
        ],
        MHLA,
    ),
    Claim(
        "README.md",
        r"\[FID\]\(experiments/emoji/README\.md\) # \(softmax\), # \(MHLA\), # \(linear",
        lambda: [fid("softmax"), fid("mhla"), fid("linear")],
        EMOJI,
    ),
    Claim(
        "README.md",
        r"FID # \(EfficientNet-Lite0 features, not Inception\); two disjoint sets of real emoji score #",
        lambda: [large("fid"), large("fid", "validation pictures")],
        LARGE,
    ),
    Claim(
        "README.md",
        r"# % of the samples copy",
        lambda: [large("copied_percent")],
        LARGE,
    ),
    Claim(
        "docs/faq.md",
        r"\[#x of softmax\]\(\.\./benchmarks/README\.md.whole-models\) on an idle H200, #x on an H100; #x without",
        lambda: [eager("replayed"), eager("replayed", table=MODELS_H100), eager("none")],
        MODELS,
    ),
    Claim(
        "benchmarks/README.md",
        r"replayed training runs at #x of the equal softmax and #x of timm's, inference at #x and #x; windows spread "
        r"by # to # % of the median, of inference by # to # %",
        lambda: [
            *(
                eager("replayed", name, mode=mode, table=MODELS_H100)
                for mode in ("train", "inference")
                for name in ("ratio_to_baseline", "ratio_to_timm")
            ),
            *(
                end(spreads(mode, "replayed", table=MODELS_H100))
                for mode in ("train", "inference")
                for end in (min, max)
            ),
        ],
        MODELS_H100,
    ),
    Claim(
        "benchmarks/README.md",
        r"CUDA graphs, 224 px, batch 256: MHLA trains at #x of softmax and #x of timm's, with CPE at #x of softmax "
        r"with CPE and #x of softmax without\. Inference runs at #x of softmax\. Linear attention has #x and #x\. "
        r"Windows spread by # % of the median at most",
        lambda: [
            *whole_model("ratio_to_baseline", "ratio_to_timm"),
            *whole_model("ratio_to_baseline", "ratio_to_plain", model="deit_mhla_small:cpe=True"),
            *whole_model("ratio_to_baseline", mode="inference"),
            *whole_model("ratio_to_baseline", model="deit_linear_small"),
            *whole_model("ratio_to_baseline", model="deit_linear_small", mode="inference"),
            max(spreads("", "reduce-overhead")),
        ],
        MODELS,
    ),
    Claim(
        "benchmarks/README.md",
        r"the same setting: MHLA trains at #x of softmax and #x of timm's and runs inference at #x of softmax\. With "
        r"CPE training runs at #x of softmax with CPE and #x of softmax without; its windows spread by # %\. Without "
        r"replay, beside the load of 28, MHLA trained at #x of softmax\. Windows of compiled training spread by up "
        r"to # % there",
        lambda: [
            *whole_model("ratio_to_baseline", "ratio_to_timm", compile=COMPILED),
            *whole_model("ratio_to_baseline", mode="inference", compile=COMPILED),
            *whole_model("ratio_to_baseline", "ratio_to_plain", model="deit_mhla_small:cpe=True", compile=COMPILED),
            *spreads("train", COMPILED, size="224", model="deit_mhla_small:cpe=True"),
            *whole_model("ratio_to_baseline", compile="default"),
            max(spreads("train", "default")),
        ],
        MODELS,
    ),
    Claim(
        "benchmarks/README.md",
        r"512 px, batch 32: MHLA trains at #x of softmax with calls replayed, at #x without.* Windows of the "
        r"replayed row spread by # to # %.*\(next table\)\. Inference runs at #x of softmax",
        lambda: [
            compiled_512("train", COMPILED),
            compiled_512("train"),
            *(end(spreads("train", COMPILED, size="512")) for end in (min, max)),
            compiled_512("inference"),
        ],
        MODELS,
    ),
    Claim(
        "benchmarks/README.md",
        r"had MHLA at #x of timm's at batch 64, without graphs",
        lambda: [
            cell(
                DEIT,
                "ratio_to_baseline",
                size="512",
                batch="64",
                mode="train",
                compile="default",
                model="deit_mhla_small",
            )
        ],
        DEIT,
    ),
    Claim(
        "benchmarks/README.md",
        r"alone on the host: MHLA runs at #x of the equal softmax and #x of timm's\. .* on a busy host, MHLA runs at "
        r"#x of softmax with CPE\. Without replay the three ratios are #x, #x and #x\. Windows spread by # to # % in "
        r"training, # to # % in inference\. .* of the host: inference runs at #x of the equal softmax and #x of timm's",
        lambda: [
            *(
                number
                for way in ("replayed", "none")
                for number in (
                    eager(way),
                    eager(way, "ratio_to_timm"),
                    eager(way, model="deit_mhla_small:cpe=True"),
                )
            ),
            *(end(spreads(mode, "none", "replayed")) for mode in ("train", "inference") for end in (min, max)),
            *(eager("replayed", name, mode="inference") for name in ("ratio_to_baseline", "ratio_to_timm")),
        ],
        MODELS,
    ),
    Claim(
        "benchmarks/README.md",
        r"1,024 px, batch 32: MHLA trains at #x of softmax and #x of timm's, linear attention at #x\. Inference runs "
        r"at #x of softmax and #x of timm's\. At 384 px, batch 256, MHLA trains at #x of softmax and #x of timm's, "
        r"linear attention at #x\. Inference runs at #x and #x, linear attention at #x \(ec5d0bb7\)\. Windows spread "
        r"by # %",
        lambda: [
            *sized("1024", "32", "train"),
            *sized("1024", "32", "inference")[:2],
            *sized("384", "256", "train"),
            *sized("384", "256", "inference"),
            max(spreads("", COMPILED, size="1024") + spreads("", COMPILED, size="384")),
        ],
        MODELS,
    ),
    Claim(
        "benchmarks/README.md",
        r"alone on 16 cores: MHLA trains at #x of softmax and runs inference at #x, linear attention at #x and #x\. A "
        r"kernel of attention at the copy floor, # ms where cuDNN's takes # .* Windows spread by # to # %\. At 512 px, "
        r"batch 32, inference runs at #x\. Training at #x, linear attention at #x, measures the host there\. Windows "
        r"spread by # to # % and by # to # %\. At 1,024 px training runs at #x",
        lambda: [
            *(image_dit("32", mode, core) for core in ("mhla", "linear") for mode in ("train", "inference")),
            *(cell(MHLA, name, shape="deit", column="cudnn_packed") for name in ("forward_floor_ms", "forward_ms")),
            *(end(spreads("", COMPILED, size="32", batch="256")) for end in (min, max)),
            image_dit("64", "inference"),
            *(image_dit("64", "train", core) for core in ("mhla", "linear")),
            *(end(spreads(mode, COMPILED, size="64")) for mode in ("inference", "train") for end in (min, max)),
            image_dit("128", "train"),
        ],
        MODELS,
    ),
    Claim(
        "benchmarks/README.md",
        r"DiT-S/2 with MHLA trains at #x of softmax and runs inference at #x\. DiT-XL/2 at 256 px, batch 32, each "
        r"block compiled: #x and #x, .* Windows spread by # to # % and by # to # %",
        lambda: [
            *(
                cell(MODELS, "ratio_to_baseline", model=model, batch="32", mode=mode)
                for model in ("dit_video_mhla_s_2", "dit_mhla_xl_2")
                for mode in ("train", "inference")
            ),
            *(end(spreads("", COMPILED, size="16x32x32")) for end in (min, max)),
            *(end(spreads("", "replayed blocks", size="32")) for end in (min, max)),
        ],
        MODELS,
    ),
    Claim(
        "benchmarks/README.md",
        r"with backward, FlashAttention 4 takes #x at DeiT-S, #x at DiT-XL/2 512 px, #x at 4,096 tokens and #x at "
        r"Wan's shape\. cuDNN takes #x, #x, #x and #x",
        lambda: [
            cell(MHLA, "forward_backward_ms", shape=shape, column=column)
            / cell(MHLA, "forward_backward_ms", shape=shape, column="auto")
            for column in ("flash4", "cudnn_packed")
            for shape in ("deit", "dit512", "k4", "wan")
        ],
        MHLA,
    ),
    Claim(
        "benchmarks/README.md",
        r"A frame takes # ms, with # GiB of state\. Peak memory is # GiB",
        lambda: [cell(WAN_STREAM, name, frames="1005") for name in ("ms_per_frame", "state_gib", "peak_gib")],
        WAN_STREAM,
    ),
    Claim(
        "benchmarks/README.md",
        r"All three are flat from # to # frames",
        lambda: [min(flat_stream()), max(flat_stream())],
        WAN_STREAM,
    ),
    Claim(
        "benchmarks/README.md",
        r"75,600 tokens were measured again: #x and #x of softmax",
        lambda: [wan(tokens, "train", "converted", "speed_of_installed") for tokens in (31500, 75600)],
        WAN,
    ),
    Claim(
        "benchmarks/README.md",
        r"In the first row below pairwise kernels take # ms",
        lambda: column(MHLA, "forward_backward_ms", shape="deit", column="linear_kernel"),
        MHLA,
    ),
    Claim(
        "benchmarks/README.md",
        r"Its copy bandwidth is within # %",
        lambda: [
            100 * (max(x) / min(x) - 1)
            for x in ([z for y in ("auto", "released") for z in column(MHLA, "copy_tb_per_s", column=y)],)
        ],
        MHLA,
    ),
    Claim(
        "benchmarks/README.md",
        r"At 196 to 256 tokens MHLA runs at #x to #x of cuDNN\. At 1,024 to 31,500 tokens, with backward, it reaches "
        r"#x to #x of cuDNN, #x to #x of FlashAttention and #x to #x of the released maths\. At 65,536 tokens it "
        r"is #x of cuDNN and #x of FlashAttention",
        lambda: [
            *(of(over_cudnn(shape, time) for shape in SHORT for time in TIMES) for of in (min, max)),
            *(
                x
                for name in ("cudnn_packed", "flash_packed", "released")
                for x in over_mhla(name, *shapes_of(least=1024, most=31500))
            ),
            *(over_mhla(name, "sweep_65536")[0] for name in ("cudnn_packed", "flash_packed")),
        ],
        MHLA,
    ),
    Claim(
        "benchmarks/README.md",
        r"Linear attention by the same kernels takes #x to #x of MHLA's time.*compiled by PyTorch takes #x to #x\. At "
        r"512 tokens linear attention by our kernels takes #x",
        lambda: [
            *over_mhla("linear_kernel", *shapes_of("model")),
            *over_mhla("linear_compiled", *shapes_of("model")),
            over_mhla("linear_kernel", "sweep_512")[0],
        ],
        MHLA,
    ),
    Claim(
        "benchmarks/README.md",
        r"On packed views it is # % above at 512 tokens, # % at 1,024 \(sweep\) and # % at 4,096 in 64 blocks",
        lambda: [
            100 * (cell(MHLA, "peak_mib", shape=x, column="auto") / cell(MHLA, "peak_mib", shape=x, column=FLASH) - 1)
            for x in ("sweep_512", "sweep_1024", "k4")
        ],
        MHLA,
    ),
    Claim(
        "benchmarks/README.md",
        r"With replayed calls MHLA takes # to # ms with backward at 196 to 256 tokens, PyTorch's softmax # to #\. The "
        r"sweep had no replayed calls: MHLA takes # to # ms there",
        lambda: [
            *launched_ms(shapes_of("model", most=256), "auto"),
            *launched_ms(shapes_of("model", most=256), "cudnn_packed", FLASH),
            *launched_ms(shapes_of("sweep"), "auto"),
        ],
        MHLA,
    ),
    Claim(
        "benchmarks/README.md",
        r"FlexAttention takes #x and #x of MHLA's time, #x and #x of cuDNN's full softmax",
        lambda: [at_wan(x, other) for other in SPEEDS for x in ("flex_tile", "flex_token")],
        MHLA,
    ),
    Claim(
        "benchmarks/README.md",
        r"With backward it takes #x of MHLA's time in chunks, #x fused\. Causal MHLA took # ms in an earlier run "
        r"\(next table\), #x of the chunks' time",
        lambda: [
            *(at_wan(x) for x in ("fla_chunk", "fla_fused_chunk")),
            cell(CAUSAL, "forward_backward_ms", shape="wan", column="auto"),
            cell(CAUSAL, "forward_backward_ms", shape="wan", column="auto")
            / cell(MHLA, "forward_backward_ms", shape="wan", column="fla_chunk"),
        ],
        MHLA,
    ),
    Claim(
        "benchmarks/README.md",
        r"training runs at #x of softmax and #x of timm's, with #x of softmax's peak memory\. .*Windows of "
        r"Head-in-Head spread by # %\. Inference",
        lambda: [
            *whole_model(
                "ratio_to_baseline",
                "ratio_to_timm",
                "peak_ratio_to_baseline",
                model="deit_hih_small",
                compile=COMPILED,
            ),
            *spreads("train", COMPILED, model="deit_hih_small"),
        ],
        MODELS,
    ),
    Claim(
        "docs/wan.md",
        r"with a constant state, \[# GiB\]",
        lambda: [cell(WAN_STREAM, "state_gib", frames="1005")],
        WAN_STREAM,
    ),
    Claim(
        "docs/wan.md",
        r"FSDP2 trains at #x of one, context parallelism at #x",
        lambda: [cell(WAN_GPUS, "ratio", row=row) for row in ("fsdp2", "context")],
        WAN_GPUS,
    ),
    Claim(
        "docs/finetune.md",
        r"\| `deit_softmax_digits` \| # \| # \|",
        lambda: [3.6 * top1("softmax"), top1("softmax")],
        DEMOS,
    ),
    Claim(
        "docs/finetune.md",
        r"\| `deit_linear_digits` \| # \| # \|",
        lambda: [3.6 * top1("linear"), top1("linear")],
        DEMOS,
    ),
    Claim(
        "docs/finetune.md",
        r"\| `deit_mhla_digits` \| # \| # \|",
        lambda: [3.6 * top1("mhla"), top1("mhla")],
        DEMOS,
    ),
    Claim(
        "docs/finetune.md",
        r"\| `deit_hih_digits` \| # \| # \|",
        lambda: [3.6 * top1("hih"), top1("hih")],
        DEMOS,
    ),
    Claim(
        "docs/wan.md",
        r"\| 31,500, denoising forward \| # \| # \| # \(#, #\) \| # \(#, #\) \| #, # \|",
        lambda: wan_row(31500, "forward"),
        WAN,
    ),
    Claim(
        "docs/wan.md",
        r"\| 31,500, training step \| # \| # \| # \(#, #\) \| # \(#, #\) \| #, # \|",
        lambda: wan_row(31500, "train"),
        WAN,
    ),
    Claim(
        "docs/wan.md",
        r"\| 32,760, denoising forward \| # \| # \| # \(#, #\) \| # \(#, #\) \| #, # \|",
        lambda: wan_row(32760, "forward"),
        WAN,
    ),
    Claim(
        "docs/wan.md",
        r"\| 32,760, training step \| # \| # \| # \(#, #\) \| # \(#, #\) \| #, # \|",
        lambda: wan_row(32760, "train"),
        WAN,
    ),
    Claim(
        "docs/wan.md",
        r"\| 75,600, denoising forward \| # \| # \| # \(#, #\) \| # \(#, #\) \| #, # \|",
        lambda: wan_row(75600, "forward"),
        WAN,
    ),
    Claim(
        "docs/wan.md",
        r"\| 75,600, training step \| # \| # \| # \(#, #\) \| # \(#, #\) \| #, # \|",
        lambda: wan_row(75600, "train"),
        WAN,
    ),
    Claim(
        "docs/scale.md",
        r"DDP of DiT-XL/2 runs at #x of one GPU with 64 latents \(H100\) and #x with 320 \(H200\), "
        r"FSDP2 at #x and #x",
        lambda: [
            two_gpus(SCALE_H100, "ddp", 64),
            two_gpus(SCALE_H200, "ddp", 320),
            *(two_gpus(SCALE_H200, "fsdp2", n) for n in (64, 320)),
        ],
        SCALE_H200,
    ),
    Claim(
        "docs/scale.md",
        r"takes # instead of # ms on H100",
        lambda: [1000 * two_gpus(SCALE_H100, what, 64, "step_s") for what in ("kept", "fsdp2")],
        SCALE_H100,
    ),
    Claim(
        "docs/scale.md",
        r"FSDP2 needs #x of DDP's memory",
        lambda: [two_gpus(CHECKPOINTING, "fsdp2", 16, "peak_gib") / two_gpus(CHECKPOINTING, "ddp", 16, "peak_gib")],
        CHECKPOINTING,
    ),
    Claim(
        "docs/scale.md",
        r"Baselines differ for `kept` \(#\) and FSDP2 with 320 latents \(#\)",
        lambda: [
            two_gpus(SCALE_H100, "kept", 64, "imgs_per_s") / two_gpus(SCALE_H100, "kept", 64),
            *(two_gpus(SCALE_H200, "fsdp2", 320, "imgs_per_s") / two_gpus(SCALE_H200, "fsdp2", 320) for _ in (1,)),
        ],
        SCALE_H200,
    ),
    Claim(
        "docs/scale.md",
        r"31,500 tokens run at #x to #x, 262,144 still at #x",
        lambda: launched(),
        PARALLEL,
    ),
    Claim(
        "docs/using_models.md",
        r"trains at #x over MHLA against softmax",
        lambda: [cell(IHA, "ratio_to_baseline", model="deit_mhla_iha_small:head_mix_args.pseudo_heads=4")],
        IHA,
    ),
    Claim(
        "docs/video.md",
        r"\| digit \| # \| # \| # \|",
        lambda: [
            cell(DEMOS, "value", what=what, number="digit") for what in ("guidance 2", "guidance 3.5", "real clips")
        ],
        DEMOS,
    ),
    Claim(
        "docs/video.md",
        r"\| motion \| # \| # \| # \|",
        lambda: [
            cell(DEMOS, "value", what=what, number="motion") for what in ("guidance 2", "guidance 3.5", "real clips")
        ],
        DEMOS,
    ),
    Claim(
        "docs/video.md",
        r"\| direction \| # \| # \| # \|",
        lambda: [
            cell(DEMOS, "value", what=what, number="direction") for what in ("guidance 2", "guidance 3.5", "real clips")
        ],
        DEMOS,
    ),
    Claim(
        "docs/video.md",
        r"hybrid loses # points of the digit \(# to # %\), MHLA #, linear attention #",
        lambda: [
            faded("hybrid-extends"),
            clips("hybrid-extends", "digit_percent", 16),
            clips("hybrid-extends", "digit_percent", 64, "windows"),
            faded("mhla-extends"),
            faded("linear-extends"),
        ],
        CLIPS,
    ),
    Claim(
        "docs/evaluation.md",
        r"has FID #\.",
        lambda: [cell(DEMOS, "value", what="even digits, odd digits", number="fid")],
        DEMOS,
    ),
    Claim(
        "docs/datasets.md",
        r"validation against the test split has FID #",
        lambda: [large("fid", "validation pictures")],
        LARGE,
    ),
    Claim(
        "experiments/attention_matrices/README.md",
        r"all layers but layer 0 \(# against #\)",
        lambda: [of_layers("mhla", 0), of_layers("softmax", 0)],
        RANK,
    ),
    Claim(
        "experiments/README.md",
        r"rank # of softmax and MHLA, # of linear attention, # of Head-in-Head",
        lambda: [of_layers("softmax"), of_layers("linear"), of_layers("hih")],
        RANK,
    ),
    Claim(
        "experiments/README.md",
        r"with CPE # to # %, Head-in-Head # %",
        lambda: [*halves("True", "softmax", "linear", "mhla"), *halves("True", "hih")[:1]],
        DIGITS,
    ),
    Claim(
        "experiments/README.md",
        r"classifier # %, generator FID # on",
        lambda: [
            cell(DEMOS, "value", what="best epoch", number="top1_percent"),
            cell(DEMOS, "value", number="fid", what="samples, all digits"),
        ],
        DEMOS,
    ),
    Claim(
        "experiments/README.md",
        r"#x of plain softmax, #x of plain MHLA",
        lambda: [stable_ratio("softmax"), stable_ratio("mhla")],
        RATES,
    ),
    Claim(
        "experiments/README.md",
        r"rank 1 recalls # %, rank 2 all",
        lambda: recalled(2, 1)[:1],
        RECALL,
    ),
    Claim(
        "experiments/README.md",
        r"softmax moves best \(# %\), hybrid shows the digit best \(# %\)",
        lambda: [clips("softmax", "motion_percent", 16), clips("hybrid", "digit_percent", 16)],
        CLIPS,
    ),
    Claim(
        "experiments/README.md",
        r"FID # softmax, # MHLA, # linear attention",
        lambda: [fid("softmax"), fid("mhla"), fid("linear")],
        EMOJI,
    ),
    Claim(
        "experiments/compress/README.md",
        r"\(# ± # % with softmax, # ± # with MHLA\)",
        lambda: [
            x
            for core in ("softmax", "mhla")
            for x in mean_and_deviation(COMPRESS, "base_top1_percent", core=core, component_heads="8")
        ],
        COMPRESS,
    ),
    Claim(
        "experiments/compress/README.md",
        r"\(# and # points, within the spread\), a quarter # and # points",
        lambda: [recovered("softmax", 4), recovered("mhla", 4), -recovered("softmax", 2), -recovered("mhla", 2)],
        COMPRESS,
    ),
    Claim(
        "experiments/compress/README.md",
        r"for as long reach # and # %",
        lambda: [compressed(core, 4, "scratch_top1_percent") for core in ("softmax", "mhla")],
        COMPRESS,
    ),
    Claim(
        "experiments/compress/README.md",
        r"half of the heads cost # and # points",
        lambda: [dropped("softmax", 4), dropped("mhla", 4)],
        COMPRESS,
    ),
    Claim(
        "experiments/compress/README.md",
        r"they miss # % of keys",
        lambda: [statistics.mean(column(COMPRESS, "keys_error_percent", component_heads="4"))],
        COMPRESS,
    ),
    Claim(
        "experiments/compress/README.md",
        r"Parameters fall by # %",
        lambda: [100 * (1 - compressed("mhla", 4, "parameters") / compressed("mhla", 8, "parameters"))],
        COMPRESS,
    ),
    Claim(
        "experiments/recall/README.md",
        r"Two places: rank 1 recalls # ± # %",
        lambda: recalled(2, 1),
        RECALL,
    ),
    Claim(
        "experiments/recall/README.md",
        r"Four places: #, # and # % for ranks",
        lambda: [recalled(4, rank)[0] for rank in (1, 2, 4)],
        RECALL,
    ),
    Claim(
        "experiments/counting/README.md",
        r"\(P = 4: # %\) match sixteen plain ones \(# %\)",
        lambda: [counted("softmax", 5, 4, 4), counted("softmax", 5, 1, 16)],
        COUNTING,
    ),
    Claim(
        "experiments/counting/README.md",
        r"takes # MFLOP per image for plain softmax at any H, and # \(P = 2\) or # \(P = 4\) for four",
        lambda: [counting_flops(1, 4), counting_flops(2, 4), counting_flops(4, 4)],
        COUNTING,
    ),
    Claim(
        "experiments/emoji/README.md",
        r"validation FID of #, #, # and #",
        lambda: [large("fid", split="validation", guidance=x) for x in ("1", "1.5", "2", "3")],
        LARGE,
    ),
    Claim(
        "experiments/emoji/README.md",
        r"People are memorised: # % of the samples \(#\)",
        lambda: [large("copied_percent"), 23.44 * large("copied_percent")],
        LARGE,
    ),
    Claim(
        "experiments/moving_digits/README.md",
        r"falls by # % with MHLA and grows by # % with softmax",
        lambda: [-growth_of_time("mhla"), growth_of_time("softmax")],
        CLIPS,
    ),
    Claim(
        "experiments/moving_digits/README.md",
        r"Head-in-Head takes #x the time of a step",
        lambda: [clips("hih", "ms", 16, "step") / clips("softmax", "ms", 16, "step")],
        CLIPS,
    ),
    Claim(
        "experiments/moving_digits/README.md",
        r"MHLA's FVD is # and # below its teacher's, the hybrid's # below and # above",
        lambda: [distilled("mhla", 0), distilled("mhla", 1), distilled("hybrid", 0), -distilled("hybrid", 1)],
        DISTILLED,
    ),
    Claim(
        "experiments/emoji_classifiers/README.md",
        r"by # points without CPE and # with it on 9 groups, by # and # on 37 subgroups",
        lambda: [lead(path, cpe) for path in ("groups", "subgroups") for cpe in (False, True)],
        JUDGES,
    ),
    Claim(
        "experiments/emoji_classifiers/README.md",
        r"by # \(validation\), # \(top-1\) and # points \(balanced\), and softmax by # \(balanced\)",
        lambda: (
            [
                gain("subgroups", "mhla", "linear", x)
                for x in ("val_percent", "test_top1_percent", "test_balanced_percent")
            ]
            + [gain("subgroups", "mhla", "softmax")]
        ),
        JUDGES,
    ),
    Claim(
        "experiments/emoji_classifiers/README.md",
        r"and # and # points of balanced accuracy behind softmax",
        lambda: [-gain("subgroups", "mhla+CPE", "softmax+CPE"), -gain("subgroups", "mhla+CPE", "linear+CPE")],
        JUDGES,
    ),
    Claim(
        "experiments/emoji_classifiers/README.md",
        r"CPE adds # points of validation and # of balanced accuracy, the gate # and # \(noise\), both # and #",
        lambda: [
            gain("modules", x, "plain", y)
            for x in ("CPE", "gate", "CPE+gate")
            for y in ("val_percent", "test_balanced_percent")
        ],
        JUDGES,
    ),
    Claim(
        "experiments/emoji_classifiers/README.md",
        r"uniform start loses # points of validation, a kept uniform mixing #",
        lambda: [-gain("modules", x, "plain", "val_percent") for x in ("plain-uniform", "plain-uniform-kept")],
        JUDGES,
    ),
    Claim(
        "experiments/emoji_classifiers/README.md",
        r"differ by rounding alone: #, # and # % of validation",
        lambda: [
            chosen("modules", "plain-uniform-kept", "val_percent"),
            chosen("block_count", "M=1", "val_percent"),
            chosen("length", "linear-256", "val_percent"),
        ],
        JUDGES,
    ),
    Claim(
        "experiments/emoji_classifiers/README.md",
        r"validation rises by # points and balanced accuracy by #",
        lambda: [gain("block_count", "M=16", "M=1", x) for x in ("val_percent", "test_balanced_percent")],
        JUDGES,
    ),
    Claim(
        "experiments/emoji_classifiers/README.md",
        r"linear attention lose #, # and # points of balanced accuracy",
        lambda: [-gain("length", f"{x}-1024", f"{x}-256") for x in ("softmax", "mhla", "linear")],
        JUDGES,
    ),
    Claim(
        "benchmarks/README.md",
        r"The weak spot is 512 tokens: #x of cuDNN forward, #x with backward",
        lambda: [
            cell(MHLA, x, shape="sweep_512", column="cudnn_packed") / cell(MHLA, x, shape="sweep_512", column="auto")
            for x in ("forward_ms", "forward_backward_ms")
        ],
        MHLA,
    ),
    Claim(
        "experiments/stable_rates/README.md",
        r"bears #x the rate of plain softmax \(# against #\) and #x of plain MHLA \(# against #\)",
        lambda: [
            number
            for core in ("softmax", "mhla")
            for number in (stable_ratio(core), stable_rate(core, "mea"), stable_rate(core, "plain"))
        ],
        RATES,
    ),
    *(
        Claim(
            "experiments/head_mixes/README.md",
            rf"{heading}.*?\| {core} \| # ± #{3 * r' . # ± # .# ± #.'} \|",
            partial(mixes, task, core),
            MIXES,
        )
        for task, heading in (("digits", "Digits without CPE"), ("canvas", "Canvases with CPE"))
        for core in ("softmax", "linear", "mhla", "hih")
    ),
    Claim(
        "docs/scale.md",
        r"launch overhead: # ms a block \(DiT-XL/2, 64 latents, H200\) where one GPU needs #\.",
        lambda: [1000 / 28 * two_gpus(SCALE_H200, what, 64, "step_s") for what in ("fsdp2", "one")],
        SCALE_H200,
    ),
    Claim(
        "experiments/swap/README.md",
        r"at both sizes, in # to # minutes",
        lambda: sorted(x for row in ("mhla", "hybrid") for x in column(SWAP, "minutes", row=row, stage="features"))[
            ::3
        ],
        SWAP,
    ),
    Claim(
        "experiments/swap/README.md",
        r"the order of 224 px: hybrid #, MHLA #, linear attention #, Head-in-Head #\.",
        lambda: [
            cell(SWAP, "cosine_patches", size="518", row=row, stage="features")
            for row in ("hybrid", "mhla", "linear", "hih")
        ],
        SWAP,
    ),
    Claim(
        "experiments/swap/README.md",
        r"k-NN of patches at 518 px \(#, teacher #\)",
        lambda: [
            cell(SWAP, "knn_patch_mean", size="518", row=row, stage=stage)
            for row, stage in (("hih", "features"), ("teacher", ""))
        ],
        SWAP,
    ),
    Claim(
        "experiments/swap/README.md",
        r"of the class token of MHLA from # to # %, of the hybrid from # to # %\. Head-in-Head ends at a cosine of #, "
        r".* k-NN of the class token from # to # %",
        lambda: [
            *(
                cell(SWAP_EMOJI, "linear_class_token", row=row, stage=stage)
                for row in ("mhla", "hybrid")
                for stage in ("attention", "features")
            ),
            cell(SWAP_EMOJI, "cosine_patches", row="hih", stage="features"),
            *(cell(SWAP_EMOJI, "knn_class_token", row="hih", stage=stage) for stage in ("attention", "features")),
        ],
        SWAP_EMOJI,
    ),
    Claim(
        "experiments/swap/README.md",
        r"MHLA by k-NN of patches from # to # %, teacher #\.",
        lambda: [
            *(cell(SWAP_EMOJI, "knn_patch_mean", row="mhla", stage=stage) for stage in ("attention", "features")),
            cell(SWAP_EMOJI, "knn_patch_mean", row="teacher"),
        ],
        SWAP_EMOJI,
    ),
    Claim(
        "experiments/swap/README.md",
        r"or above it \(cosine #\), the hybrid within .3 or above it \(#\): bars met, in # to # minutes",
        lambda: [
            *(cell(SWAP_EMOJI, "cosine_patches", row=row, stage="features") for row in ("mhla", "hybrid")),
            *(cell(SWAP_EMOJI, "minutes", row=row, stage="features") for row in ("hybrid", "mhla")),
        ],
        SWAP_EMOJI,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"FVD falls from # to # for softmax, from # to # for MHLA\..*FVD of the best is #, of other real clips #\.",
        lambda: [
            cell(EMOJI_CLIPS, "fvd", row=row, split="test")
            for row in ("softmax", "softmax-cpe", "mhla", "mhla-cpe", "mhla-cpe", "validation pictures")
        ],
        EMOJI_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"is # in other real clips, # for softmax and # for the hybrid, but # for MHLA and # for linear attention",
        lambda: [
            cell(EMOJI_CLIPS, "loop", row=row, split="test")
            for row in ("validation pictures", "softmax-cpe", "hybrid-cpe", "mhla-cpe", "linear-cpe")
        ],
        EMOJI_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"within what one seed tells: # for MHLA, # for softmax, # for the hybrid, # for linear attention, # for other "
        r"real clips\. It falls by # to # %",
        lambda: [
            *(longer(row, "fvd")[1] for row in ("mhla-cpe", "softmax-cpe", "hybrid-cpe", "linear-cpe", REAL_CLIPS)),
            *sorted(100 * (1 - after / before) for before, after in (longer(row, "fvd") for row in LONGER))[::3],
        ],
        LONG_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"lower the FVD of all four by # to # %",
        lambda: sorted(100 * (1 - after / before) for before, after in (longer(row, "fvd") for row in LONGER))[::3],
        LONG_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"closure still differs: # for softmax and # for the hybrid, near the # of other real clips, but # for "
        r"MHLA and # for linear attention\. After 60 epochs it was #, #, # and #\.",
        lambda: [
            *(longer(row, "loop")[1] for row in (*LONGER[:2], REAL_CLIPS, *LONGER[2:])),
            *(longer(row, "loop")[0] for row in LONGER),
        ],
        LONG_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"accepts # % of MHLA's clips and # % of linear attention's, # % of softmax's and # % of the hybrid's\. Of "
        r"other real clips it accepts # %",
        lambda: [longer(row, "top1_percent")[1] for row in (*LONGER[2:], *LONGER[:2], REAL_CLIPS)],
        LONG_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"by one seed: # % for softmax, # % for the hybrid, # % for MHLA, # % for linear attention, other real clips "
        r"#\.",
        lambda: [longer(row, "recall_percent")[1] for row in (*LONGER, REAL_CLIPS)],
        LONG_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"any held-out one are # % \(softmax\), # % \(hybrid\), # % \(MHLA\) and # % \(linear attention\), real clips "
        r"#\. After 60 epochs it was #, #, # and # %",
        lambda: [
            *(longer(row, "nearer_percent")[1] for row in (*LONGER, REAL_CLIPS)),
            *(longer(row, "nearer_percent")[0] for row in LONGER),
        ],
        LONG_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"FVD is # for linear attention, # for MHLA, # for the hybrid and # for softmax, with # for other real clips\. "
        r"At 64 px in pixels the four had # to #, and KVD # to # where it is # to # here\.",
        lambda: [
            *(cell(LATENT_CLIPS, "fvd", row=row, split="test") for row in (*LONGER[::-1], REAL_CLIPS)),
            *sorted(longer(row, "fvd")[0] for row in LONGER)[::3],
            *sorted(longer(row, "kvd")[0] for row in LONGER)[::3],
            *sorted(cell(LATENT_CLIPS, "kvd", row=row, split="test") for row in LONGER)[::3],
        ],
        LATENT_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"as before: # for softmax and # for the hybrid, # for MHLA and # for linear attention, other real clips #\.",
        lambda: [cell(LATENT_CLIPS, "loop", row=row, split="test") for row in (*LONGER, REAL_CLIPS)],
        LATENT_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"where latents have #\.",
        lambda: [cell(LATENT_CLIPS, "fvd", row="mhla-cpe", split="validation")],
        LATENT_CLIPS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"FVD rises from # to # for softmax and from # to # for MHLA",
        lambda: [cell(path, "fvd", row=row, split="test") for row in LONGER[::2] for path in (EMOJI_CLIPS, STILLS)],
        STILLS,
    ),
    Claim(
        "experiments/animated_emoji/README.md",
        r"held-out one are # and # % of the samples, where they were # and # %",
        lambda: [
            cell(path, "nearer_percent", row=row, split="test") for path in (STILLS, EMOJI_CLIPS) for row in LONGER[::2]
        ],
        STILLS,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"by #, # and # points, with deviations of # to #\.",
        lambda: [
            *(clothes(a)[0] - clothes(b)[0] for a, b in itertools.pairwise(CLOTHES_ORDER)),
            *sorted(clothes(core)[1] for core in CLOTHES_ORDER)[::3],
        ],
        CLOTHES_CORES,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"# points ahead of MHLA, and MHLA # ahead of linear attention\. Linear attention is # points ahead of softmax",
        lambda: [clothes(f"{a}+CPE")[0] - clothes(f"{b}+CPE")[0] for a, b in itertools.pairwise(CLOTHES_WITH_CPE)],
        CLOTHES_CORES,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"CPE adds # points to Head-in-Head, # to MHLA, # to softmax and # to linear",
        lambda: [clothes(f"{core}+CPE")[0] - clothes(core)[0] for core in CLOTHES_ORDER],
        CLOTHES_CORES,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"this convolution adds # of the # points by which Head-in-Head leads MHLA\. Without either, Head-in-Head is # "
        r"points ahead of MHLA without CPE and # behind MHLA with CPE",
        lambda: [
            clothes("hih")[0] - clothes("hih-no-conv")[0],
            clothes("hih")[0] - clothes("mhla")[0],
            clothes("hih-no-conv")[0] - clothes("mhla")[0],
            clothes("mhla+CPE")[0] - clothes("hih-no-conv")[0],
        ],
        CLOTHES_CORES,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"the convolution of its core Head-in-Head has # %\.",
        lambda: [clothes("hih-no-conv")[0]],
        CLOTHES_CORES,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"has # %, MHLA # %, softmax # % and linear attention # %\. With CPE Head-in-Head has # %, MHLA # %, linear"
        r" attention # % and softmax # %\.",
        lambda: [
            *(clothes(core)[0] for core in CLOTHES_ORDER),
            *(clothes(f"{core}+CPE")[0] for core in CLOTHES_WITH_CPE),
        ],
        CLOTHES_CORES,
    ),
    Claim(
        "experiments/README.md",
        r"with CPE Head-in-Head #, MHLA #, linear attention #, softmax # %",
        lambda: [clothes(f"{core}+CPE")[0] for core in CLOTHES_WITH_CPE],
        CLOTHES_CORES,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"models: # with Head-in-Head, # softmax, # MHLA, # linear attention\. "
        r"With 1\.5 it was # to #, with 2 # to #\.",
        lambda: [
            *(drawn_clothes(core, "fid", "validation") for core in CLOTHES_DRAWN_ORDER),
            *(
                of(drawn_clothes(core, "fid", "validation", scale) for core in CLOTHES_ORDER)
                for scale in ("1.5", "2")
                for of in (min, max)
            ),
        ],
        CLOTHES_DRAWN,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"FID is # with Head-in-Head, # softmax, # MHLA, # linear attention\.",
        lambda: [drawn_clothes(core, "fid", "test") for core in CLOTHES_DRAWN_ORDER],
        CLOTHES_DRAWN,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"have a FID of #: no model is at the floor\. Softmax covers # % .*, Head-in-Head # %, MHLA # %, linear "
        r"attention # %\. .* - Of the samples # to # % .* # to # % count as copied",
        lambda: [
            cell(CLOTHES_DRAWN, "fid", row="validation pictures"),
            *(drawn_clothes(core, "recall_percent", "test") for core in ("softmax", "hih", "mhla", "linear")),
            *(
                of(drawn_clothes(core, f"{name}_percent", "test") for core in CLOTHES_ORDER)
                for name in ("nearer", "copied")
                for of in (min, max)
            ),
        ],
        CLOTHES_DRAWN,
    ),
    Claim(
        "experiments/README.md",
        r"the same after 2\.5 times as many steps \(FVD # to #\)",
        lambda: sorted(longer(row, "fvd")[1] for row in LONGER)[::3],
        LONG_CLIPS,
    ),
    Claim(
        "experiments/fashion_mnist/README.md",
        r"tested once, mean # ± # %",
        partial(mean_and_deviation, CLOTHES, "test_top1_percent"),
        CLOTHES,
    ),
    *(
        Claim(document, text, lambda: [mean(CLOTHES, "test_top1_percent")], CLOTHES)
        for document, text in (
            ("experiments/fashion_mnist/README.md", r"the recipe reaches # % of the test split"),
            ("experiments/README.md", r"MHLA # % of the test split"),
        )
    ),
    Claim(
        "experiments/README.md",
        r"with CPE all alike \(FVD # to #\)",
        lambda: [cell(EMOJI_CLIPS, "fvd", row=row, split="test") for row in ("mhla-cpe", "softmax-cpe")],
        EMOJI_CLIPS,
    ),
    Claim(
        "experiments/emoji/README.md",
        r"as the test split, here # to # %",
        lambda: sorted(mean(EMOJI, "nearer_percent", row=row, split="test") for row in ("softmax", "mhla", "linear"))[
            ::2
        ],
        EMOJI,
    ),
    Claim(
        "experiments/stable_rates/README.md",
        r"converged softmax \(# % after 80 epochs\)",
        lambda: mixed("digits", "softmax")[:1],
        MIXES,
    ),
    Claim(
        "experiments/head_mixes/README.md",
        r"MEA costs # % of operations and # % of parameters",
        lambda: [100 * (mixed_size("mea", name) / mixed_size("plain", name) - 1) for name in ("flops", "parameters")],
        MIXES,
    ),
    Claim(
        "docs/datasets.md",
        r"# % of the test split are people",
        lambda: [mean(f"{JUDGES}/groups.csv", "floor_percent")],
        f"{JUDGES}/groups.csv",
    ),
    Claim(
        "docs/video.md",
        r"they lose # to # points",
        lambda: sorted(map(faded, ("hybrid", "mhla", "linear")))[::2],
        CLIPS,
    ),
    Claim(
        "experiments/counting/README.md",
        r"Parameters differ by at most # %",
        lambda: [100 * (max(parameters) / min(parameters) - 1) for parameters in (counting_parameters(),)],
        COUNTING,
    ),
    Claim(
        "experiments/emoji_classifiers/README.md",
        r"MHLA from # to #, softmax from # to #, linear attention from # to #",
        lambda: [rank for core in ("mhla", "softmax", "linear") for rank in ranks(core)],
        f"{JUDGES}/rank_curves.csv",
    ),
    Claim(
        "benchmarks/README.md",
        r"a step of `dit_mhla_s_2` takes # ms, with EMA #, the bare step #\.",
        lambda: [
            cell(TRAINING, "step_ms", compile="reduce-overhead", what=what)
            for what in ("no averaging", "averaging", "bare step")
        ],
        TRAINING,
    ),
    *(
        Claim(
            "benchmarks/README.md",
            rf"\| `{model}` \| [^|]* \| # \(#x\) \| # \(#x\) \|",
            partial(training, model),
            TRAINING,
        )
        for model in ("deit_mhla_small", "dit_mhla_s_2")
    ),
)


def all_figures() -> list[Figure]:
    """Return all figures that are recomputed, in the order of the claims."""
    return [figure for claim in CLAIMS for figure in figures(claim)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="draw others (default: 0)")
    drawn = random.Random(parser.parse_args().seed).sample(all_figures(), DRAWN)
    for figure in drawn:
        verdict = "" if figure.is_right else "  WRONG"
        print(f"{figure.printed:>8} {figure.number:>14.6g}  {figure.document}  {figure.source}{verdict}")
    raise SystemExit(not all(figure.is_right for figure in drawn))


if __name__ == "__main__":
    main()
