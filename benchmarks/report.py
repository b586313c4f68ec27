"""Tables and plots of the benchmarks, from the CSV files in `results`, and of the supported versions and GPUs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import plan_scale, plots
from headmix_lab.measuring import RESULTS
from headmix_lab.tables import markdown_table, read_csv, recorded
from headmix_vision.doctor.machine import COMPILED, KNOWN_GPUS, MEASURED

FOLDER = RESULTS
CLAIMS = recorded(
    FOLDER,
    {
        "models_h200": "whole models against their equals with softmax",
        "models_h100": "the same on an H100",
        "mhla_h200": "MHLA's speed and memory",
        "hih_h200": "Head-in-Head's speed and memory",
        "models_deit_h200": "DeiT-S, MHLA against softmax",
        "wan_h200": "Wan's shape, MHLA against softmax",
        "wan_gpus_h200": "Wan's shape with MHLA on two GPUs",
        "wan_stream_h200": "Wan's shape with causal MHLA, as a stream",
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
        "mhla_cpu": "MHLA's PyTorch implementation on a CPU",
    },
)
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
LINEAR_COLUMNS = {"linear_kernel": "linear", "fla_fused_chunk": "causal linear, fla"}
VIDEO_COLUMNS = {
    "auto": "MHLA, 150 blocks",
    "linear_kernel": "linear, our kernels",
    "linear_compiled": "linear, compiled PyTorch",
    "fla_fused_chunk": "linear, causal, flash-linear-attention, fused",
    "fla_chunk": "linear, causal, flash-linear-attention, chunks",
    "cudnn_packed": "softmax, cuDNN",
    "flash_packed": "softmax, FlashAttention 2",
    "flash4": "softmax, FlashAttention 4",
    "flex_tile": "sliding tiles, FlexAttention",
    "flex_token": "sliding window, FlexAttention",
    "natten": "sliding window, NATTEN",
}
TIMES = ("forward_ms", "forward_backward_ms")
HIH_COLUMNS = {
    "r1": "r = 1",
    "r2": "r = 2",
    "r4": "r = 4",
    "r8": "r = 8",
    "fla": "fla, r = 1",
    "torch_r1": "PyTorch, r = 1",
    "torch_r4": "PyTorch, r = 4",
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
MEA_COLUMNS = ["core alone", "MEA, folded", "each key and value", "three component heads"]
MODEL_COLUMNS = {
    "softmax": "softmax",
    "mhla": "MHLA",
    "linear": "linear",
    "hih": "Head-in-Head",
    "timm": "timm's DeiT-S",
}
MODES = {"train": "training", "inference": "inference", "inference_bf16": "inference, weights in bf16"}
COMPILE_MODES = {"none": "eager", "replayed": "eager, calls replayed", "default": "compiled"}
COMPILE_MODES |= {"replayed default": "compiled, calls replayed", "reduce-overhead": "CUDA graphs"}
COMPILE_MODES |= {"blocks": "blocks compiled", "replayed blocks": "blocks compiled, calls replayed"}
WAN_TOKENS = ("31500", "32760", "75600")
WAN_MODES = {"forward": "denoising forward", "train": "training step"}
GLUON = "all, Gluon included"
OLD_ASSEMBLER = "portable ones, if `TRITON_PTXAS_PATH` names the ptxas of CUDA 12.9 or newer"
RUN_ON_GPUS = "run on H100 and H200"
COMPILED_ONLY = "compiled for Hopper, not run"
Row = dict[str, str]


class Pair(NamedTuple):
    """Release of torch with the Triton that it installs.

    Attributes:
        hopper: kernels of this package that serve on Hopper GPUs.
        evidence: how it is known that they work.
    """

    torch: str
    triton: str
    hopper: str
    evidence: str


# `make compile-kernels-quick` compiles the kernels, with another Triton on PYTHONPATH if there is one.
PAIRS = (
    Pair("2.9", "3.5", OLD_ASSEMBLER, COMPILED_ONLY),
    Pair("2.10", "3.6", GLUON, COMPILED_ONLY),
    Pair("2.11", "3.6", GLUON, RUN_ON_GPUS),
    Pair("2.12", "3.7", GLUON, COMPILED_ONLY),
    Pair("2.13", "3.7", GLUON, COMPILED_ONLY),
    Pair("2.14", "3.8", GLUON, COMPILED_ONLY),
    Pair("2.15", "3.9", GLUON, "run on H100 beside torch 2.11"),
)


def read(name: str, **wanted: str) -> list[Row]:
    """Read the rows of a results file with these texts in their columns."""
    return read_csv(RESULTS / f"{name}.csv", **wanted)


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


def mhla(name: str, last: str) -> str:
    """Times of the op at the shapes of models, and over the floor, beside softmax and further columns that were run."""
    found = {(row["shape"], row["column"]): row for row in read(name, group="model")}
    others = {"flash_packed": "FlashAttention", "cudnn_packed": "cuDNN", last: last} | LINEAR_COLUMNS
    others = {column: title for column, title in others.items() if ("deit", column) in found}
    lines = []
    for shape, title in MHLA_SHAPES.items():
        ours = [over_floor(found[shape, "auto"], time) for time in ("forward", "forward_backward")]
        lines.append([title, *ours, *(both(found[shape, column]) for column in others)])
    header = ["shape (B·H·N·D, blocks)", "forward", "forward + backward"]
    return markdown_table([*header, *(f"{title} f / f+b" for title in others.values())], lines)


def video() -> str:
    """Attentions that were run at Wan's shape: times, speed of MHLA over them and peak memory."""
    rows, lines = {row["column"]: row for row in read("mhla_h200", shape="wan")}, []
    for column, name in VIDEO_COLUMNS.items():
        if (row := rows.get(column)) and row["forward_ms"]:
            ratios = [f"{float(row[x]) / float(rows['auto'][x]):.2f}" for x in TIMES if row[x]]
            lines.append([name, both(row), " / ".join(ratios), f"{float(row['peak_mib'] or 0):,.0f}"])
    return markdown_table(["attention", "forward / forward + backward", "over MHLA", "peak MiB"], lines)


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
            cells += [both(row) for row in found]
            cells.append(" / ".join(f"{float(softmax[time]) / float(ours[time]):.2f}" for time in TIMES))
        lines.append(cells)
    header = ["tokens, P", "op: MHLA", "softmax, cuDNN", "softmax, FlashAttention", "ratio"]
    return markdown_table([*header, "layer: MHLA", "softmax", "ratio"], lines)


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


