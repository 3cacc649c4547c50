"""The checks of ``streamlap verify``, as data, and what runs them.

Copies are compared bit for bit with those of NumPy, stock torch and CuPy; products with a float64
product, within the bound that :mod:`~streamlap.crosscheck.numpy_reference` derives. Two libraries
need not choose the same kernel for a product, so products are not compared with each other.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import streamlap
from streamlap.crosscheck import cupy_pipeline, numpy_reference
from streamlap.crosscheck.numpy_reference import FP32, TF32_INPUT, TF32_SUM

Array = np.ndarray[Any, Any]

PARTS = ("host", "gpu", "cupy")
"""What a check can need: the runtime on worker threads, a GPU, CuPy with a GPU."""

OK, FAILED, MISSING = "ok", "FAILED", "cannot run here"

_TORCH_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "complex128"),
)
_NUMPY_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_SHAPE = (12, 20)
_VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "offset": lambda x: x.reshape(-1)[7:],
    "rows": lambda x: x[3:9],
    "strided": lambda x: x[::2, 1::3],
    "transposed": lambda x: x.T,
    "0-d": lambda x: x[3, 4],
    "empty": lambda x: x[5:5],
}
_REVERSED: dict[str, Callable[[Any], Any]] = {"reversed": lambda x: x[::-1, ::-2]}


class Difference(Exception):
    """What a check found wrong."""


@dataclass
class Setting:
    """What the checks run on.

    Attributes:
        device: ``"cpu"`` or ``"cuda:0"``; checks of the host use the CPU always.
        size: rows and columns of the matrices.
        n: items of a pipeline.
        seed: of the random data.
    """

    device: str
    size: int
    n: int
    seed: int

    def random(self, salt: int) -> np.random.Generator:
        """Return a generator of its own for each ``salt``."""
        return np.random.default_rng((self.seed, salt))


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: what holds, in words.
        part: what it needs, one of ``PARTS``.
        body: does it; returns what was compared, raises :class:`Difference` where it differs.
    """

    name: str
    part: str
    body: Callable[[Setting], str]


@dataclass(frozen=True)
class Finding:
    """How a check ended: ``outcome`` is OK, FAILED or MISSING, ``detail`` says what or why."""

    check: Check
    outcome: str
    detail: str


def run(
    setting: Setting,
    missing: Mapping[str, str],
    required: Sequence[str] = (),
    checks: Sequence[Check] | None = None,
) -> list[Finding]:
    """Run the checks whose part is there.

    Args:
        setting: what they run on.
        missing: the parts that are not there, each with the reason.
        required: parts that must be there, or their checks have failed.
        checks: which; all if left out.

    Whatever a check raises is its failure, and the others run.
    """
    findings = []
    for check in CHECKS if checks is None else checks:
        reason = missing.get(check.part)
        if reason is not None:
            needed = check.part in required
            detail = f"required, but cannot run here: {reason}" if needed else reason
            findings.append(Finding(check, FAILED if needed else MISSING, detail))
            continue
        try:
            findings.append(Finding(check, OK, check.body(setting)))
        except Difference as found:
            findings.append(Finding(check, FAILED, str(found)))
        except Exception as error:
            text = " ".join(str(error).split())
            findings.append(Finding(check, FAILED, f"{type(error).__name__}: {text}"))
    return findings


# -- comparing


