"""CuPy's own functions and kernels agree with the library's, bit for bit."""

import numpy as np
import pytest
import torch
from helpers.data import random_bits, random_numbers

import streamlap
from streamlap.crosscheck import cupy_kernels


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 64, 1000, 4099])
def test_the_checksum_is_what_its_definition_says(where, nbytes):
    data = random_bits((nbytes,), torch.uint8)
    expected = cupy_kernels.checksum_on_host(data.numpy().tobytes())
    assert streamlap.checksum(data.to(where)) == expected


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [0, 1, 8, 4099, 1 << 20])
def test_checksums_agree(cupy, nbytes):
    data = random_bits((nbytes,), torch.uint8)
    assert streamlap.checksum(data.cuda()) == cupy_kernels.checksum(cupy.asarray(data.numpy()))


@pytest.mark.gpu
def test_scattered_bytes_agree(cupy):
    sizes = [1, 2, 3, 8, 15, 16, 17, 67, 4096, 100_001]
    flat = random_bits((sum(sizes),), torch.uint8).pin_memory()
    ends = np.cumsum(sizes)
    pieces = [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    results = streamlap.to_device(pieces, "cuda:0").result()
    theirs = cupy_kernels.scatter(cupy.asarray(flat.numpy()), sizes)
    for result, other in zip(results, theirs, strict=True):
        assert np.array_equal(result.cpu().numpy(), cupy.asnumpy(other))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.complex128])
def test_what_lies_apart_agrees(cupy, dtype):
    x = cupy.asarray(random_bits((96 * 130 * 16,), torch.uint8).numpy()).view(dtype)
    x = x[: 96 * 130].reshape(96, 130)
    for view in (x.T, x[::2, 3:], x.reshape(8, 12, 130).transpose(2, 0, 1)):
        theirs = cupy.asnumpy(cupy_kernels.packed(view))
        ours = np.asarray(streamlap.to_cpu(view).result())
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.gpu
def test_counts_agree(cupy):
    x = random_numbers((1000,)).cuda()
    x[[3, 5, 999]] = torch.tensor([float("inf"), float("nan"), -float("inf")], device=x.device)
    transfer = streamlap.to_cpu(x, nonfinite=True)
    assert transfer.nonfinite() == cupy_kernels.nonfinite(cupy.asarray(x)) == 3
