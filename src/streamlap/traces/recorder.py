"""Recording a timeline: events while it runs; when it has ended, times out of them."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

from streamlap import _native
from streamlap.devices import Place
from streamlap.observe import Copy
from streamlap.serving import current
from streamlap.traces.spans import Span

_LEAST_WAIT = 20e-6  # seconds; below it a wait is what any two operations have between them

_Key = tuple[str, int]


def _clock() -> float:
    """Return the time that events are placed on: a simulation's, where one serves."""
    return current.get().now()


@dataclass
class _Call:
    """A call of ``fn`` or a range of the user's, from one moment or event to another."""

    name: str
    place: Place
    lane: str
    asked: float
    after: list[_native.TransferMarks]  # copies that the stream was made to wait for
    begin: float | _native.Event
    end: float | _native.Event | None = None


@dataclass
class _Copied:
    copy: Copy
    marks: _native.TransferMarks
    asked: float


@dataclass
class Recorder:
    """Collects what the library tells. Any thread may tell; see ``observe.Recorder``."""

    begin: float = field(default_factory=_clock)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._copies: list[_Copied] = []
        self._of_threads: list[Span] = []
        self._awaited: dict[_Key, list[tuple[float, _native.TransferMarks]]] = {}
        self._computing: dict[str, list[tuple[str, int]]] = {}
        self._threads: dict[int, str] = {}

    # -- told by the library

    def compute(self, place: Place, stream: _native.Stream | None, name: str) -> _Timing:
        return _Timing(self, place, stream, name)

    def copied(self, native: _native.Transfer, copy: Copy) -> None:
        self._copies.append(_Copied(copy, native.marks(), _clock()))

    def stream_waits(self, stream: _native.Stream, place: Place, native: _native.Transfer) -> None:
        key = (str(place), stream.handle)
        with self._lock:
            self._awaited.setdefault(key, []).append((_clock(), native.marks()))

    @contextlib.contextmanager
    def waiting(self, lane: str) -> Iterator[None]:
        begin = _clock()
        try:
            yield
        finally:
            end = _clock()
            if end - begin > _LEAST_WAIT:
                self._note_thread("wait", f"waits for {lane}", begin, end, waits_for=lane)

    def now(self) -> float:
        return _clock()

    def grew(self, nbytes: int, begin: float) -> None:
        name = f"{nbytes} bytes from the system"
        self._note_thread("growth", name, begin, _clock(), nbytes=nbytes)

    def _note_thread(
        self, kind: str, name: str, begin: float, end: float, nbytes: int = 0, waits_for: str = ""
    ) -> None:
        lane = self._thread_lane()
        self._of_threads.append(
            Span(kind, name, lane, begin, end, nbytes=nbytes, waits_for=waits_for)  # type: ignore[arg-type]
        )

    def _thread_lane(self) -> str:
        """Return a lane for the calling thread, its own although another has its name."""
        thread = threading.current_thread()
        own = "worker" if _native.on_worker_thread() else f"thread {thread.name}"
        with self._lock:
            if threading.get_ident() not in self._threads:
                name, number = own, 1
                while name in self._threads.values():
                    number += 1
                    name = f"{own} {number}"
                self._threads[threading.get_ident()] = name
            return self._threads[threading.get_ident()]

    def _begin_call(self, place: Place, stream: _native.Stream | None, name: str) -> _Call | None:
        asked = _clock()
        if place.is_cuda and stream is not None and stream.capturing():
            return None  # it does not run now, and its events would be the graph's
        key = ("stream", stream.handle) if stream else ("thread", threading.get_ident())
        with self._lock:
            awaited = self._awaited.pop((str(place), key[1]), [])
            known = self._computing.setdefault(str(place), [])
            if key not in known:
                known.append(key)
            position = known.index(key)
        lane = f"{place} compute" if not position else f"{place} compute {position + 1}"
        begin = stream.record(timed=True) if place.is_cuda and stream is not None else asked
        # A worker calls only when it has waited: the wait was asked for before the call.
        first = min([asked, *[when for when, _ in awaited]])
        return _Call(name, place, lane, first, [marks for _, marks in awaited], begin)

    def _end_call(self, call: _Call, stream: _native.Stream | None) -> None:
        on_device = call.place.is_cuda and stream is not None
        call.end = stream.record(timed=True) if on_device and stream is not None else _clock()
        self._calls.append(call)

    # -- afterwards

    def wait(self) -> None:
        """Block until all that was recorded is done; what failed is done too."""
        for call in self._calls:
            if isinstance(call.end, _native.Event):
                with contextlib.suppress(Exception):
                    call.end.synchronize()
        for copied in self._copies:
            with contextlib.suppress(Exception):
                copied.marks.synchronize()

    def spans(self) -> list[Span]:
        """Return what is done as spans; times count from the recorder's begin."""
        clock = _Clock()
        spans = list(self._of_threads)
        lanes: dict[str, list[_Work]] = {}
        for work in (*self._calls_done(clock), *self._copies_done(clock)):
            spans += work.spans
            lanes.setdefault(work.spans[0].lane, []).append(work)
        for works in lanes.values():
            spans += _waits(works)
        shifted = [_shifted(span, -self.begin) for span in spans]
        return sorted(shifted, key=lambda span: (span.begin, span.end))

    def _calls_done(self, clock: _Clock) -> Iterator[_Work]:
        for call in self._calls:
            assert call.end is not None
            begin = clock.time_of(call.begin, call.place)
            end = clock.time_of(call.end, call.place)
            if math.isnan(begin) or math.isnan(end):
                continue
            span = Span("compute", call.name, call.lane, begin, end, device=str(call.place))
            ends = [clock.times_of(marks, call.place)[3] for marks in call.after]
            yield _Work([span], call.asked, _latest(ends), f"{call.place} to host")

    def _copies_done(self, clock: _Clock) -> Iterator[_Work]:
        last_end: dict[str, float] = {}
        done = [
            (clock.times_of(copied.marks, copied.copy.place), copied) for copied in self._copies
        ]
        # One stream runs them one after the other; two threads may note them in another order.
        for times, copied in sorted(
            done, key=lambda found: (_or_zero(found[0][2]), found[1].asked)
        ):
            copy = copied.copy
            ready, begin, arrived, end = times
            if math.isnan(arrived) or math.isnan(end):
                continue
            if math.isnan(begin):  # as soon as it could, by the device's own clock
                begin = _latest([*ready, last_end.get(copy.lane, math.nan)])
                begin = min(copied.asked if math.isnan(begin) else begin, arrived)
            last_end[copy.lane] = arrived
            device = str(copy.place)
            name = f"{copy.nbytes} bytes {'to device' if copy.to_device else 'to host'}"
            spans = [
                Span("copy", name, copy.lane, begin, arrived, copy.nbytes, device, path=copy.path)
            ]
            if copy.path == "unpack":
                lane = copy.lane if copy.to_device else f"{device} worker"
                spans.append(Span("staging", "last step", lane, arrived, end, copy.nbytes, device))
            yield _Work(spans, copied.asked, _latest(ready), f"{device} compute")


