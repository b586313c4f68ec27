"""Kernels for GPUs that are not there: they compile, need no more shared memory than a program has, and read no
register that nothing wrote."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headmix_lab import machine_code
from headmix_vision.doctor.machine import KNOWN_GPUS

REPOSITORY = Path(__file__).parents[2]
WRONG_CODE = """
from benchmarks import compile_kernels
from headmix_vision.ops import hardware
default = hardware.default_assembler((9, 0))
hardware.find_assembler = lambda: default
case = compile_kernels.mhla_case("", "float32", 88, (16, 32), (4, 4), "pairwise")
launches, _ = compile_kernels.launches_of(compile_kernels.GPUS["9.0"], [case], "pairwise_forward_kernel")
((launch, (kernel, _)),) = launches.items()
print(default.version)
print(compile_kernels.compile_launch(launch, kernel, compile_kernels.target_of(compile_kernels.GPUS["9.0"])).error)
print(*compile_kernels.missing_hopper_kernels({"gluon_backward_kernel"}), sep="; ")
"""


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks.compile_kernels", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def compile_for(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_each_gpu_gets_tiles_of_its_own():
    """The same process plans for an A100 first, where the kernel of short sequences fits."""
    match = "pairwise_backward_key_kernel mhla pairwise, 197 tokens"
    report = compile_for("--gpu", "8.0", "8.9", "--match", match, "--jobs", "1")
    assert "8.0: 1 kernels" in report and "8.9: 2 kernels" in report


def test_a_run_that_compiled_nothing_fails():
    done = run("--gpu", "8.9", "--match", "resident_backward_key_kernel", "--jobs", "1")
    assert done.returncode == 1 and "8.9: nothing was compiled" in done.stdout


def test_amd_kernels_compile():
    report = compile_for("--gpu", "gfx942", "--match", "conv_kernel grid_conv 14x14", "--jobs", "1")
    assert "gfx942: " in report and "0 do not run" in report


def test_every_gpu_of_which_something_is_known_can_be_compiled_for():
    choices = run("--gpu", "none of them").stderr.partition("choose from")[2]
    assert set(re.findall(r"[\w.]+", choices)) == set(KNOWN_GPUS)


def test_the_check_finds_what_an_old_assembler_gets_wrong():
    """A float32 head of 88 dims is cut into tiles of two swizzles, which take turns in shared memory."""
    done = subprocess.run([sys.executable, "-c", WRONG_CODE], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    version, error, missing = done.stdout.splitlines()
    others = "gluon_forward_kernel", "gluon_wide_backward_kernel"
    assert missing == "; ".join(f"{name} is never launched" for name in others)
    if version == "(12, 8)":
        assert error.startswith("reads a register never written: ")
    else:
        assert error == ""


def test_training_fits_a_gpu_with_little_shared_memory():
    """The backward pass of keys holds all queries of a head on chip where there is room, and goes tile by tile here."""
    assert "4 kernels" in compile_for("--gpu", "8.9", "--match", "backward_key_kernel mhla pairwise", "--jobs", "1")


@pytest.mark.slow
def test_hopper_has_a_kernel_for_gradients_of_wide_heads(tmp_path):
    """All keys in one pass for up to 16 blocks, half of 256 for more."""
    table = tmp_path / "needs.csv"
    chosen = ("--all", "--gpu", "9.0", "--match", "gluon_wide_backward_kernel", "--jobs", "1", "--csv", str(table))
    assert "0 do not run" in compile_for(*chosen)
    rows = list(csv.DictReader(table.open()))
    cases = {(row["head_dim"], row["case"].removeprefix("mhla pairwise, ")) for row in rows}
    assert cases >= {(dim, f"{tokens} tokens") for dim in ("72", "80") for tokens in (197, 256)}
    assert {row["fits"] for row in rows} == {"True"}


LISTING = """
        /*0000*/                   ULDC UR4, c[0x0][0x288] ;
        /*0010*/               @P0 BRA `(.L_x_0) ;
        /*0020*/                   UMOV UR5, URZ ;
.L_x_0:
        /*0030*/                   UIADD3.X UR7, UR5, 0x40000040, URZ, UP0, !UPT ;
        /*0040*/                   UIADD3 UR6, UP0, UR4, 0x20, URZ ;
        /*0050*/                   HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0060*/                   ULOP3.LUT UP1, UR8, UR4, 0x3, URZ, 0xc0, !UPT ;
        /*0070*/              @!P1 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
"""


def test_registers_that_a_path_leaves_unwritten():
    unwritten_registers = machine_code.unwritten_registers
    (found,) = unwritten_registers(LISTING)
    assert found.endswith("at 0030")
    assert not unwritten_registers(LISTING.replace("@P0 BRA", "@P0 EXIT"))
    assert len(unwritten_registers(LISTING.replace("UIADD3 UR6", "UIADD3 UR9"))) == 2  # the product reads UR6
    assert len(unwritten_registers(LISTING.replace("UR8, UR4", "UR8, UR9"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("gpu", ["8.0", "8.6", "8.9", "9.0", "12.0"])
def test_the_most_demanding_kernels_fit_every_gpu(gpu):
    """`make compile-kernels-quick` compiles for B200 and AMD GPUs, with a newer Triton."""
    assert "0 do not run, 0 calls refused" in compile_for("--gpu", gpu)
