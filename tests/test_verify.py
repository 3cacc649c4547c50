"""``streamlap verify``: it passes here, and each check finds what it is there for."""

import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import streamlap
from streamlap import cli, verify_command
from streamlap.crosscheck import cupy_pipeline, numpy_reference, verify
from streamlap.crosscheck.verify import FAILED, MISSING, OK, Check, Difference, Setting

SETTING = Setting("cpu", 48, 6, 0)


def run_verify(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "streamlap", "verify", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ,
    )


def of_part(part):
    return [check for check in verify.CHECKS if check.part == part]


# -- the command


def test_verify_as_a_user_runs_it():
    done = run_verify()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for check in verify.CHECKS:
        assert any(line.startswith(check.part) and check.name in line for line in lines)
    assert "FAILED" not in done.stdout
    assert lines[-1].endswith(".")


def test_verify_on_the_cpu_says_what_did_not_run():
    done = run_verify("--device", "cpu", "--size", "32", "--n", "5", "--seed", "7", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["settings"] == {"device": "cpu", "size": 32, "n": 5, "seed": 7}
    assert found["passed"] is True
    outcomes = {part: {c["outcome"] for c in found["checks"] if c["part"] == part} for part in
                verify.PARTS}  # fmt: skip
    assert outcomes == {"host": {OK}, "gpu": {MISSING}, "cupy": {MISSING}}
    assert all(check["detail"] for check in found["checks"])
    counted = f"{len(of_part('host'))} checks passed, "
    assert found["result"].startswith(counted)


@pytest.mark.parametrize("part", ["gpu", "cupy"])
def test_a_required_part_that_is_missing_is_a_failure(part, capsys):
    arguments = ["verify", "--device", "cpu", "--size", "8", "--n", "2", "--json"]
    assert cli.main(arguments) == 0
    capsys.readouterr()
    assert cli.main([*arguments, "--require", "host", "--require", part]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    for check in found["checks"]:
        assert (check["outcome"] == FAILED) == (check["part"] == part)
        assert (check["part"] != part) or check["detail"].startswith("required, but cannot run")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "tpu"], "cuda:0"),
        (["--device", "cuda:999"], "GPU"),
        (["--size", "0"], "from 1 to"),
        (["--size", "100000"], "8192"),
        (["--n", "many"], "from 1 to"),
        (["--n", "1001"], "1000"),
        (["--seed", "-1"], "from 0 to"),
        (["--require", "tpu"], "cupy"),
        (["more"], "more"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(arguments, says, capsys):
    try:
        status = cli.main(["verify", *arguments])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_the_reasons_name_what_is_missing(monkeypatch):
    monkeypatch.setattr(verify_command, "cuda_reason", lambda: "")
    monkeypatch.setattr(cupy_pipeline, "not_installed", lambda: "")
    monkeypatch.setattr(cupy_pipeline, "why_not", lambda: "")
    assert verify_command.missing_parts("cuda:0") == {}
    assert verify_command.missing_parts("cpu") == {"gpu": "--device cpu", "cupy": "--device cpu"}
    monkeypatch.setattr(cupy_pipeline, "why_not", lambda: "CuPy sees no GPU")
    assert verify_command.missing_parts("cuda:0") == {"cupy": "CuPy sees no GPU"}
    monkeypatch.setattr(verify_command, "cuda_reason", lambda: "no driver")
    assert verify_command.missing_parts("cpu") == dict.fromkeys(
        ("gpu", "cupy"), "no GPU: no driver"
    )
    monkeypatch.setattr(cupy_pipeline, "not_installed", lambda: "install it")
    assert verify_command.missing_parts("cpu")["cupy"] == "install it"


def test_cupy_that_is_not_there_or_broken_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # import raises ImportError
    monkeypatch.setattr(cupy_pipeline.importlib.util, "find_spec", lambda name: None)
    assert "pip install" in cupy_pipeline.why_not()
    monkeypatch.setattr(cupy_pipeline.importlib.util, "find_spec", lambda name: object())
    assert cupy_pipeline.why_not().startswith("CuPy cannot be imported: ")
    cuda = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    assert cupy_pipeline.why_not() == "CuPy sees no GPU"


@pytest.mark.gpu
def test_verify_passes_with_cupy_on_a_gpu():
    done = run_verify("--require", "cupy", "--require", "gpu", "--require", "host")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "cannot run" not in done.stdout


# -- every check can fail


def corrupt(value, at=-1):
    """The value with one byte changed, where it has bytes."""
    array = value.numpy().copy() if isinstance(value, torch.Tensor) else np.array(value)
    if value.dtype == torch.bool or array.dtype == bool:
        array.reshape(-1)[at:] ^= True
    elif array.size:
        array = np.ascontiguousarray(array).reshape(value.shape)
        array.reshape(-1).view(np.uint8)[at] ^= 1
    return torch.from_numpy(array) if isinstance(value, torch.Tensor) else array


class Corrupted:
    """A transfer whose result is not what was copied."""

    def __init__(self, transfer, change):
        self.transfer, self.change = transfer, change

    def result(self, timeout=None):
        return self.change(self.transfer.result(timeout))

    def nonfinite(self):
        return self.transfer.nonfinite()


def break_to_cpu(monkeypatch, change):
    real = streamlap.to_cpu
    monkeypatch.setattr(streamlap, "to_cpu", lambda *a, **k: Corrupted(real(*a, **k), change))


def break_to_device(monkeypatch, change):
    real = streamlap.to_device
    monkeypatch.setattr(streamlap, "to_device", lambda *a, **k: Corrupted(real(*a, **k), change))


def break_plan(monkeypatch, change):
    real = streamlap.TreeCopy

    def broken(*a, **k):
        plan = real(*a, **k)
        return lambda tree: Corrupted(plan(tree), change)

    monkeypatch.setattr(streamlap, "TreeCopy", broken)


def break_count(monkeypatch, change):
    real = streamlap.Transfer.nonfinite
    monkeypatch.setattr(streamlap.Transfer, "nonfinite", lambda self: change(real(self)))


def break_checksum(monkeypatch, change):
    real = streamlap.checksum
    monkeypatch.setattr(streamlap, "checksum", lambda x: change(real(x), x))


def break_run(monkeypatch, change):
    real = streamlap.pipelined_run
    monkeypatch.setattr(streamlap, "pipelined_run", lambda *a, **k: change(real(*a, **k)))


def break_map(monkeypatch, change):
    real = streamlap.pipelined_map
    monkeypatch.setattr(
        streamlap, "pipelined_map", lambda *a, **k: iter(change(list(real(*a, **k))))
    )


def one_byte(value):
    if value.dtype == torch.bfloat16:
        return corrupt(value.contiguous().view(torch.int16)).view(torch.bfloat16)
    return corrupt(value)


def swapped(results):
    return [results[1], results[0], *results[2:]]


def stale(results):
    return [results[0], results[0], *results[2:]]


def short(results):
    return results[:-1]


def wrong_element(results):
    results[-1][3, 4] += 0.01
    return results


def far_off(results):
    """Further than TF32 may be."""
    results[-1][3, 4] += 1
    return results


def not_finite(results):
    results[2][0, 0] = float("nan")
    return results


NUMPY, TENSORS, DEVICE, LARGE, MOVES, RUN, DISTINCT, MAP = of_part("host")
FAULTS = [
    (NUMPY, break_to_cpu, one_byte),
    (NUMPY, break_to_cpu, lambda value: value.astype(np.float64)),
    (NUMPY, break_to_cpu, lambda value: value[None]),
    (TENSORS, break_to_cpu, one_byte),
    (TENSORS, break_to_cpu, lambda value: value.to(torch.float32)),
    (DEVICE, break_to_device, one_byte),
    (DEVICE, break_to_cpu, one_byte),
    (LARGE, break_to_cpu, one_byte),
    (MOVES, break_plan, swapped),
    (MOVES, break_plan, lambda results: [*results[:-1], corrupt(results[-1])]),
    (MOVES, break_count, lambda count: count - 1),
    (MOVES, break_checksum, lambda number, x: number ^ isinstance(x, torch.Tensor)),
    (RUN, break_run, wrong_element),
    (RUN, break_run, not_finite),
    (RUN, break_run, short),
    (DISTINCT, break_run, swapped),
    (DISTINCT, break_run, stale),
    (DISTINCT, break_run, wrong_element),
    (MAP, break_map, swapped),
    (MAP, break_map, short),
    (MAP, break_map, lambda results: [*results[:-1], corrupt(results[-1])]),
]


@pytest.mark.parametrize(
    ("check", "how", "change"),
    FAULTS,
    ids=[f"{check.name}-{number}" for number, (check, _, _) in enumerate(FAULTS)],
)
def test_a_check_finds_its_fault(check, how, change, monkeypatch):
    assert [found.outcome for found in verify.run(SETTING, {}, checks=[check])] == [OK]
    how(monkeypatch, change)
    (found,) = verify.run(SETTING, {}, checks=[check])
    assert found.outcome == FAILED
    assert found.detail


def test_every_check_of_the_host_is_shown_to_fail():
    assert {check.name for check, _, _ in FAULTS} == {check.name for check in of_part("host")}


def test_the_command_fails_when_a_check_does(monkeypatch, capsys):
    break_map(monkeypatch, swapped)
    assert cli.main(["verify", "--device", "cpu", "--size", "8", "--n", "3"]) == 1
    told = capsys.readouterr().out
    assert "FAILED: item 0: " in told
    assert "1 FAILED" in told.splitlines()[-1]


def test_what_a_check_raises_is_its_failure_and_the_others_run():
    def raises(setting):
        raise RuntimeError("two\nlines")

    checks = [Check("a", "host", raises), Check("b", "host", lambda setting: "fine")]
    first, second = verify.run(SETTING, {}, checks=checks)
    assert (first.outcome, first.detail) == (FAILED, "RuntimeError: two lines")
    assert (second.outcome, second.detail) == (OK, "fine")


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["gpu", "cupy"])
def test_checks_of_a_gpu_find_a_swapped_byte_or_a_wrong_product(part, monkeypatch):
    setting = Setting("cuda:0", 64, 6, 0)
    checks = [check for check in of_part(part) if "write" not in check.name.lower()]
    assert {found.outcome for found in verify.run(setting, {}, checks=checks)} == {OK}
    for how, change in [
        (break_to_cpu, one_byte),
        (break_run, far_off),
        (break_map, swapped),
    ]:
        with monkeypatch.context() as patched:
            how(patched, change)
            named = {break_to_cpu: "to_cpu", break_run: "pipelined_run", break_map: "_map"}[how]
            broken = [check for check in checks if named in check.name]
            assert broken or how is break_map
            assert {f.outcome for f in verify.run(setting, {}, checks=broken)} <= {FAILED}