def _as_numpy(value: Any) -> Array:
    """Return host data as NumPy has it; what NumPy has no dtype for, as integers of that size."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        raise Difference(f"the result is a {type(value).__name__}, not on the host")
    if value.dtype == torch.bfloat16:
        value = value.contiguous().view(torch.int16)
    array: Array = value.detach().numpy()
    return array


def same_bits(found: Any, expected: Any, what: str) -> None:
    """Raise Difference unless shape, dtype and every byte are the same."""
    a, b = _as_numpy(found), _as_numpy(expected)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise Difference(f"{what}: {a.dtype} of shape {a.shape}, not {b.dtype} of {b.shape}")
    first = np.frombuffer(a.tobytes(), np.uint8)
    second = np.frombuffer(b.tobytes(), np.uint8)
    wrong = np.flatnonzero(first != second)
    if wrong.size:
        at = int(wrong[0])
        raise Difference(
            f"{what}: {wrong.size} of {first.size} bytes differ, the first at {at} "
            f"({int(first[at]):#04x} instead of {int(second[at]):#04x})"
        )


def within_bound(
    found: Any, x: Array, y: Array, what: str, u: float = FP32, rounded_inputs: float = 0.0
) -> float:
    """Raise Difference unless ``found`` is ``x @ y`` within the bound; return error over bound."""
    result = _as_numpy(found)
    expected = numpy_reference.product(x, y)
    if result.shape != expected.shape:
        raise Difference(f"{what}: shape {result.shape}, not {expected.shape}")
    if not np.isfinite(result).all():
        raise Difference(f"{what}: not finite")
    allowed = numpy_reference.product_bound(x, y, u, rounded_inputs)
    worst = float((np.abs(result - expected) / allowed).max(initial=0.0))
    if worst > 1:
        raise Difference(f"{what}: {worst:.3g} times the error bound away from the float64 product")
    return worst


def _random_bits(setting: Setting, dtype: str, salt: int) -> Array:
    """Return random bit patterns, with NaN payloads, infinities and -0 in them."""
    count = _SHAPE[0] * _SHAPE[1]
    if dtype == "bool":
        return setting.random(salt).integers(0, 2, _SHAPE).astype(bool)
    kind = np.dtype("int16" if dtype == "bfloat16" else dtype)
    array = np.frombuffer(setting.random(salt).bytes(count * kind.itemsize), kind).copy()
    if kind.kind == "f":
        words = array.view(f"u{kind.itemsize}")
        sign = 1 << (8 * kind.itemsize - 1)
        infinity = int(np.array(np.inf, kind).view(words.dtype))
        # Two quiet NaNs and a signalling one, each with a payload, then -0 and the infinities.
        quiet = infinity | (infinity & -infinity) >> 1
        words[:6] = (quiet | 5, sign | quiet | 9, infinity | 3, sign, infinity, sign | infinity)
    return array.reshape(_SHAPE)


def _matrix(setting: Setting, salt: int) -> Array:
    return setting.random(salt).uniform(-1, 1, (setting.size, setting.size)).astype(np.float32)


def _as_torch(array: Array, dtype: str, device: str) -> torch.Tensor:
    tensor = torch.from_numpy(array.copy())
    return (tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor).to(device)


def _count(cases: int, what: str = "cases") -> str:
    return f"{cases} {what}, bit for bit"


# -- copies


def _numpy_to_cpu(setting: Setting) -> str:
    cases = 0
    for salt, dtype in enumerate(_NUMPY_DTYPES):
        array = _random_bits(setting, dtype, salt)
        for name, view in (_VIEWS | _REVERSED).items():
            source = np.asarray(view(array))
            expected = numpy_reference.copy(source)
            same_bits(streamlap.to_cpu(source).result(), expected, f"{dtype}, {name}")
            cases += 1
    return _count(cases, "NumPy arrays")


def _tensors_to_cpu(setting: Setting, device: str) -> str:
    cases = 0
    for salt, dtype in enumerate(_TORCH_DTYPES):
        array = _random_bits(setting, dtype, 100 + salt)
        tensor = _as_torch(array, dtype, device)
        for name, view in _VIEWS.items():
            what = f"{dtype}, {name}"
            source = view(tensor)
            found = streamlap.to_cpu(source).result()
            if found.dtype != tensor.dtype:
                raise Difference(f"{what}: {found.dtype}, not {tensor.dtype}")
            same_bits(found, source.cpu(), f"{what}, against torch")
            same_bits(found, numpy_reference.copy(view(array)), f"{what}, against NumPy")
            ordinary = streamlap.to_cpu(source, pin=False).result()
            same_bits(ordinary, found, f"{what}, into ordinary memory")
            cases += 1
    return _count(cases, "tensors")


def _there_and_back(setting: Setting, device: str) -> str:
    cases = 0
    for salt, dtype in enumerate(_TORCH_DTYPES):
        array = _random_bits(setting, dtype, 200 + salt)
        tensor = _as_torch(array, dtype, "cpu")
        for name, view in _VIEWS.items():
            moved = streamlap.to_device(view(tensor), device).result()
            expected = numpy_reference.copy(view(array))
            same_bits(moved.cpu(), expected, f"{dtype}, {name}, to {device}")
            same_bits(streamlap.to_cpu(moved).result(), expected, f"{dtype}, {name}, and back")
            cases += 1
    return _count(cases, "tensors")


def _large_copy(setting: Setting, device: str) -> str:
    """One copy that is cut into chunks: more than 16 MiB, and no multiple of anything."""
    array = setting.random(300).integers(0, 256, (33 << 20) + 13, np.uint8)
    source = torch.from_numpy(array.copy()).to(device)
    same_bits(streamlap.to_cpu(source).result(), array, "33 MiB and 13 bytes")
    return "33 MiB and 13 bytes, bit for bit"


def _moves(setting: Setting, device: str) -> str:
    """Many leaves by one kernel, cast and counted on the way; and the sums of what is there."""
    random = setting.random(400)
    arrays = [random.standard_normal(size, np.float32) * 1e4 for size in range(1, 300)]
    for index, array in enumerate(arrays):
        array[index % array.size] = np.inf if index % 3 else -np.inf
    tensors = [_as_torch(array, "float32", device) for array in arrays]
    plan = streamlap.TreeCopy(like=tensors, dtype=torch.float16, nonfinite=True)
    transfer = plan(tensors)
    for found, array in zip(transfer.result(), arrays, strict=True):
        with np.errstate(over="ignore"):
            same_bits(found, array.astype(np.float16), f"{array.size} elements as float16")
    if transfer.nonfinite() != len(arrays):
        raise Difference(f"{transfer.nonfinite()} infinite elements, not {len(arrays)}")
    for tensor, array in zip(tensors[::50], arrays[::50], strict=True):
        if streamlap.checksum(tensor) != streamlap.checksum(array):
            raise Difference(f"the checksum of {array.size} elements is not that of NumPy's copy")
    return _count(len(arrays), "leaves, cast and counted")


# -- pipelines


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _all_within(results: Sequence[Any], x: Array, ys: Sequence[Array], **bound: float) -> str:
    if len(results) != len(ys):
        raise Difference(f"{len(results)} results instead of {len(ys)}")
    worst = max(
        (
            within_bound(result, x, y, f"item {index}", **bound)
            for index, (result, y) in enumerate(zip(results, ys, strict=True))
        ),
        default=0.0,
    )
    return f"{len(ys)} products of {x.shape[0]}x{x.shape[1]}, at most {worst:.2f} of the bound"


def _products(setting: Setting, device: str, tf32: bool = False) -> str:
    x = _matrix(setting, 400)
    tensor = torch.from_numpy(x).to(device)
    bound = {"u": TF32_SUM, "rounded_inputs": TF32_INPUT} if tf32 else {"u": FP32}
    with _tf32(tf32):
        results = streamlap.pipelined_run(tensor, setting.n)
    return _all_within(results, x, [x] * setting.n, **bound)


def _distinct(setting: Setting, device: str) -> str:
    """Equal items would hide a stale, a skipped or a swapped one."""
    x = _matrix(setting, 500)
    ys = [_matrix(setting, 501 + index) for index in range(setting.n)]
    tensors = [torch.from_numpy(y).to(device) for y in ys]
    turn = itertools.count()
    with _tf32(False):
        results = streamlap.pipelined_run(
            torch.from_numpy(x).to(device), setting.n, fn=lambda x: x.mm(tensors[next(turn)])
        )
    return _all_within(results, x, ys, u=FP32)


def _map_order(setting: Setting, device: str) -> str:
    items = [_random_bits(setting, "int32", 600 + index) for index in range(setting.n)]
    tensors = [torch.from_numpy(item.copy()).to(device) for item in items]
    results = list(streamlap.pipelined_map(lambda item: item.clone(), tensors, depth=3))
    if len(results) != len(items):
        raise Difference(f"{len(results)} results instead of {len(items)}")
    for index, (result, item) in enumerate(zip(results, items, strict=True)):
        same_bits(result, item, f"item {index}")
    return _count(len(items), "items")


# -- CuPy


def _happens(condition: Callable[[], bool]) -> bool:
    """Return whether something comes true that a held stream should prevent, given a moment."""
    deadline = time.monotonic() + 0.02
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


@contextmanager
def _cupy_device(setting: Setting) -> Iterator[Any]:
    import cupy

    with cupy.cuda.Device(torch.device(setting.device).index or 0):
        yield cupy


def _cupy_to_cpu(setting: Setting) -> str:
    cases = 0
    with _cupy_device(setting) as cupy:
        for salt, dtype in enumerate(_NUMPY_DTYPES):
            array = _random_bits(setting, dtype, 700 + salt)
            on_device = cupy.asarray(array)
            for name, view in (_VIEWS | _REVERSED).items():
                what = f"{dtype}, {name}"
                source = view(on_device)
                found = streamlap.to_cpu(source).result()
                if not isinstance(found, np.ndarray):
                    raise Difference(f"{what}: a {type(found).__name__}, not a NumPy array")
                same_bits(found, cupy_pipeline.to_host(source), f"{what}, against CuPy")
                expected = numpy_reference.copy(np.asarray(view(array)))
                same_bits(found, expected, f"{what}, against NumPy")
                cases += 1
    return _count(cases, "CuPy arrays")


def _cupy_bound() -> dict[str, float]:
    if os.environ.get("CUPY_TF32", "0") not in ("", "0"):
        return {"u": TF32_SUM, "rounded_inputs": TF32_INPUT}
    return {"u": FP32}


def _cupy_products(setting: Setting) -> str:
    x = _matrix(setting, 800)
    with _cupy_device(setting) as cupy:
        on_device = cupy.asarray(x)
        with _tf32(False):
            ours = streamlap.pipelined_run(on_device, setting.n)
        for index, result in enumerate(ours):
            if not isinstance(result, np.ndarray):
                raise Difference(f"item {index} is a {type(result).__name__}, not a NumPy array")
        detail = _all_within(ours, x, [x] * setting.n, u=FP32)
        theirs = cupy_pipeline.pipelined_run(on_device, setting.n)
    theirs_detail = _all_within(theirs, x, [x] * setting.n, **_cupy_bound())
    return f"{detail}; CuPy's own: {theirs_detail}"


def _cupy_distinct(setting: Setting) -> str:
    """CuPy computes, streamlap copies: what arrives must be what CuPy itself brings, bit for bit.

    Two calls of one product on one stream give the same bits.
    """
    x = _matrix(setting, 900)
    ys = [_matrix(setting, 901 + index) for index in range(setting.n)]
    with _cupy_device(setting) as cupy, cupy.cuda.Stream(non_blocking=True):
        on_device = cupy.asarray(x)
        others = [cupy.asarray(y) for y in ys]
        made: list[Any] = []

        def fn(x: Any) -> Any:
            made.append(x @ others[len(made)])
            return made[-1]

        results = streamlap.pipelined_run(on_device, setting.n, fn=fn)
        detail = _all_within(results, x, ys, **_cupy_bound())
        for index, (result, product) in enumerate(zip(results, made, strict=True)):
            same_bits(result, cupy_pipeline.to_host(product), f"item {index}, against CuPy")
    return f"{detail}; copies bit for bit"


def _order_read_after_write(setting: Setting) -> str:
    """A copy must not begin before what CuPy's current stream was given."""
    old = setting.random(1000).integers(0, 100, _SHAPE, np.int32)
    new = setting.random(1001).integers(100, 200, _SHAPE, np.int32)
    with _cupy_device(setting) as cupy:
        hold = cupy_pipeline.Hold()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            source, values = cupy.asarray(old), cupy.asarray(new)
            for _ in range(2):  # nothing is to be loaded or allocated behind the closed hold
                cupy.copyto(source, values)
                streamlap.to_cpu(source).result()
            cupy.copyto(source, cupy.asarray(old))
            cupy.cuda.Device().synchronize()
            hold.close(stream)
            try:
                cupy.copyto(source, values)
                transfer = streamlap.to_cpu(source)
                early = _happens(transfer.done)
            finally:
                hold.open()
            result = transfer.result()
            stream.synchronize()
    if hold.expired:
        raise Difference("the stream did not stay held: something waited for the device")
    if early:
        raise Difference("the copy was done before the write that it must follow")
    same_bits(result, new, "the copy behind a held write")
    return "a copy behind a held write brings what was written"


