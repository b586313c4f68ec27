"""A fixed set of 400 random cases of all kernels on a GPU; `tests/ops/fuzz.py` checks others."""

import pytest

from headmix_vision.doctor.cases import CASES_OF_A_KERNEL, numbered

from .fuzz import failure, rerun

pytestmark = pytest.mark.gpu
CASES, GROUP = 400, 10
STEP = CASES_OF_A_KERNEL // 2  # two cases of each kernel


@pytest.mark.parametrize("first", range(0, CASES, GROUP))
def test_drawn_cases(first):
    reasons = [(case, failure(case)) for case in map(numbered, range(first * STEP, (first + GROUP) * STEP, STEP))]
    assert not (failures := [rerun(case, reason) for case, reason in reasons if reason]), "\n".join(failures)