@pytest.mark.gpu
def test_checks_of_order_find_a_stream_that_is_not_waited_for(monkeypatch):
    """Everything is told to be ordered by a stream that is idle."""
    from streamlap import foreign

    setting = Setting("cuda:0", 64, 4, 0)
    checks = [check for check in of_part("cupy") if "write" in check.name.lower()]
    assert len(checks) == 3
    assert {found.outcome for found in verify.run(setting, {}, checks=checks)} == {OK}
    idle = torch.cuda.Stream()
    monkeypatch.setattr(foreign, "cupy_handle", lambda index: idle.cuda_stream)
    assert {found.outcome for found in verify.run(setting, {}, checks=checks)} == {FAILED}


# -- comparing


def test_same_bits_tells_equal_values_apart():
    zero = np.zeros(3, np.float32)
    verify.same_bits(zero, torch.zeros(3), "")
    for other in (-zero, zero.astype(np.float64), zero[:2], zero[None]):
        with pytest.raises(Difference):
            verify.same_bits(zero, other, "zeros")
    nan = np.array([0x7FC00001, 0x7FC00002], np.uint32).view(np.float32)
    verify.same_bits(nan[:1], nan[:1].copy(), "")
    with pytest.raises(Difference, match=r"1 of 4 bytes differ, the first at 0 \(0x01 .* 0x02\)"):
        verify.same_bits(nan[:1], nan[1:], "payloads")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_random_bits_have_payloads_and_both_zeros(dtype):
    array = verify._random_bits(SETTING, dtype, 1).reshape(-1)
    assert np.isnan(array[:3]).all()
    words = array.view(f"u{array.itemsize}")
    assert len(set(words[:3])) == 3
    quiet = 1 << (np.finfo(dtype).nmant - 1)
    assert [bool(word & quiet) for word in words[:3].tolist()] == [True, True, False]
    assert array[3] == 0
    assert np.signbit(array[3])
    assert (array[4], array[5]) == (np.inf, -np.inf)


