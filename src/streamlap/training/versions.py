"""What autograd checks of a saved tensor, for those that hooks have taken from it.

Autograd remembers the version of each tensor that it saves, and refuses to compute with one that
was written since. Of a tensor that was given to hooks it checks nothing.
"""

from __future__ import annotations

import torch

_NOTHING = torch.empty(0)


class SavedVersion:
    """The version of a tensor when it was saved; holds its counter, not its memory."""

    __slots__ = ("_probe", "_version", "_what")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._probe = tensor.detach()  # shares the counter
        self._probe.data = _NOTHING  # and keeps it, with other memory
        self._version = tensor._version
        self._what = f"[{tensor.type()} {list(tensor.shape)}]"
        if tensor.grad_fn is not None:
            self._what += f", which is output {tensor.output_nr} of {tensor.grad_fn.name()},"

    def check(self) -> None:
        """Raise the RuntimeError that autograd would raise if the tensor was written since."""
        now = self._probe._version
        if now != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self._what} is at version {now}; expected version "
                f"{self._version} instead. {self._hint()}"
            )

    @staticmethod
    def _hint() -> str:
        if torch.is_anomaly_enabled():
            return (
                "Hint: the backtrace further above shows the operation that failed to compute its "
                "gradient. The variable in question was changed in there or anywhere later. Good "
                "luck!"
            )
        return (
            "Hint: enable anomaly detection to find the operation that failed to compute its "
            "gradient, with torch.autograd.set_detect_anomaly(True)."
        )
