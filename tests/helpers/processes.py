"""Processes that end in odd ways, started quickly: forked from one that has only imported things.

The server has imported torch and streamlap and used neither, so its children are as good as fresh;
each runs its code as a script would and ends through the interpreter's own end.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SERVER = r"""
import gc, json, os, signal, sys
import torch, streamlap

gc.collect()
gc.freeze()  # else each child's last collection touches, and so copies, all that was imported

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell put us behind

def serve():
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            for fd, path in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
                opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
                os.dup2(opened, fd)
                os.close(opened)
            return job["code"]
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)

exec(compile(serve(), "<script>", "exec"))
"""


@dataclass
class Ended:
    """How a process ended; status None: it had to be killed."""

    status: int | None
    out: str
    err: str
    seconds: float


class Server:
    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def _start(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        return self._process

    def run(
        self,
        code: str,
        timeout: float = 30.0,
        interrupt_at: str | None = None,
        interrupt_after: float = 0.0,
    ) -> Ended:
        """Run ``code``; send SIGINT these seconds after it has printed ``interrupt_at``.

        The seconds of the answer are those since the signal, if one was sent.
        """
        import json

        process = self._start()
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            out.touch()
            job = {"code": code, "out": str(out), "err": str(err)}
            print(json.dumps(job), file=process.stdin, flush=True)
            child = int(process.stdout.readline())
            begin = time.monotonic()
            status = strike = None
            while time.monotonic() < begin + timeout:
                if interrupt_at is not None and interrupt_at in out.read_text():
                    strike = time.monotonic() + interrupt_after
                    interrupt_at = None
                pause = 0.005
                if strike is not None:
                    pause = min(pause, max(0.0, strike - time.monotonic()))
                    if pause == 0.0:
                        with contextlib.suppress(ProcessLookupError):  # it has just ended
                            os.kill(child, signal.SIGINT)
                        strike = None
                        begin = time.monotonic()
                if select.select([process.stdout], [], [], pause)[0]:
                    status = int(process.stdout.readline())
                    break
            seconds = time.monotonic() - begin
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                process.stdout.readline()
            return Ended(status, out.read_text(), err.read_text(), seconds)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(10)
            self._process.stdout.close()


def run_fresh(code: str, timeout: float = 60.0) -> Ended:
    """Run ``code`` in a process of its own from its first line on."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        return Ended(None, str(error.stdout or ""), str(error.stderr or ""), timeout)
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)
