"""Tests of the training command line."""

import pytest

pytest.register_assert_rewrite("training.helpers")
