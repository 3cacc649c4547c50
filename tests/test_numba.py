"""numba's kernels agree with the library's; and numba's arrays are sources."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import streamlap

PROGRAM = Path(__file__).parent / "programs" / "numba_check.py"


def test_gather_and_casts_agree_with_numba(where):
    pytest.importorskip("numba")
    simulated = {"NUMBA_ENABLE_CUDASIM": "1"} if where == "cpu" else {}
    done = subprocess.run(
        [sys.executable, PROGRAM, where],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | simulated,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "13 pieces and 1400 casts are the same, bit for bit\n"


@pytest.mark.gpu
def test_arrays_of_numba_are_sources():
    cuda = pytest.importorskip("numba.cuda")
    data = np.random.default_rng(5).standard_normal((300, 40)).astype(np.float32)
    on_device = cuda.to_device(data)
    result = streamlap.to_cpu(on_device).result()
    assert np.array_equal(np.asarray(result), data)
    assert np.array_equal(np.asarray(streamlap.to_cpu(on_device[::2]).result()), data[::2])
