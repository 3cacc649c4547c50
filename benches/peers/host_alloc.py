"""``cudaHostAlloc`` itself, called through the libcudart that torch has loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ..rows import Tensors, Unavailable, Way

_PORTABLE = 1


def cudart() -> ctypes.CDLL:
    """Return the CUDA runtime of this process.

    Raises:
        Unavailable: torch has it linked in, so nobody else can call it.
    """
    torch.cuda.init()
    for line in Path("/proc/self/maps").read_text().splitlines():
        place = line.split(maxsplit=5)[-1]
        if Path(place).name.startswith("libcudart.so"):
            return ctypes.CDLL(place)
    raise Unavailable("no libcudart.so is loaded, so cudaHostAlloc cannot be called")


class HostAlloc(Way):
    """Blocks of page-locked memory, straight from the driver."""

    def __init__(self, nbytes: int, count: int = 1) -> None:
        self.nbytes = nbytes
        self.count = count
        self.library = cudart()
        self.library.cudaHostAlloc.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_size_t,
            ctypes.c_uint,
        ]
        self.library.cudaFreeHost.argtypes = [ctypes.c_void_p]
        self.addresses: list[ctypes.c_void_p] = []

    def before(self) -> None:
        self.close()

    def go(self) -> None:
        for _ in range(self.count):
            address = ctypes.c_void_p()
            code = self.library.cudaHostAlloc(ctypes.pointer(address), self.nbytes, _PORTABLE)
            if code:
                self.library.cudaGetLastError()  # or torch's next call would report it as its own
                raise Unavailable(f"cudaHostAlloc failed with error {code}")
            self.addresses.append(address)

    def results(self, value: None) -> Tensors:
        return [self._tensor(address) for address in self.addresses]

    def _tensor(self, address: ctypes.c_void_p) -> torch.Tensor:
        assert address.value is not None
        memory = (ctypes.c_uint8 * self.nbytes).from_address(address.value)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        while self.addresses:
            code = self.library.cudaFreeHost(self.addresses.pop())
            if code:
                raise Unavailable(f"cudaFreeHost failed with error {code}")
