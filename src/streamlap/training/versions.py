"""What autograd checks of a saved tensor, for those that hooks have taken from it.

Autograd remembers the version of each tensor that it saves, and refuses to compute with one that
was written since. Of a tensor that was given to hooks it checks nothing.
"""

from __future__ import annotations

import torch

_NOTHING = torch.empty(0)


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the counter of a dense one, and not its memory."""
    counter = tensor.detach()
    counter.data = _NOTHING  # the counter stays
    return counter


class SavedVersion:
    """The version of a tensor when it was saved.

    Args:
        tensor: that was saved.
        alias: a detached tensor that shares its counter: ``tensor.detach()``, or
            :func:`counter_of`, which holds no memory.
        looks: of the latter, the dtype, shape and device that the tensor had.
    """

    # The words are put together only where they are said: this is made for each saved tensor.
    __slots__ = ("_looks", "_made_by", "_probe", "_version")

    def __init__(
        self,
        tensor: torch.Tensor,
        alias: torch.Tensor,
        looks: tuple[torch.dtype, torch.Size, torch.device] | None = None,
    ) -> None:
        self._probe = alias
        self._version = tensor._version
        self._looks = looks
        made_by = tensor.grad_fn  # itself it would keep the graph
        self._made_by = None if made_by is None else (tensor.output_nr, made_by.name())

    def check(self) -> None:
        """Raise the RuntimeError that autograd would raise if the tensor was written since."""
        now = self._probe._version
        if now != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self._what()} is at version {now}; expected version "
                f"{self._version} instead. {self._hint()}"
            )

    def _what(self) -> str:
        what = f"[{self._type_and_shape()}]"
        if self._made_by is None:
            return what
        number, name = self._made_by
        return f"{what}, which is output {number} of {name},"

    def _type_and_shape(self) -> str:
        if self._looks is not None:
            dtype, shape, device = self._looks
            return f"{torch.empty(0, dtype=dtype, device=device).type()} {list(shape)}"
        alias = self._probe
        named = alias.layout in (torch.strided, torch.sparse_coo)  # torch has no name for others
        return (
            f"{alias.type() if named else alias.dtype} "
            f"{'nested' if alias.is_nested else list(alias.shape)}"
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
