"""Without a GPU: a thread by hand that copies by memcpy while the next product is computed."""

from __future__ import annotations

import ctypes
import queue
import threading

import torch

from ..checks import poison
from ..limit import host_memory
from ..rows import Tensors, Way
from ..work import Job


class ThreadByHand(Way):
    """A queue, a thread that lives as long as this, and results whose pages are there."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.results_on_host = host_memory(job.x, job.n)
        self.queue: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()
        self.copied = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (item := self.queue.get()) is not None:
            index, product = item
            nbytes = product.numel() * product.itemsize
            result = self.results_on_host[index]
            ctypes.memmove(result.data_ptr(), product.data_ptr(), nbytes)
            del item, product
            self.copied.release()

    def poison(self) -> None:
        poison(self.results_on_host)

    def go(self) -> Tensors:
        with torch.no_grad():
            for index in range(self.job.n):
                self.queue.put((index, self.job.x.mm(self.job.x)))
        for _ in range(self.job.n):
            self.copied.acquire()
        return self.results_on_host

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()
