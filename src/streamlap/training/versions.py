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


Saved = tuple[torch.Tensor, int, tuple[int, str] | None]
"""A detached tensor that shares the counter of a saved one, that one's version, and which output of
what it was. A tuple, because one is made for each saved tensor."""

Looks = tuple[torch.dtype, torch.Size, torch.device]


def saved_version(tensor: torch.Tensor, alias: torch.Tensor) -> Saved:
    """Return the version of a tensor that is being saved.

    ``alias``: ``tensor.detach()``, or :func:`counter_of` it, which holds no memory.
    """
    made_by = tensor.grad_fn  # itself it would keep the graph
    named = None if made_by is None else (tensor.output_nr, made_by.name())
    return alias, tensor._version, named


def check_version(saved: Saved, looks: Looks | None = None) -> None:
    """Raise the RuntimeError that autograd would raise if the tensor was written since.

    ``looks``: what the tensor was like, where its alias is a mere counter.
    """
    alias, version, made_by = saved
    now = alias._version
    if now != version:
        what = f"[{_type_and_shape(alias, looks)}]"
        if made_by is not None:
            number, name = made_by
            what += f", which is output {number} of {name},"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {what} is at version {now}; expected version {version} instead. {_hint()}"
        )


def _type_and_shape(alias: torch.Tensor, looks: Looks | None) -> str:
    if looks is not None:
        dtype, shape, device = looks
        return f"{torch.empty(0, dtype=dtype, device=device).type()} {list(shape)}"
    named = alias.layout in (torch.strided, torch.sparse_coo)  # torch has no name for others
    shape_of = "nested" if alias.is_nested else list(alias.shape)
    return f"{alias.type() if named else alias.dtype} {shape_of}"


def _hint() -> str:
    if torch.is_anomaly_enabled():
        return (
            "Hint: the backtrace further above shows the operation that failed to compute its "
            "gradient. The variable in question was changed in there or anywhere later. Good luck!"
        )
    return (
        "Hint: enable anomaly detection to find the operation that failed to compute its "
        "gradient, with torch.autograd.set_detect_anomaly(True)."
    )
