"""Keeps ``torch.compile`` out of our frames.

In a compiled function Dynamo looks at every frame that Python enters, those of autograd's hooks
included. Compiled, ours would work with the addresses of tensors that live no longer than a graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(
    function: F,
    quick: Callable[[Any], Any] | None = None,
    otherwise: Callable[[Any], Any] | None = None,
) -> F:
    """Return the function, run as it stands, with all that it calls.

    Dynamo takes a second to import: where nobody has, there is nothing to keep out.

    Args:
        quick: what a call with one argument is tried with in place of the function.
        otherwise: what such a call comes to where ``quick`` gives None.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                if quick is not None and otherwise is not None and len(args) == 1 and not kwargs:
                    found = quick(args[0])
                    return otherwise(args[0]) if found is None else found
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            # Else this frame is compiled anew for each kind of argument, with warnings.
            skip = getattr(torch._dynamo.decorators, "skip", None)
            if skip is not None:
                skip(call)
        return disabled(*args, **kwargs)

    return cast(F, call)