@pytest.mark.parametrize("k", [1, 2, 100, 1000])
@pytest.mark.parametrize("order", ["forward", "backward", "pairs"])
def test_a_product_summed_in_any_order_is_within_the_bound(k, order):
    random = np.random.default_rng(k)
    x = random.uniform(-1, 1, (4, k)).astype(np.float32)
    y = random.uniform(-1, 1, (k, 3)).astype(np.float32)
    terms = x[:, :, None] * y[None]
    if order == "pairs":
        found = terms.sum(axis=1, dtype=np.float32)
    else:
        found = np.zeros((4, 3), np.float32)
        for index in range(k)[:: 1 if order == "forward" else -1]:
            found = found + terms[:, index]
    assert found.dtype == np.float32
    error = np.abs(found - numpy_reference.product(x, y))
    assert (error <= numpy_reference.product_bound(x, y, numpy_reference.FP32)).all()


def test_the_bound_is_not_wide():
    """One term left out of a hundred, or inputs rounded to ten bits, are outside of it."""
    random = np.random.default_rng(1)
    x, y = (random.uniform(-1, 1, (100, 100)).astype(np.float32) for _ in range(2))
    cut = (x.view(np.int32) & ~0x1FFF).view(np.float32)
    with pytest.raises(Difference, match="times the error bound"):
        verify.within_bound(x[:, :-1] @ y[:-1], x, y, "a term left out")
    with pytest.raises(Difference, match="times the error bound"):
        verify.within_bound(cut @ y, x, y, "rounded")
    cut_y = (y.view(np.int32) & ~0x1FFF).view(np.float32)
    tf32 = {"u": numpy_reference.TF32_SUM, "rounded_inputs": numpy_reference.TF32_INPUT}
    assert verify.within_bound(cut @ cut_y, x, y, "rounded", **tf32) <= 1
    assert verify.within_bound(x @ y, x, y, "right") <= 1


def test_gamma_is_higham_s():
    assert numpy_reference.gamma(1, 0.25) == pytest.approx(1 / 3)
    assert numpy_reference.gamma(4, 0.25) == float("inf")


def test_the_numpy_pipeline_gives_float64_products():
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    results = numpy_reference.pipelined_run(x, n=3)
    assert len(results) == 3
    assert all(result.dtype == np.float64 for result in results)
    assert all(np.array_equal(result, x.astype(np.float64) @ x) for result in results)
