"""What ``stream_gradients`` may be given: parameters and their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

import streamlap


def checked_parameters(model: Any) -> tuple[list[str], list[torch.Tensor]]:
    """Return names and parameters that require grad, each parameter once.

    Raises:
        InvalidType: no module and no parameters, or a module whose gradients are reduced elsewhere.
        InvalidArgument: no parameter, none that requires grad, or one that cannot be hooked.
    """
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, parameter in _named(model):
        if name in named and named[name] is not parameter:
            raise streamlap.InvalidArgument(f"two parameters have the name {name!r}")
        if id(parameter) not in seen:
            seen.add(id(parameter))
            named[name] = parameter
    if not named:
        raise streamlap.InvalidArgument("there are no parameters whose gradients could be sent")
    wanted = {name: one for name, one in named.items() if one.requires_grad}
    if not wanted:
        raise streamlap.InvalidArgument(
            f"none of the {len(named)} parameters requires grad, so no gradient will come"
        )
    for name, parameter in wanted.items():
        _check(name, parameter)
    return list(wanted), list(wanted.values())


def _named(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, torch.nn.Module):
        _refuse_wrappers(model)
        yield from model.named_parameters()
        return
    if isinstance(model, torch.Tensor) or not isinstance(model, Iterable):
        raise streamlap.InvalidType(
            f"stream_gradients needs a module or parameters, not {type(model).__name__}"
        )
    for position, item in enumerate(model):
        pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
        name, parameter = item if pair else (str(position), item)
        if not isinstance(parameter, torch.Tensor):
            raise streamlap.InvalidType(
                f"item {position} is no parameter and no pair of a name and one, but a "
                f"{type(parameter).__name__}"
            )
        yield name, parameter


def _refuse_wrappers(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise streamlap.InvalidType(
                "DDP reduces gradients after they are accumulated: use "
                "model.register_comm_hook(streamlap.training.DDPGradients(model), "
                "streamlap.training.ddp_comm_hook)"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise streamlap.InvalidType(
                "FullyShardedDataParallel flattens parameters and reduces their gradients itself: "
                "use torch.distributed.fsdp.fully_shard, which stream_gradients() serves"
            )


def _check(name: str, parameter: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        raise streamlap.InvalidArgument(
            f"{name!r} has no shape yet: run the lazy module once before stream_gradients()"
        )
    if not parameter.is_leaf:
        raise streamlap.InvalidArgument(
            f"{name!r} is no leaf: it was computed, so no gradient is accumulated in it"
        )
    if parameter.device.type not in ("cpu", "cuda"):
        raise streamlap.InvalidArgument(
            f"{name!r} is on {parameter.device}: move the model to a CPU or a GPU first"
        )
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    if any(hasattr(hook, "sends_gradients") for hook in hooks.values()):
        raise streamlap.InvalidArgument(
            f"the gradient of {name!r} is sent already: close() the other handle first"
        )
