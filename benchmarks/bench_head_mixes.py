"""Time of head mixes: the mix alone, interleaved heads (IHA) over softmax and over MHLA, and the whole layer.

    python -m benchmarks.bench_head_mixes                      # everything; writes results/head_mixes_<device>.csv
    python -m benchmarks.bench_head_mixes --shapes n1024_p4 --parts mix op
    python -m benchmarks.bench_head_mixes --device cpu --tiny        # tries the script itself where there is no GPU

DeiT-S (6 heads of 64 dims) at 224 and 512 px with 2 and 4 pseudo-heads, bf16, forward and forward with backward (all
gradients, those of the mixing weights included). Four parts:

- mix: queries, keys and values, views of a packed projection, to their pseudo-heads; floor: inputs read and outputs
  written once (with backward: output gradients and inputs read, input gradients written, too) at the bandwidth of a
  large copy measured in the same run;
- collapse: the outputs of all pseudo-heads to those of heads;
- op: mix, attention between all pseudo-heads of all tokens, collapse. Softmax runs on FlashAttention and on cuDNN, its
  mixes in our kernel and as a compiled einsum ("_einsum"); the ratios below the table are to the fastest of these;
- layer: `HeadMixAttention` compiled, under autocast, projections included.

Times are medians of CUDA graph replays over rotating copies of the inputs, as `measuring.py` says. Before anything is
timed our results are compared with float64, at a batch of two; the budget is the error of the same maths with every
step in bf16, twice for outputs, three times for gradients, in the mean. If one exceeds it, the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.head_mixes_cases import CONTESTS, SHAPES, Contest, Form, Shape, Tensors, layer_input, make_layer
from benchmarks.measuring import (
    add_options,
    copy_bandwidth,
    environment,
    format_table,
    open_device,
    release_memory,
    results_path,
    time_calls,
    write_csv,
)

CORES = ("mhla", "softmax")
COLD_BYTES = 2**28
GATE_BATCH = 2
Row = dict[str, Any]


def results(run: Callable[..., Tensors], inputs: Sequence[Tensor], d_outs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and the gradients of all inputs; that of an input which is not read is left out."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = run(*leaves)
    gradients = torch.autograd.grad(
        outs, leaves, [d.to(x) for d, x in zip(d_outs, outs, strict=True)], allow_unused=True
    )
    return [*(x.detach() for x in outs), *(x for x in gradients if x is not None)]


def check_contest(contest: Contest, shape: Shape, device: torch.device) -> list[str]:
    """One line for each result of ours that misses its budget, at a small batch."""
    small = replace(shape, batch=GATE_BATCH)
    generator = torch.Generator(device).manual_seed(0)
    inputs = contest.make(small, generator)
    with torch.no_grad():
        d_outs = [torch.randn_like(x) for x in contest.eager(small, *inputs)]
    exact = results(partial(contest.exact, small), [x.double() for x in inputs], d_outs)
    budgets = _errors(results(partial(contest.eager, small), inputs, d_outs), exact)
    failures = []
    for form in (f for f in contest.forms if f.ours and device.type in f.devices):
        found = _errors(results(partial(form.run, small), inputs, d_outs), exact)
        failures += _beyond(f"{shape.name}, {form.name} of {contest.name}", found, budgets, len(d_outs))
    return failures


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [(x.double() - y).abs().mean().item() for x, y in zip(found, exact, strict=True)]


def _beyond(what: str, errors: Sequence[float], budgets: Sequence[float], outputs: int) -> list[str]:
    lines = []
    for i, (error, budget) in enumerate(zip(errors, budgets, strict=True)):
        factor = 2 if i < outputs else 3
        if not error <= factor * budget:
            lines.append(f"{what}: mean error of result {i} is {error:.2e}, allowed {factor} x {budget:.2e}")
    return lines


def time_form(
    run: Callable[..., Tensors], make: Callable[[int], Tensors], bytes_of_inputs: int, device: torch.device
) -> Row:
    """Times forward, and forward with backward, in ms; from graphs and from plain launches."""
    copies = []
    for seed in range(max(1, math.ceil(COLD_BYTES / bytes_of_inputs)) if device.type == "cuda" else 1):
        inputs = make(seed)
        with torch.no_grad():
            copies.append((inputs, [torch.randn_like(x) for x in run(*inputs)]))

    @torch.no_grad()
    def forward(inputs: Tensors, d_outs: list[Tensor]) -> Tensors:
        return run(*inputs)

    def both(inputs: Tensors, d_outs: list[Tensor]) -> Tensors:
        return torch.autograd.grad(run(*inputs), inputs, d_outs, allow_unused=True)

    row: Row = {}
    for name, call in (("forward", forward), ("forward_backward", both)):
        timing = time_calls([partial(call, *one) for one in copies], device)
        row |= {f"{name}_ms": timing.ms, f"{name}_launched_ms": timing.launched_ms}
    return row


def time_contest(contest: Contest, shape: Shape, device: torch.device, bandwidth: float) -> list[Row]:
    floors = [None, None]
    if contest.units:
        floors = [units * shape.unit_bytes / bandwidth * 1e3 for units in contest.units(shape)]
    rows = []
    for form in (f for f in contest.forms if device.type in f.devices):
        row = _time_form_or_reason(form, contest, shape, device)
        rows.append({"form": form.name, "forward_floor_ms": floors[0], "forward_backward_floor_ms": floors[1]} | row)
        release_memory()
    return rows


def _time_form_or_reason(form: Form, contest: Contest, shape: Shape, device: torch.device) -> Row:
    def make(seed: int) -> Tensors:
        return contest.make(shape, torch.Generator(device).manual_seed(seed))

    try:
        return time_form(partial(form.run, shape), make, 3 * shape.unit_bytes, device)
    except RuntimeError as error:
        if form.ours:
            raise
        print(f"{shape.name}, {form.name}: {str(error).strip().partition(chr(10))[0]}")
        keys = ("forward_ms", "forward_launched_ms", "forward_backward_ms", "forward_backward_launched_ms")
        return dict.fromkeys(keys)


def time_layers(shape: Shape, device: torch.device) -> list[Row]:
    """Time the layer over each core, once its compiled form agrees with float64."""
    rows = []
    for core in CORES:
        layer = make_layer(core, shape, device)
        compiled = torch.compile(layer, dynamic=False) if device.type == "cuda" else layer
        parameters = tuple(p for p in layer.parameters() if p.requires_grad)

        def run(x: Tensor, *_: Tensor, call: Callable[[Tensor], Tensor] = compiled) -> Tensors:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                return (call(x),)

        if failures := _check_layer(layer, run, core, shape, device):
            raise SystemExit("\n".join([*failures, "error: results are wrong, nothing timed."]))

        def make(seed: int, parameters: Tensors = parameters) -> Tensors:
            return (layer_input(shape, torch.Generator(device).manual_seed(seed)), *parameters)

        row = time_form(run, make, shape.unit_bytes, device)
        rows.append({"form": core, "forward_floor_ms": None, "forward_backward_floor_ms": None} | row)
        torch.compiler.reset()
        release_memory()
    return rows


def _check_layer(
    layer: torch.nn.Module, run: Callable[..., Tensors], core: str, shape: Shape, device: torch.device
) -> list[str]:
    """Compare the first images of the whole batch, which do not depend on the others, with float64."""
    x = layer_input(shape, torch.Generator(device).manual_seed(0))
    d_out = torch.randn(x.shape, generator=torch.Generator(device).manual_seed(1), device=device)
    first = slice(GATE_BATCH)

    def eager(x: Tensor) -> Tensors:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return (layer(x),)

    exact = results(lambda x: (copy.deepcopy(layer).double()(x),), [x[first].double()], [d_out[first]])
    budgets = _errors(results(eager, [x[first]], [d_out[first]]), exact)
    found = [y[first] for y in results(run, [x], [d_out])]
    return _beyond(f"{shape.name}, layer over {core}", _errors(found, exact), budgets, 1)


def print_rows(rows: Sequence[Row]) -> None:
    """Print times in us, each with its share of the floor where there is one."""

    def cell(row: Row, name: str) -> str:
        ms, floor = row[f"{name}_ms"], row[f"{name}_floor_ms"]
        share = "" if ms is None or floor is None else f" ({floor / ms:.2f} of floor)"
        return "-" if ms is None else f"{ms * 1e3:.1f}{share}"

    header = ("shape", "part", "form", "forward us", "with backward us")
    table = [
        [row["shape"], row["part"], row["form"], cell(row, "forward"), cell(row, "forward_backward")] for row in rows
    ]
    print(format_table(header, table))


def print_ratios(rows: Sequence[Row]) -> None:
    """Print how many times as fast IHA is over MHLA as over the fastest softmax, for the op and for the layer."""
    for shape, part in dict.fromkeys((row["shape"], row["part"]) for row in rows if row["part"] in ("op", "layer")):
        some = [row for row in rows if (row["shape"], row["part"]) == (shape, part)]
        ratios = []
        for key in ("forward_ms", "forward_backward_ms"):
            ours = next(row[key] for row in some if row["form"] == "mhla")
            others = [row[key] for row in some if row["form"] != "mhla" and row[key] is not None]
            ratios.append(f"{min(others) / ours:.2f}x" if others else "-")
        print(f"{shape}, {part}: over MHLA {ratios[0]} as fast as over softmax forward, {ratios[1]} with backward")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parts, shapes = (*CONTESTS, "layer"), [shape.name for shape in SHAPES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    add_options(parser, tiny="small versions of the shapes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    device = open_device(arguments.device)
    shapes = [shape.tiny() if arguments.tiny else shape for shape in SHAPES if shape.name in arguments.shapes]
    contests = [contest for name, contest in CONTESTS.items() if name in arguments.parts]
    torch._dynamo.config.recompile_limit = 64  # one function compiles every mix
    facts = environment(device)
    print(f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}, bf16")
    gc.freeze()
    if failures := [line for c in contests for shape in shapes for line in check_contest(c, shape, device)]:
        raise SystemExit("\n".join([*failures, "error: results are wrong, nothing timed."]))
    print(f"correct: ours in {', '.join(c.name for c in contests) or 'nothing'} at {len(shapes)} shapes, all gradients")

    bandwidth = copy_bandwidth(device)
    facts |= {"copy_tb_per_s": f"{bandwidth / 1e12:.3g}", "dtype": "bfloat16"}
    rows: list[Row] = []
    for shape in shapes:
        for part in arguments.parts:
            found = time_layers(shape, device) if part == "layer" else None
            found = found or time_contest(CONTESTS[part], shape, device, bandwidth)
            described = {"shape": shape.name, "part": part, "batch": shape.batch, "tokens": shape.tokens}
            described |= {"heads": shape.heads, "head_dim": shape.head_dim, "pseudo_heads": shape.pseudo_heads}
            rows += [described | row | facts for row in found]
            print(
                shape.name,
                part,
                *(f"{row['form']} {row['forward_backward_ms'] or math.nan:.3f} ms" for row in found),
                flush=True,
            )
    print_rows(rows)
    print_ratios(rows)
    whole = len(shapes) == len(SHAPES) and len(arguments.parts) == len(CONTESTS) + 1 and not arguments.tiny
    write_csv(results_path(arguments, "head_mixes", whole and device.type == "cuda"), rows)


if __name__ == "__main__":
    main()