def _order_write_after_read(setting: Setting) -> str:
    """After ``wait_source`` a write on CuPy's current stream must not overtake the copy."""
    old = setting.random(1100).integers(0, 100, _SHAPE, np.int32)
    new = setting.random(1101).integers(100, 200, _SHAPE, np.int32)
    with _cupy_device(setting) as cupy:
        hold = cupy_pipeline.Hold()
        producer = cupy.cuda.Stream(non_blocking=True)
        writer = cupy.cuda.Stream(non_blocking=True)
        with producer:
            source, values = cupy.asarray(old), cupy.asarray(new)
            for stream in (producer, writer):
                with stream:
                    cupy.copyto(source, values)
                    streamlap.to_cpu(source).result()
            cupy.copyto(source, cupy.asarray(old))
            cupy.cuda.Device().synchronize()
            hold.close(producer)
            try:
                transfer = streamlap.to_cpu(source)
                with writer:
                    transfer.wait_source()
                    cupy.copyto(source, values)
                    early = _happens(lambda: writer.done)
            finally:
                hold.open()
            result = transfer.result()
            writer.synchronize()
            after = cupy_pipeline.to_host(source)
    if hold.expired:
        raise Difference("the stream did not stay held: something waited for the device")
    if early:
        raise Difference("the write was done before the copy that it must follow")
    same_bits(result, old, "the copy before a write")
    same_bits(after, new, "the write itself")
    return "a write after wait_source() does not reach the copy"


