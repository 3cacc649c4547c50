"""``stream_gradients``: each gradient goes to the host as soon as backward has made it."""

from __future__ import annotations

import contextlib
import math
import operator
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

import streamlap
from streamlap.training.arrival import Arrival, Shipment, within
from streamlap.training.parameters import checked_parameters
from streamlap.training.step import Gradients
from streamlap.uncompiled import uncompiled

MIN_BYTES = 256 << 10
BUCKET_BYTES = 4 << 20
AHEAD_BYTES = 1 << 20
"""Page-locked memory for gradients from this size on is made before they are there."""


def stream_gradients(
    model: torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = None,
    free: bool = False,
    min_bytes: int = MIN_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> GradientStream:
    """Send gradients to the host while backward runs; call it once, before the training loop::

        grads = streamlap.stream_gradients(model)
        for batch in data:
            loss(model(batch)).backward()
            on_host = grads.result()  # {name: tensor}

    The handle stays attached until its ``close()``; it is a context manager, too. What a step is,
    and how to begin CPU work while backward runs, is told at :class:`Gradients`.

    Args:
        model: a module, or parameters, or pairs ``(name, parameter)``. Names are those of
            ``named_parameters()``, or else positions ("0", "1", ...); a shared parameter has its
            first one. What does not require grad is left out. Give the module that is called
            rather than parts of it: only then is the end of a pass known under reentrant
            checkpointing.
        dtype: convert to it, on the gradient's device, before the copy.
        free: give up the gradient on the device: the hook sets ``p.grad`` to None, and the memory
            is free once it has been read. Further backward passes of the step are added on the
            host, in order, with the arithmetic that the device would have used. If False,
            ``p.grad`` is as without streamlap, every pass sends what it has come to, and the last
            copy is the result; to save the others, attach for the last pass of a step only.
        min_bytes: smaller gradients travel together.
        bucket_bytes: as many of them as make up so many bytes, or what there is when the pass ends.

    Raises:
        InvalidType: no module and no parameters, or a module under DDP or FSDP1, which reduce
            gradients elsewhere: for DDP there is :func:`streamlap.training.ddp_comm_hook`.
        InvalidArgument: no parameters, none that requires grad, one that is no leaf, is on a device
            that is not served, has a hook of ours already, a dtype of whole numbers, or sizes that
            are none.

    In ``backward()``: InvalidArgument with ``create_graph=True``, for a parameter that has moved
    to another device since, or if a hook before ours took the gradient; UnsupportedTensor for a
    sparse one; PoolExhausted. The pass has failed then.

    Stream order: a copy starts after its gradient, on whatever stream that is accumulated. With
    ``free=False`` the streams that are current for ``backward()`` wait at its end until the
    gradients have been read, so the optimizer, ``zero_grad()`` and the next accumulation may write
    to them; on a CPU the calling thread waits. Where other post-accumulate hooks were registered
    after ours, the stream waits before they are called. With ``free=True`` nothing waits. FSDP2
    (``fully_shard``) needs nothing else: the hooks come after its reduction, and what is sent is
    the shard of this process. Thread-safe.

    Page-locked memory for the large gradients of a GPU is made by threads of the pool's own from
    this call on, as by ``prewarm(wait=False)``: the first step finds it, or some of it.
    """
    names, parameters = checked_parameters(model)
    for value, what in ((min_bytes, "min_bytes"), (bucket_bytes, "bucket_bytes")):
        if isinstance(value, bool) or not isinstance(value, int):
            raise streamlap.InvalidType(f"{what} must be an int, not {value!r}")
        if value < 0:
            raise streamlap.InvalidArgument(f"{what} must not be negative, not {value}")
    if not isinstance(free, bool):
        raise streamlap.InvalidType(f"free must be True or False, not {free!r}")
    stream = GradientStream(names, dtype, free, min_bytes, bucket_bytes)
    try:
        stream._attach(parameters, model if isinstance(model, torch.nn.Module) else None)
    except BaseException:
        stream.close()
        raise
    return stream


@dataclass(eq=False)
class _Bucket:
    """Small gradients that one stream has made."""

    arrivals: list[Arrival] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0


@dataclass(eq=False)
class _Task:
    """What one of the engine's tasks has made."""

    buckets: dict[tuple[torch.device, int], _Bucket] = field(default_factory=dict)
    shipments: list[Shipment] = field(default_factory=list)


class _Hook:
    """Calls the handle for one parameter."""

    sends_gradients = True

    def __init__(self, owner: GradientStream, name: str, device: torch.device) -> None:
        self.owner = owner
        self.name = name
        self.device = device

    def __call__(self, parameter: torch.Tensor) -> None:
        self.owner._accumulated(self, parameter)


class _Forward:
    """Has the pass begin where it leaves the module's outputs: in the outermost of its tasks.

    A copy of the module has a hook that does nothing: it is another's gradient stream.
    """

    def __init__(self, begin: Callable[[], object] | None = None) -> None:
        self._begin = begin

    def __reduce__(self) -> tuple[type[_Forward], tuple[()]]:
        return _Forward, ()

    def __call__(self, _module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        begin = self._begin
        if begin is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for leaf in _pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(lambda _grad: _nothing(begin()))  # type: ignore[no-untyped-call]


def _nothing(_value: object) -> None:
    """A tensor's hook that returns something replaces its gradient."""


class GradientStream(Gradients):
    """The handle of :func:`stream_gradients`."""

    def __init__(
        self,
        names: list[str],
        dtype: torch.dtype | None,
        free: bool,
        min_bytes: int,
        bucket_bytes: int,
    ) -> None:
        super().__init__(names, dtype)
        self._free = free
        self._min_bytes = min_bytes
        self._bucket_bytes = bucket_bytes
        self._handles: list[Any] = []
        # Weakly: it is theirs who wait for it, and goes with the step.
        self._flying: deque[weakref.ref[Shipment]] = deque()
        self._adder: ThreadPoolExecutor | None = None

    def __enter__(self) -> GradientStream:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Detach from the parameters. What was sent can still be had from :meth:`result`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        super().close()

    def _attach(self, parameters: list[torch.Tensor], module: torch.nn.Module | None) -> None:
        for name, parameter in zip(self._names, parameters, strict=True):
            hook = _Hook(self, name, parameter.device)
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        if module is not None and not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            self._handles.append(module.register_forward_hook(_Forward(self._enter)))
        on_gpus = [one for one in parameters if one.is_cuda]
        with contextlib.suppress(streamlap.StreamlapError):  # a hint: who needs it says what is
            for nbytes, block in memory_ahead(on_gpus, self._dtype, self._min_bytes):
                streamlap.prewarm(nbytes, block=block, wait=False)

    def _begin(self) -> _Task:
        return _Task()

    @uncompiled
    def _accumulated(self, hook: _Hook, parameter: torch.Tensor) -> None:
        """Send the gradient that has just been accumulated, on the current stream."""
        grad = _checked(hook, parameter)
        with self._changed:
            task = self._kept()
            arrival, earlier = self._expect(hook.name)
            if earlier is None or not self._free:
                self._note(arrival)
            else:
                self._note(self._summed(earlier, arrival))
        if self._free:
            parameter.grad = None
        # Whoever comes next may write to it.
        followed = next(reversed(parameter._post_accumulate_grad_hooks.values())) is not hook
        nbytes = grad.numel() * (self._dtype or grad.dtype).itemsize
        if nbytes >= self._min_bytes or followed:
            self._send(task, [arrival], [grad], followed)
            return
        device = grad.device
        stream = 0
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream  # site: gradients.bucket_stream
        bucket = task.buckets.setdefault((device, stream), _Bucket())
        bucket.arrivals.append(arrival)
        bucket.grads.append(grad)
        bucket.nbytes += nbytes
        if bucket.nbytes >= self._bucket_bytes:
            del task.buckets[device, stream]
            self._send(task, bucket.arrivals, bucket.grads)

    def _send(
        self,
        task: _Task,
        arrivals: list[Arrival],
        grads: list[torch.Tensor],
        followed: bool = False,
    ) -> None:
        with self._changed:  # each GPU has a thread of the engine's
            while self._flying:
                first = self._flying[0]()
                if first is not None and not first.done():  # that lets go of what was read
                    break
                self._flying.popleft()
        alone = len(grads) == 1  # which to_cpu looks at in a fifth of the time
        try:
            shipment = self._to_cpu(
                grads[0] if alone else grads,
                protect=followed and not self._free,  # site: gradients.followed
            )
        except BaseException as error:
            for arrival in arrivals:
                arrival.lost(error)
            self._wake()
            raise
        self._flying.append(weakref.ref(shipment))
        task.shipments.append(shipment)
        for index, arrival in enumerate(arrivals):
            arrival.sent(shipment, _itself if alone else operator.itemgetter(index))
        self._wake()

    def _finish(self, kept: _Task) -> None:
        # The current streams are now the caller's, which the engine has made wait for all others.
        for bucket in kept.buckets.values():
            self._send(kept, bucket.arrivals, bucket.grads)
        kept.buckets.clear()
        if not self._free:
            for shipment in kept.shipments:
                if not shipment.done():  # a wait takes the host several times as long
                    shipment.transfer.wait_source()  # site: gradients.protect

    def _drop(self, kept: _Task | None, error: Exception) -> None:
        for bucket in kept.buckets.values() if kept else ():
            for arrival in bucket.arrivals:
                arrival.lost(error)

    def _summed(self, earlier: Arrival, latest: Arrival) -> Arrival:
        """Return the arrival of their sum, which a thread of its own makes: it takes a while."""
        if self._adder is None:
            self._adder = ThreadPoolExecutor(1, "streamlap-gradients")
        return _Sum(latest, self._adder.submit(_add, earlier, latest))


class _Sum(Arrival):
    """A gradient and the step's earlier ones, being added."""

    def __init__(self, latest: Arrival, total: Future[torch.Tensor]) -> None:
        super().__init__(latest.name, latest.turn, latest._changed)
        self._total = total
        self._latest: Arrival | None = latest  # until it is added: nobody needs it after that
        self._order = math.inf
        me = weakref.ref(self)

        def added(_total: Future[torch.Tensor]) -> None:
            this = me()
            if this is not None:
                this._order, this._latest = this.order(), None

        total.add_done_callback(added)

    def travels(self) -> bool:
        latest = self._latest
        return latest is None or latest.travels()

    def order(self) -> float:
        latest = self._latest
        return self._order if latest is None else latest.order()

    def done(self) -> bool:
        return self._total.done()

    def landing(self, deadline: float | None) -> Callable[[], torch.Tensor]:
        return lambda: within(self._total, deadline)


def memory_ahead(
    parameters: list[torch.Tensor], dtype: torch.dtype | None, min_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield what to reserve, a block at a time, in the order in which backward will ask for them.

    Each is the bytes in all of blocks of one size, and that size.
    """
    in_all: Counter[int] = Counter()
    for parameter in reversed(parameters):
        to_local = getattr(parameter, "to_local", None)  # FSDP2's have one
        shard = parameter if to_local is None else to_local()
        block = shard.numel() * (dtype or shard.dtype).itemsize
        if block >= max(min_bytes, AHEAD_BYTES):
            in_all[block] += block
            yield in_all[block], block


def _itself(result: torch.Tensor) -> torch.Tensor:
    return result


def _add(earlier: Arrival, latest: Arrival) -> torch.Tensor:
    total = earlier.tensor()
    with torch.no_grad():
        return total.add_(latest.tensor())


def _checked(hook: _Hook, parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter's gradient, or say why it cannot be sent."""
    grad = parameter.grad
    what = f"the gradient of {hook.name!r}"
    if grad is None:
        raise streamlap.InvalidArgument(
            f"{what} was taken by a hook before: call stream_gradients() before that one is made"
        )
    if torch.is_grad_enabled():
        raise streamlap.InvalidArgument(
            f"{what} has a history: stream_gradients() cannot be used with create_graph=True"
        )
    if grad.device != hook.device:
        raise streamlap.InvalidArgument(
            f"{what} is on {grad.device}, but the parameter was on {hook.device} when it was "
            "attached: move the model first"
        )
    if grad.layout is not torch.strided:
        raise streamlap.UnsupportedTensor(
            f"{what} is sparse ({grad.layout}): build the module with sparse=False, or leave it out"
        )
    return grad