def models(name: str, columns: Sequence[str], pixels: int = 1, baselines: Sequence[str] = ()) -> str:
    """Whole models: the baseline, then others with their ratios to it in speed and in peak memory, where counted.

    ``pixels`` is the side of one place of the grid in pixels: 8 for latents. ``baselines`` are named where they differ.
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
        title = f"{pixels * int(first['size']):,} px, batch {first['batch']}, {MODES[first['mode']]}{graphs}"
        title = ", ".join([*baselines[len(lines) : len(lines) + 1], title])
        lines.append([title, *cells, *[""] * (len(columns) - len(cells))])
    return markdown_table(["images/s", *columns], lines)


def whole_models() -> str:
    """Whole models beside their equals with softmax and timm's: images/s and ratios, of the rows that were run."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for name in (name for name in ("models_h200", "models_h100") if name in CLAIMS):
        for row in read(name):
            words, given = row["model"].partition(":")[0].split("_"), row["model"].partition(":")[2]
            cpe = ", CPE" if "cpe=True" in given else ""
            kind = "DeiT-S" if words[0] == "deit" else "DiT-" + "/".join(words[-2:]).upper()
            key = (row["device"].split()[1], kind + cpe, row["size"], row["batch"], row["mode"], row["compile"])
            core = next((word for word in words if word in MODEL_COLUMNS), "timm")
            found.setdefault(key, {})[core] = speed_cell(row)
    lines, shown = [], [core for core in MODEL_COLUMNS if any(core in cells for cells in found.values())]
    for (gpu, kind, size, batch, mode, compile_mode), cells in sorted(found.items(), key=_place):
        side = int(size.split("x")[-1]) * (1 if "DeiT" in kind else 8)
        frames = f"{size.split('x')[0]} x " if "x" in size else ""
        setting = f"{gpu}, {kind}, {frames}{side:,} px, batch {batch}, {MODES[mode]}, {COMPILE_MODES[compile_mode]}"
        lines.append([setting, *(cells.get(core, "") for core in shown)])
    return markdown_table(["images/s", *(MODEL_COLUMNS[core] for core in shown)], lines)


def _place(item: tuple[tuple[str, ...], object]) -> tuple[object, ...]:
    gpu, kind, size, batch, mode, compile_mode = item[0]
    tokens, way = [int(x) for x in size.split("x")], list(COMPILE_MODES).index(compile_mode)
    return gpu, kind.partition(",")[0], tokens, -int(batch), kind, mode != "train", way


def speed_cell(row: Row) -> str:
    """Images per second, and ratios to the equal softmax, of CPE to softmax without it, and to timm's DeiT."""
    if not row["imgs_per_s"]:
        return row["note"]
    names = ["ratio_to_baseline", *(["ratio_to_plain"] if "cpe=True" in row["model"] else []), "ratio_to_timm"]
    names = [name for name in names if row["baseline"] != row["model"] or name != "ratio_to_baseline"]
    ratios = [f"{float(row[name]):.2f}" for name in names if row[name]]
    speed = float(row["imgs_per_s"])
    return f"{speed:,.{int(speed < 1000)}f}" + (f" ({', '.join(ratios)})" if ratios else "")


