"""Kernels of decoding against their host twins: tokens, trees, walks and moves, all exactly."""

from __future__ import annotations

import pytest

from tests import op_cases
from tests.conftest import backend_of
from tests.op_cases import DECODING, name_of


# Their host twins, in sampling.py and spec_decode.py, are what the kernels are compared with.
@pytest.mark.parametrize(
    "device", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)), indirect=True
)
@pytest.mark.parametrize("case, shape", DECODING, ids=[name_of(*c) for c in DECODING])
def test_decoding(device: str, case, shape) -> None:
    op_cases.check_exact(backend_of(device, "float32"), case, shape)