def _order_of_pipeline(setting: Setting) -> str:
    """Products of a CuPy array must see what CuPy's current stream was given before."""
    x = _matrix(setting, 1200)
    with _cupy_device(setting) as cupy:
        hold = cupy_pipeline.Hold()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, _tf32(False):
            values = cupy.asarray(x)
            source = cupy.zeros_like(values)
            for _ in range(2):
                cupy.copyto(source, values)
                streamlap.pipelined_run(source, setting.n, wait=False).result()
            source.fill(0)
            cupy.cuda.Device().synchronize()
            hold.close(stream)
            try:
                cupy.copyto(source, values)
                transfer = streamlap.pipelined_run(source, setting.n, wait=False)
                early = _happens(transfer.done)
                transfer.wait_source()
                source.fill(0)
            finally:
                hold.open()
            results = transfer.result()
            stream.synchronize()
    if hold.expired:
        raise Difference("the stream did not stay held: something waited for the device")
    if early:
        raise Difference("the products were done before the write that they must follow")
    return _all_within(results, x, [x] * setting.n, u=FP32)


# -- the list


def _on_host(body: Callable[[Setting, str], str]) -> Callable[[Setting], str]:
    return lambda setting: body(setting, "cpu")


def _on_gpu(body: Callable[[Setting, str], str]) -> Callable[[Setting], str]:
    return lambda setting: body(setting, setting.device)