def mhla_cpu() -> str:
    """Times on a CPU, and their ratios to the times at a quarter of the tokens."""
    before, lines = None, []
    for row in read("mhla_cpu"):
        times = [float(row["forward_ms"]), float(row["both_ms"])]
        ratios = [f"{now / then:.2f}" for now, then in zip(times, before, strict=True)] if before else ["", ""]
        lines.append([f"{int(row['tokens']):,}", *(f"{time:.3g}" for time in times), *ratios])
        before = times
    header = ["tokens", "forward, ms", "forward + backward, ms", "ratio forward", "ratio forward + backward"]
    return markdown_table(header, lines)


def scale() -> str:
    """Training on one GPU and on two: samples/s, ratio to one GPU and peak memory of a GPU, by way."""
    ways, found = ("one", "ddp", "fsdp2", "kept"), dict[str, dict[str, str]]()
    for name in ("scale_h100", "scale_h200", "scale_checkpointing_h100"):
        rows = read(name)
        timed = {(row["model"], row["batch"]) for row in rows if row["what"] == "one"}  # others ran side by side
        for row in rows:
            model = f"{row['model']}, {row['batch']}, {row['device'].split()[1]}"
            cells = found.setdefault(model + (", checkpointing" if "checkpointing" in name else ""), {})
            speed = f"{float(row['imgs_per_s']):,.0f} ({float(row['ratio']):.2f}x)"
            is_timed = (row["model"], row["batch"]) in timed
            cells[row["what"]] = f"{speed if is_timed else '–'}, {float(row['peak_gib']):.1f}"
    lines = [[model, *(cells.get(way, "") for way in ways)] for model, cells in found.items()]
    return markdown_table(["model, samples a GPU", "one GPU", "two: DDP", "two: FSDP2", "two: kept"], lines)


def context_parallel() -> str:
    """One GPU with all tokens against several: op, layer and model, and what a GPU sends in a layer."""
    lines = []
    rows = {(x["tokens"], x["blocks"], x["ranks"], x["pass"], x["what"]): x for x in read("context_parallel_h200")}
    for tokens, blocks, ranks, mode in dict.fromkeys(key[:4] for key in rows):
        found = [rows[tokens, blocks, ranks, mode, what] for what in ("mhla", "layer", "model")]
        sent = sum(int(found[1][name]) for name in found[1] if name.endswith("_bytes"))
        cells = [
            f"{float(row['one_ms']):.2f} / {float(row['spread_ms']):.2f} ({float(row['ratio']):.2f}x)" for row in found
        ]
        named = {"forward": "forward", "both": "forward + backward"}[mode]
        lines.append([f"{int(tokens):,}, {blocks}", ranks, named, *cells, f"{sent / 1e6:.0f} MB"])
    return markdown_table(["tokens, blocks", "GPUs", "", "MHLA", "layer", "model", "sent in a layer"], lines)


def gpus() -> str:
    """The GPUs by what is known of the kernels there, with their compute capability or architecture."""
    lines = [
        [status, ", ".join(f"{x.cards} ({name})" for name, x in KNOWN_GPUS.items() if x.status == status)]
        for status in (MEASURED, COMPILED)
    ]
    return markdown_table(["kernels", "GPUs"], [*lines, ["PyTorch implementation instead", "older ones, CPU"]])


def versions() -> str:
    """The supported pairs of torch and Triton, and how it is known that the kernels work with them."""
    return markdown_table(["torch", "Triton", "kernels on Hopper", "known"], PAIRS)


TABLES: dict[str, Callable[[], str]] = {
    "versions": versions,
    "gpus": gpus,
    "mhla": partial(mhla, "mhla_h200", "released"),
    "mhla_causal": partial(mhla, "mhla_causal_h200", "torch"),
    "mhla_video": video,
    "mhla_cpu": mhla_cpu,
    "hih": hih,
    "conv": conv,
    "head_mix_parts": head_mix_parts,
    "head_mix_attention": head_mix_attention,
    "models": whole_models,
    "models_iha": partial(models, "models_deit_iha_h200", ["IHA over softmax", "IHA over MHLA"]),
    "models_deit": partial(models, "models_deit_h200", ["softmax", "MHLA", "MHLA with CPE", "Head-in-Head, r = 4"]),
    "models_dit": partial(models, "models_dit_h200", ["softmax", "MHLA"], 8),
    "models_mea": partial(models, "models_deit_mea_h200", MEA_COLUMNS, 1, ["softmax", "MHLA"]),
    "wan": wan,
    "scale": scale,
    "scale_plan": lambda: markdown_table(plan_scale.HEADER, plan_scale.plan()),
    "context_parallel": context_parallel,
}
PLOTS: dict[str, Callable[[Path], None]] = {
    "mhla_h200.svg": lambda path: plots.draw_mhla(read("mhla_h200"), path),
    "hih_h200.svg": lambda path: plots.draw_hih(read("hih_h200"), path),
}
