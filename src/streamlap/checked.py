"""What ``checking()`` gives: worker threads and GPUs with the order checker in between."""

from __future__ import annotations

from streamlap import _native
from streamlap.serving import Serving, cuda_runtime, current


class Checked(Serving):
    """Runtimes of its own that check the order of accesses; ``accesses`` counts them."""

    def __init__(self) -> None:
        super().__init__(current.get())

    def _make_runtime(self, cuda: bool) -> _native.Runtime:
        return _native.checked(cuda_runtime() if cuda else _native.new_host_runtime())
