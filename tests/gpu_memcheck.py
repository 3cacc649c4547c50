"""Small work of every kind on one GPU, to be run under compute-sanitizer's memcheck.

    python tests/gpu_memcheck.py           check the results; status 0 if they are right
    python tests/gpu_memcheck.py --under   the same under `compute-sanitizer --tool memcheck`

With --under, a tool that is missing or does not work here (it fails with torch
alone) is said in one line, and is no failure. Anything it finds is one, and so is a wrong
result.
"""

import os
import shutil
import subprocess
import sys

TORCH_ALONE = "import torch; x = torch.ones(33, 33, device='cuda:0'); x.mm(x).cpu()"
FOUND = 86  # the tool's status when it has found something
SECONDS = 900


def work() -> None:
    import torch

    import streamlap

    where = torch.device("cuda:0")
    x = torch.randn(33, 33, device=where)
    product = x.mm(x).cpu()

    for pin in (None, False):
        for y in streamlap.pipelined_run(x, n=6, pin=pin):
            assert torch.equal(y, product)
    for y in streamlap.pipelined_run(x, n=3, out=[torch.empty(33, 33) for _ in range(3)]):
        assert torch.equal(y, product)
    items = [x + i for i in range(6)]
    mapped = streamlap.pipelined_map(lambda y: y * 2, items, depth=2)
    for y, item in zip(mapped, items, strict=True):
        assert torch.equal(y, (item * 2).cpu())
    for ys in streamlap.pipelined_run([x, x], n=3):
        assert all(torch.equal(y, product) for y in ys)

    # Odd sizes and offsets, strides, other types: where a copy could go one byte too far.
    long = torch.arange(100_001, dtype=torch.float32, device=where)
    sources = {
        "scalar": torch.tensor(3.0, device=where),
        "empty": torch.empty(0, 5, device=where),
        "offset": long[3:],
        "odd bytes": torch.arange(4097, device=where).to(torch.uint8)[1:],
        "strided": long[::3],
        "transposed": x.t(),
        "expanded": x[:1].expand(7, 33),
        "half": x.half(),
        "bool": x > 0,
        "complex": torch.complex(x, x).conj(),
    }
    for pin in (None, False):
        for name, y in streamlap.to_cpu(sources, pin=pin).result().items():
            assert torch.equal(y, sources[name].cpu().resolve_conj()), name
    assert torch.equal(streamlap.to_cpu(x, dtype=torch.float64).result(), x.cpu().double())
    assert torch.equal(streamlap.to_cpu(long, chunk_bytes=4096).result(), long.cpu())
    out = torch.zeros(33, 66)[:, ::2]
    assert torch.equal(streamlap.to_cpu(x, out=out).result(), x.cpu())

    back = {name: y.cpu() for name, y in sources.items()}
    pinned = streamlap.empty_pinned((1001,)).copy_(torch.arange(1001.0))
    back |= {"host strided": pinned[::2], "host transposed": x.cpu().t(), "pinned": pinned[1:]}
    for name, y in streamlap.to_device(back, where).result().items():
        assert torch.equal(y.cpu(), back[name]), name
    into = torch.zeros(66, 33, device=where)[::2]
    assert torch.equal(streamlap.to_device(x.cpu(), where, out=into).result(), x)
    # Kernels: many leaves, casts, counts, and the way back.
    many = [long[first : first + first % 70] for first in range(200)]
    plan = streamlap.TreeCopy(like=many)
    for result in (streamlap.to_cpu(many).result(), plan(many).result()):
        assert all(torch.equal(y, leaf.cpu()) for y, leaf in zip(result, many, strict=True))
    again = streamlap.to_device(result, where, out=[torch.empty_like(leaf) for leaf in many])
    assert all(torch.equal(y, leaf) for y, leaf in zip(again.result(), many, strict=True))
    halves = streamlap.to_cpu(many, dtype=torch.bfloat16, nonfinite=True)
    assert all(
        torch.equal(y, leaf.cpu().bfloat16()) for y, leaf in zip(halves.result(), many, strict=True)
    )
    assert halves.nonfinite() == 0
    assert streamlap.checksum(long) == streamlap.checksum(long.cpu())
    streamlap.synchronize()


def under_memcheck() -> int:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
        tool = shutil.which("compute-sanitizer", path=f"{home}/bin")
    if tool is None:
        print("memcheck: not run: there is no compute-sanitizer")
        return 0
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable]
    try:
        # torch and cuBLAS alone, so that a tool that cannot run here is told from a fault of ours.
        tried = subprocess.run(
            [*command, "-c", TORCH_ALONE], capture_output=True, text=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"memcheck: not run: {tool} does not work here: {error}")
        return 0
    if tried.returncode:
        said = (tried.stdout + tried.stderr).strip().splitlines() or ["no output"]
        reason = next((line for line in said if "rror" in line), said[-1]).strip()
        print(f"memcheck: not run: {tool} fails with torch alone: {reason}")
        return 0
    done = subprocess.run([*command, __file__], timeout=SECONDS)
    if done.returncode:
        found = "something was found" if done.returncode == FOUND else "the program failed"
        print(f"memcheck: FAILED: {found} (status {done.returncode})")
        return 1
    print("memcheck: clean")
    return 0


if __name__ == "__main__":
    if "--under" in sys.argv[1:]:
        sys.exit(under_memcheck())
    work()
