"""``streamlap.timeline()``: record what happens in a ``with`` block, then look at it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from os import PathLike
from types import TracebackType

import torch

from streamlap import observe, watch
from streamlap.devices import (
    StreamLike,
    as_stream,
    cuda_in_use,
    parse_device,
    place_of,
    require_no_capture,
)
from streamlap.errors import InvalidArgument, InvalidType
from streamlap.traces import perfetto, picture
from streamlap.traces.recorder import Recorder
from streamlap.traces.spans import Span
from streamlap.traces.summary import Summary, summarize

_one_at_a_time = threading.Lock()


class Timeline:
    """What streamlap did while a ``with streamlap.timeline() as tl:`` block ran.

    Recorded are the calls of ``fn`` in pipelines, ``run`` and ``parallel_run``, copies and their
    last steps, pools that grew, and who waited for whom. Work that you enqueue yourself is seen
    where :meth:`range` marks it. On a GPU times are those of CUDA events, elsewhere of the clock of
    ``time.perf_counter()``.

    The block's end waits for the work that was recorded (not after Ctrl-C); a pipeline with
    ``wait=False`` on a CPU goes on by itself, so ask for its results inside the block. From then on
    :attr:`spans`, :meth:`summary`, :meth:`save` and :meth:`plot` answer; before, they raise
    InvalidArgument. One timeline is recorded at a time in a process, from all threads.
    """

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._spans: list[Span] | None = None
        self._seconds = 0.0

    def __enter__(self) -> Timeline:
        watch.enter()
        with _one_at_a_time:
            if self._recorder is not None:
                raise InvalidArgument("a timeline records one block; make another: timeline()")
            if observe.recorder is not None:
                raise InvalidArgument("another timeline is being recorded")
            observe.recorder = self._recorder = Recorder()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        if recorder is None or observe.recorder is not self._recorder:
            raise InvalidArgument("the timeline is not being recorded")
        observe.recorder = None
        self._seconds = recorder.now() - recorder.begin
        self._recorder = Recorder()  # lets go of the events in the end
        self._spans = []
        # The block's own error must arrive, whatever state it left the devices in.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
            if kind is None or not issubclass(kind, KeyboardInterrupt):
                recorder.wait()
            self._spans = recorder.spans()

    @property
    def spans(self) -> list[Span]:
        """All spans in order of their begin."""
        if self._spans is None:
            raise InvalidArgument("the timeline has not ended: ask after its with block")
        return list(self._spans)

    @property
    def seconds(self) -> float:
        """Seconds that the block took."""
        if self._spans is None:
            raise InvalidArgument("the timeline has not ended: ask after its with block")
        return self._seconds

    def summary(self) -> Summary:
        """Return overlap, idle gaps, who waited for whom, and a line of advice.

        ``print(tl.summary())`` shows it.
        """
        return summarize(self.spans)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a trace for Perfetto or chrome://tracing.

        Args:
            path: a file that ends in ``.json``; replaced if it is there.

        Raises:
            InvalidArgument: another ending.
            OSError: it cannot be written.
        """
        perfetto.save(self.spans, path)

    def plot(self, path: str | PathLike[str], title: str | None = None) -> None:
        """Draw one lane a stream or thread, overlap shaded, the limit as a line.

        Args:
            path: a file that ends in ``.png``, ``.svg`` or ``.pdf``; replaced if it is there.
            title: what stands above; None: the summary's first line.

        Raises:
            InvalidArgument: another ending, or nothing was recorded.
            StreamlapError: matplotlib is missing (``pip install "streamlap[viz]"``).
            OSError: it cannot be written.
        """
        picture.plot(self.spans, path, title)

    @contextlib.contextmanager
    def range(
        self, name: str, stream: StreamLike = None, device: str | int | torch.device | None = None
    ) -> Iterator[None]:
        """Record what the block does as compute.

        Args:
            name: what to call it.
            stream: where the block enqueues; None: the device's current stream.
            device: where it runs; None: the current CUDA device if CUDA is in use, else the CPU,
                in the calling thread.

        Outside the timeline's own block it records nothing.
        """
        if not isinstance(name, str):
            raise InvalidType(f"name must be a str, not {type(name).__name__}")
        recorder = self._recorder
        if recorder is None or self._spans is not None:
            yield
            return
        if device is None:
            device = "cuda" if stream is not None or cuda_in_use() else "cpu"
        place = place_of(parse_device(device))
        native = as_stream(stream, place) if place.is_cuda or stream is not None else None
        require_no_capture(native, "timeline.range()")
        with recorder.compute(place, native, name):
            yield


def timeline() -> Timeline:
    """Return a timeline, to be used as ``with streamlap.timeline() as tl:``.

    See :class:`Timeline`. Recording costs two time stamps a call of ``fn`` and two a copy.
    """
    return Timeline()