CHECKS = (
    Check("to_cpu of NumPy arrays, against NumPy", "host", _numpy_to_cpu),
    Check("to_cpu of tensors, against torch and NumPy", "host", _on_host(_tensors_to_cpu)),
    Check("to_device and back, against NumPy", "host", _on_host(_there_and_back)),
    Check("to_cpu in chunks, against NumPy", "host", _on_host(_large_copy)),
    Check("TreeCopy with a cast and a count, against NumPy", "host", _on_host(_moves)),
    Check("pipelined_run, against float64", "host", _on_host(_products)),
    Check("pipelined_run of distinct items, against float64", "host", _on_host(_distinct)),
    Check("pipelined_map of distinct items, against NumPy", "host", _on_host(_map_order)),
    Check("to_cpu of tensors, against torch and NumPy", "gpu", _on_gpu(_tensors_to_cpu)),
    Check("to_device and back, against NumPy", "gpu", _on_gpu(_there_and_back)),
    Check("to_cpu in chunks, against NumPy", "gpu", _on_gpu(_large_copy)),
    Check("TreeCopy with a cast and a count, against NumPy", "gpu", _on_gpu(_moves)),
    Check("pipelined_run in fp32, against float64", "gpu", _on_gpu(_products)),
    Check(
        "pipelined_run in TF32, against float64",
        "gpu",
        lambda setting: _products(setting, setting.device, tf32=True),
    ),
    Check("pipelined_run of distinct items, against float64", "gpu", _on_gpu(_distinct)),
    Check("pipelined_map of distinct items, against NumPy", "gpu", _on_gpu(_map_order)),
    Check("to_cpu of CuPy arrays, against CuPy and NumPy", "cupy", _cupy_to_cpu),
    Check("pipelined_run and CuPy's, against float64", "cupy", _cupy_products),
    Check("pipelined_run of CuPy's products, against CuPy", "cupy", _cupy_distinct),
    Check("a copy after CuPy's write", "cupy", _order_read_after_write),
    Check("CuPy's write after a copy", "cupy", _order_write_after_read),
    Check("pipelined_run after CuPy's write", "cupy", _order_of_pipeline),
)
