"""CuPy by hand: its streams, events, pinned memory and copies.

The products stay torch's, computed on CuPy's stream into memory shared by DLPack: so all rows
compute with the same kernels, in every dtype.
"""

from __future__ import annotations

import torch

from ..checks import poison
from ..rows import Tensors, Way
from ..work import Job


class CuPyByHand(Way):
    def __init__(self, job: Job) -> None:
        import cupy
        import cupyx

        self.job = job
        index = job.device.index or 0
        self.device = cupy.cuda.Device(index)
        with self.device:
            self.compute = cupy.cuda.Stream(non_blocking=True)
            self.copy = cupy.cuda.Stream(non_blocking=True)
            self.events = [cupy.cuda.Event(disable_timing=True) for _ in range(job.n)]
            # As bytes: NumPy has no bf16.
            self.on_device = [
                cupy.from_dlpack(product.view(-1).view(torch.uint8)) for product in job.products
            ]
            self.on_host = [cupyx.empty_pinned(array.shape, "uint8") for array in self.on_device]
        self.torch_stream = torch.cuda.ExternalStream(self.compute.ptr, device=job.device)
        shape, dtype = job.x.shape, job.x.dtype
        # Memory that torch hands out may be in use by earlier work on its own stream.
        torch.cuda.current_stream(job.device).synchronize()
        self.tensors = [torch.from_numpy(host).view(dtype).view(shape) for host in self.on_host]

    def poison(self) -> None:
        poison(self.job.products)
        poison(self.tensors)

    def go(self) -> Tensors:
        x, copy = self.job.x, self.copy
        with self.device, torch.cuda.stream(self.torch_stream), torch.no_grad():
            for product, event, source, result in zip(
                self.job.products, self.events, self.on_device, self.on_host, strict=True
            ):
                torch.mm(x, x, out=product)
                event.record(self.compute)
                copy.wait_event(event)
                source.get(stream=copy, out=result, blocking=False)
            copy.synchronize()
        return self.tensors