@dataclass
class _Work:
    """Spans of one operation, when it was asked for, and what its stream had to wait for."""

    spans: list[Span]
    asked: float
    ready: float  # NaN: nothing, as far as is known
    producer: str


class _Timing:
    """The context around one call."""

    def __init__(
        self, recorder: Recorder, place: Place, stream: _native.Stream | None, name: str
    ) -> None:
        self._recorder = recorder
        self._stream = stream
        self._call = recorder._begin_call(place, stream, name)

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._call is None:
            return
        # What raised has run, too; its error must not be replaced by one of ours.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
            self._recorder._end_call(self._call, self._stream)


class _Clock:
    """Places the events of devices on the clock of ``time.perf_counter()``."""

    _TRIES = 5
    _MOST_TRIES = 50
    _NARROW = 100e-6

    def __init__(self) -> None:
        self._bases: dict[str, tuple[_native.Event, float]] = {}

    def base(self, place: Place) -> tuple[_native.Event, float]:
        """Return an event of the device and when it was reached, to about 10 us.

        It is recorded on an idle stream between two looks at the clock; of a few tries, the one
        with the least time between the looks counts. Where other processes have the device for
        milliseconds in between, it takes more of them.
        """
        known = self._bases.get(str(place))
        if known is None and not place.is_cuda:
            # Events of a worker know their time; the base is not looked at.
            event = place.idle_stream().record()
            known = self._bases[str(place)] = (event, math.nan)
        if known is None:
            stream = place.idle_stream()
            tries: list[tuple[float, float, _native.Event]] = []
            while len(tries) < self._TRIES or (
                len(tries) < self._MOST_TRIES and _width(min(tries, key=_width)) > self._NARROW
            ):
                before = time.perf_counter()
                event = stream.record(timed=True)
                event.synchronize()
                after = time.perf_counter()
                tries.append((after - before, (before + after) / 2, event))
            _, middle, event = min(tries, key=_width)
            known = self._bases[str(place)] = (event, middle)
        return known

    def time_of(self, moment: float | _native.Event, place: Place) -> float:
        return moment if isinstance(moment, float) else moment.time(*self.base(place))

    def times_of(
        self, marks: _native.TransferMarks, place: Place
    ) -> tuple[list[float], float, float, float]:
        return marks.times(*self.base(place))


def _width(tried: tuple[float, float, _native.Event]) -> float:
    return tried[0]


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _latest(times: list[float]) -> float:
    return max((moment for moment in times if not math.isnan(moment)), default=math.nan)


def _waits(works: list[_Work]) -> Iterator[Span]:
    """Yield the waits of one stream: what it was given stood still until another was ready."""
    idle_since = -math.inf
    for work in sorted(works, key=lambda work: work.spans[0].begin):
        first = work.spans[0]
        begin = max(idle_since, work.asked)
        end = min(work.ready, first.begin)
        if end - begin > _LEAST_WAIT:  # False for NaN
            yield Span(
                "wait",
                f"waits for {work.producer}",
                first.lane,
                begin,
                end,
                device=first.device,
                waits_for=work.producer,
            )
        idle_since = max(idle_since, first.end)


def _shifted(span: Span, by: float) -> Span:
    return Span(
        span.kind,
        span.name,
        span.lane,
        span.begin + by,
        span.end + by,
        span.nbytes,
        span.device,
        span.waits_for,
        span.path,
    )
