"""Shared by the benchmarks: timing, peak memory and CSV files.

On a CUDA device a call is timed in two ways, both with a cold L2 as far as rotating over copies of the inputs makes it:

- ``graph_ms``: the calls captured in one CUDA graph and replayed: the device's time, without the host's;
- ``launched_ms``: the same calls launched one by one from Python, what a program without graphs waits for.

Each is the median of repeated passes over the copies, divided by the calls of a pass.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headmix_lab.tables import installed_version, write_table
from headmix_vision.ops.dispatch import REPLAY, are_calls_replayed
from headmix_vision.processes import end_without_others

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"

Call = Callable[[], object]
SLOW_MS = 5.0  # from here on one copy of the inputs will do: its time is not spent on filling the L2
MIN_GRAPH_MS = 1.0  # a replay this long hides the few microseconds of its own launch


@dataclass(frozen=True)
class Timing:
    """Median times of one call in ms; ``graph_ms`` is None where no graph could be captured."""

    graph_ms: float | None
    launched_ms: float

    @property
    def ms(self) -> float:
        return self.launched_ms if self.graph_ms is None else self.graph_ms


def time_calls(calls: Sequence[Call], device: torch.device, budget_s: float = 0.08) -> Timing:
    """Time one operation, given as a call for each copy of its inputs.

    Args:
        calls: the operation on each copy; together the copies should exceed the L2 several times.
        device: where the calls run.
        budget_s: about how long each of the two ways may take, warm-up and capture left out; five passes at least.
    """
    if once_ms(calls[0], device) > SLOW_MS:
        calls = calls[:1]
    launched_ms = _launched_ms(calls, device, budget_s / 2)
    if device.type != "cuda":
        return Timing(None, launched_ms)
    try:
        graph, passes = _capture(calls, launched_ms * len(calls))
    except RuntimeError:
        torch.cuda.synchronize()
        return Timing(None, launched_ms)
    graph.replay()
    repeats = _repeats(launched_ms * len(calls) * passes, budget_s)
    return Timing(statistics.median(_event_times(graph.replay, repeats)) / (len(calls) * passes), launched_ms)


def once_ms(call: Call, device: torch.device) -> float:
    """Time in ms of a second call, the first having compiled and chosen what it needs."""
    call()
    return times_ms(call, device, 1)[0]


def times_ms(call: Call, device: torch.device, repeats: int) -> list[float]:
    """Time in ms of each of so many calls, launched one after the other."""
    return (_event_times if device.type == "cuda" else _wall_times)(call, repeats)


def as_graph(call: Call, device: torch.device) -> Call:
    """Capture a call, with its collectives, in a CUDA graph: what replays it, or on another device the call itself.

    All processes of a collective have to capture it, and to replay it equally often.

    Raises:
        RuntimeError: An operation refuses capture, or the memory does not suffice.
    """
    if device.type != "cuda":
        return call
    graph, _ = _capture([call], MIN_GRAPH_MS)  # said to be that long, it is in the graph once
    return graph.replay


def _launched_ms(calls: Sequence[Call], device: torch.device, budget_s: float) -> float:
    def one_pass() -> None:
        for call in calls:
            call()

    first_ms = times_ms(one_pass, device, 1)[0]
    return statistics.median(times_ms(one_pass, device, _repeats(first_ms, budget_s))) / len(calls)


def _repeats(pass_ms: float, budget_s: float) -> int:
    return max(5, min(50, int(budget_s * 1e3 / pass_ms)))


def _wall_times(call: Call, repeats: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(repeats):
        call()
        times.append(time.perf_counter())
    return [1e3 * (end - start) for start, end in itertools.pairwise(times)]


def _event_times(call: Call, repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def _capture(calls: Sequence[Call], pass_ms: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of one or more passes over the calls, and their number."""
    passes = max(1, min(math.ceil(MIN_GRAPH_MS / pass_ms), 64 // len(calls)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # other threads may go on meanwhile: NCCL's watchdog asks for events of its own
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(passes):
            for call in calls:
                call()
    return graph, passes


def peak_mib(call: Call, device: torch.device) -> float | None:
    """Memory that a call allocates at its highest, in MiB, beyond what was allocated before; None off CUDA devices."""
    if device.type != "cuda":
        return None
    call()
    release_memory()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def release_memory() -> None:
    """Give cached device memory back; tensors still referenced stay."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, reads and writes counted: by the faster of two kernels.

    A contiguous ``Tensor.copy_`` is the driver's copy, which on an H200 is slower than an elementwise kernel.
    """
    size = 2**28 if device.type == "cuda" else 2**23
    source = torch.zeros(size, device=device)
    target = torch.empty_like(source)
    calls = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    ms = min(time_calls([call], device, 0.2).ms for call in calls)
    return 2 * size * source.itemsize / (ms * 1e-3)


def add_options(parser: argparse.ArgumentParser, tiny: str) -> None:
    """Add the options of every benchmark: device, a trial of the script itself (`tiny`), folder of the results."""
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help=tiny)
    parser.add_argument("--out", type=Path, help="folder of the CSV (default of a complete run: benchmarks/results)")


def fill(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Set the options that were not given."""
    for name, value in defaults.items():
        if getattr(arguments, name, None) is None:
            setattr(arguments, name, value)


def results_path(arguments: argparse.Namespace, name: str, whole: bool = True) -> Path | None:
    """CSV file of a device's results: in the folder given, of a complete run in the repository, of others none."""
    folder = arguments.out or (RESULTS if whole and not arguments.tiny else None)
    if folder is None:
        return None
    path: Path = folder / f"{name}_{device_slug(environment(torch.device(arguments.device))['device'])}.csv"
    print(f"results: {path}")
    return path


def open_device(name: str) -> torch.device:
    """The device to measure on; exits with one line if it is not there."""
    if name not in ("cuda", "cpu"):
        raise SystemExit(f"error: --device must be 'cuda' or 'cpu', got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "error: --device cuda: torch sees no CUDA device; --device cpu --tiny tries the script itself."
        )
    if are_calls_replayed():
        from headmix_vision.ops.replay import extension

        if name == "cpu" or extension() is None:  # which waits until it is built
            os.environ[REPLAY] = "0"  # so that no row says that its calls are replayed
    return torch.device(name)


def run_in_group(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> None:
    """Run in the process group that torchrun has started, each process on its own device."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("error: start the script by torchrun --standalone --nproc_per_node 2 -m benchmarks.NAME.")
    on_gpu = arguments.device.type == "cuda"
    if on_gpu:
        arguments.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(arguments.device)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        run(arguments)
    except BaseException as error:
        end_without_others(error)
        raise
    torch.distributed.destroy_process_group()


def environment(device: torch.device) -> dict[str, str]:
    """Return device and versions, which a figure depends on besides the code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "triton": installed_version("triton")}


def begin(device: torch.device) -> None:
    """Print device and versions, and keep garbage collection away from what is imported."""
    gc.freeze()
    facts = environment(device)
    print(f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}, bf16")


def device_slug(name: str) -> str:
    """Part of a file name: "NVIDIA H200" -> "h200", "NVIDIA H100 80GB HBM3" -> "h100"."""
    model = re.sub(r" \d+gb.*", "", name.lower().replace("nvidia", ""))
    return re.sub(r"[^a-z0-9]+", "_", model).strip("_")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_csv(path: Path | None, rows: Sequence[Mapping[str, Any]], *, completed: bool = False) -> None:
    """Write rows with the fields of the first as header: None as an empty field, floats with five digits.

    Without a path nothing is written. With `completed` the origins of rows of earlier calls stay.
    """
    if path is None:
        return
    texts = ({key: f"{x:.5g}" if isinstance(x, float) else x for key, x in row.items()} for row in rows)
    write_table(path, list(rows[0]), texts, completed=completed)
