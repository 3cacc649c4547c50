"""Gradients to the host under DistributedDataParallel: as a communication hook, once reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import streamlap
from streamlap.training.arrival import Arrival
from streamlap.training.step import Gradients
from streamlap.uncompiled import uncompiled

InnerHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class DDPGradients(Gradients):
    """The state of :func:`ddp_comm_hook`, and the handle to what it sends::

        grads = streamlap.training.DDPGradients(model)
        model.register_comm_hook(grads, streamlap.training.ddp_comm_hook)

    Args:
        model: the ``DistributedDataParallel``. Names are those of the module within.
        inner: the hook that reduces a bucket; ``allreduce_hook`` over the model's process group if
            left out. Compressing ones of ``torch.distributed.algorithms`` fit, too.
        inner_state: that hook's state.
        dtype: convert to it, on the gradient's device, before the copy.

    Attributes:
        inner: the hook that reduces.

    Raises:
        InvalidType: ``model`` is no DistributedDataParallel, or another argument is of no use.

    What is sent is the reduced bucket. Passes under ``no_sync()`` reduce nothing and send nothing;
    the next one sends what they have accumulated as well. Parameters that a pass did not use come
    with the bucket that they are in.
    """

    def __init__(
        self,
        model: torch.nn.parallel.DistributedDataParallel,
        inner: InnerHook | None = None,
        inner_state: Any = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise streamlap.InvalidType(
                f"DDPGradients needs a DistributedDataParallel, not {type(model).__name__}"
            )
        if inner is None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            inner = default_hooks.allreduce_hook
            inner_state = model.process_group if inner_state is None else inner_state
        if not callable(inner):
            raise streamlap.InvalidType(f"inner must be a communication hook, not {inner!r}")
        named = {name: one for name, one in model.module.named_parameters() if one.requires_grad}
        super().__init__(list(named), dtype)
        self.inner = inner
        self.inner_state = inner_state
        self._parameters = named  # kept, so that their ids stay theirs
        self._name_of = {id(parameter): name for name, parameter in named.items()}

    @uncompiled
    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self._enter()
        first = bucket.buffer().storage_offset()
        arrivals, picks = [], []
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            with self._changed:
                arrival, _earlier = self._expect(self._name_of[id(parameter)])
                self._note(arrival)
            arrivals.append(arrival)
            offset = grad.storage_offset() - first
            picks.append(functools.partial(_view, grad.shape, grad.stride(), offset))
        try:
            reduced = self.inner(self.inner_state, bucket)
        except BaseException as error:
            self._lose(arrivals, error)
            raise

        def send(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            try:
                value: Any = done.value()
                flat: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
                shipment = self._to_cpu(
                    flat,
                    # Whoever waits for the bucket may write to it: the optimizer, the next pass.
                    protect=True,  # site: ddp.protect
                )
            except BaseException as error:
                self._lose(arrivals, error)
                raise
            for arrival, pick in zip(arrivals, picks, strict=True):
                arrival.sent(shipment, pick)
            self._wake()
            return flat

        # Chained: not before it is reduced, and on a stream that waits for that.
        return reduced.then(send)

    def _lose(self, arrivals: list[Arrival], error: BaseException) -> None:
        for arrival in arrivals:
            arrival.lost(error)
        self._wake()


def ddp_comm_hook(state: DDPGradients, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket and send it to the host; for ``DistributedDataParallel.register_comm_hook``.

    Returns:
        The future of the reduced bucket. It is done, or on a GPU its stream has passed, when the
        bucket has been read, so that DDP and the optimizer may write to it.
    """
    return state._reduce(bucket)


ddp_comm_hook.__annotations__.clear()  # DDP compares them with its types, and refuses strings


def _view(
    shape: torch.Size, stride: tuple[int, ...], offset: int, flat: torch.Tensor
) -> torch.Tensor:
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)
