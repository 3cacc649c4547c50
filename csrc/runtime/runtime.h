// The seam under everything: memory, streams, events, copies, launches and the clock.
//
// One interface, several implementations (CUDA, worker threads, later a simulation). Code above it
// is written once and behaves the same on each; tests/cpp/test_runtime_contract.cpp says what "the
// same" means. Every function may be called from any thread. None of them needs Python.
//
// Rules that hold on every implementation:
//   * Work on one stream runs in order of issue; streams are ordered by events only.
//   * record() captures the work issued to the stream so far; recording again replaces it.
//   * wait() captures what the event stands for at the call. An event never recorded is no wait.
//   * The first error poisons its stream: later work is skipped, events recorded there and streams
//     that wait for them carry the error on, and the next sync of event or stream throws it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/site.h"
#include "moves/move.h"

namespace streamlap {

enum class StreamKind {
  compute,  // where results are made
  copy,     // where DMA runs
  host,     // a worker thread: callables, and calls that may block
};

// Borrows a stream: ours, or one that torch, CuPy or numba made.
struct StreamRef {
  std::uintptr_t handle = 0;
  int device = 0;
  StreamKind kind = StreamKind::compute;

  bool operator==(const StreamRef&) const = default;
};

// A point in a stream. What it stands for is replaced as a whole by record().
class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  virtual ~Event() = default;
};
using EventPtr = std::shared_ptr<Event>;

// How far an event is, whatever became of its work.
enum class EventState {
  pending,  // not reached, or it could not be asked just now
  passed,   // never recorded, or all before it has ended: done, failed or skipped
  lost,     // the device's context is gone: no call will ever tell
};

// Holds a stream until open(). Opens itself with an error after limit_seconds, so that a test that
// goes wrong ends. Destroying it opens it.
class Gate {
 public:
  static constexpr double limit_seconds = 5.0;

  Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  virtual ~Gate() = default;
  virtual void open() noexcept = 0;
  virtual bool timed_out() const noexcept = 0;
};

class Runtime {
 public:
  Runtime() = default;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  virtual ~Runtime() = default;

  virtual const char* name() const noexcept = 0;
  // Devices that streams can be made on. The host runtime has as many as are asked for.
  virtual int device_count() const = 0;
  // True when others (torch, CuPy) enqueue work on pinned memory without telling this runtime.
  virtual bool uses_device_memory() const noexcept = 0;

  // True when the clock stands still while nobody waits: a wait without a limit then either ends or
  // is a deadlock, and need not be cut into slices.
  virtual bool virtual_time() const noexcept { return false; }
  // A host that goes on by itself lets a simulation's devices move. Called without any lock held:
  // callables may run.
  virtual void poll() {}

  // True when the device is in use by this process already: asking creates no context there.
  virtual bool device_active(int device) = 0;

  // Until the answer dies, in this thread, calls for `device` are cheaper; null where they are
  // cheap anyway. Nobody else's code runs meanwhile.
  virtual std::shared_ptr<void> hold_device(int /*device*/) { return nullptr; }

  // Page-locked memory, usable from every device. Throws Error(out_of_memory).
  virtual void* alloc_pinned(std::size_t bytes) = 0;
  virtual void free_pinned(void* pointer, std::size_t bytes) noexcept = 0;
  // In words, how large blocks of it are made.
  virtual std::string pinned_how() const = 0;
  // For tests and the bench binary; the library's users bring device memory from torch or CuPy.
  virtual void* alloc_device(int device, std::size_t bytes) = 0;
  virtual void free_device(int device, void* pointer, std::size_t bytes) noexcept = 0;

  // Streams live as long as the runtime.
  virtual StreamRef stream_create(int device, StreamKind kind, bool high_priority = false) = 0;
  // True while a CUDA graph is being captured on the stream.
  virtual bool stream_capturing(StreamRef stream) = 0;
  // True when everything issued so far is done; never throws a poisoning error.
  virtual bool stream_idle(StreamRef stream) = 0;
  // Blocks the calling thread; throws the stream's error and thereby takes it off the stream.
  virtual void stream_sync(StreamRef stream, Site site) = 0;
  virtual void stream_wait(StreamRef stream, const Event& event, Site site) = 0;
  // In order with the stream's work: later work runs although earlier work failed. For streams that
  // unrelated transfers share, so that the error of one is not delivered to the next.
  virtual void stream_reset_error(StreamRef stream) = 0;

  virtual EventPtr event_create(int device, bool timed = false) = 0;
  virtual void event_record(Event& event, StreamRef stream, Site site) = 0;
  // True when done or never recorded. Throws the error it carries.
  virtual bool event_query(const Event& event, Site site) = 0;
  // For who must know whether memory is out of use: an exception of event_query() or
  // event_sync_for() may be the event's, which is then over, or of the asking, and tells nothing.
  virtual EventState event_state(const Event& event, Site site) noexcept = 0;
  // Blocks the calling thread for at most `timeout`; true when done. Throws the error it carries.
  virtual bool event_sync_for(const Event& event, std::chrono::nanoseconds timeout, Site site) = 0;
  // Seconds between two timed events that are both done.
  virtual double event_elapsed(const Event& begin, const Event& end) = 0;

  // When a done event was reached, on the clock of now(); NaN where the runtime cannot tell.
  virtual double event_time(const Event& event) = 0;

  // Any direction; ranges must not overlap. Page-locked or device memory: returns at once, but CUDA
  // copies from host to host in the calling thread, after the stream's work.
  // Ordinary memory on CUDA: may block. On a stream of kind host: its thread copies, and both
  // ranges are host memory.
  virtual void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) = 0;
  // Many copies at once, perhaps with a cast. `move` has passed moves::check(). Its range is
  // page-locked memory or the stream's device's; on CUDA the far sides are the device's.
  virtual void move(moves::MovePtr move, StreamRef stream) = 0;
  // Runs a callable in order with the stream's work. CUDA: on streams of kind host only.
  virtual void launch(std::function<void()> task, StreamRef stream) = 0;

  // True when a checker looks on and wants to be told what the calls above do not say.
  virtual bool checked() const noexcept { return false; }
  // What a checker is told beside the calls above; nothing by default.
  // Pool memory is handed to somebody new: everybody before must be done with it.
  virtual void taken(void* /*pointer*/, std::size_t /*bytes*/) {}
  // Memory that another library has just given to the caller: whoever had it before is done with
  // it.
  virtual void fresh(void* /*pointer*/, std::size_t /*bytes*/) {}
  // The calling thread may read from now on.
  virtual void host_reads(const void* /*pointer*/, std::size_t /*bytes*/) {}
  // Work that others have enqueued on a stream reads or writes memory.
  virtual void declare(StreamRef /*stream*/, const void* /*pointer*/, std::size_t /*bytes*/,
                       bool /*writes*/) {}
  // Whoever takes a lock knows what those knew who had it before. Anything that orders threads is a
  // lock in this sense.
  virtual void lock_acquired(const void* /*lock*/, Site /*site*/) noexcept {}
  virtual void lock_released(const void* /*lock*/, Site /*site*/) noexcept {}
  // The calling thread touches what a lock guards, whether it holds the lock or not. Told in the
  // programs of the mutation gate only.
  virtual void guarded(const void* /*lock*/, Site /*site*/) noexcept {}

  virtual std::unique_ptr<Gate> gate(StreamRef stream) = 0;
  // An event at the end of what each busy worker of the device has been given. In a worker's own
  // task: of the workers that do not compute, since one that waited for another could wait for
  // itself.
  virtual std::vector<EventPtr> mark_workers(int device) = 0;
  // Waits for all work on the device that this runtime or anybody else has issued.
  virtual void device_sync(int device) = 0;
  // Seconds on a monotonic clock, the one of Python's time.perf_counter() where time is real.
  virtual double now() const = 0;
  // True when every stream this runtime created is idle; for the exit handler.
  virtual bool idle() = 0;
};

// Whether this process can use a GPU, and the reason if it cannot.
struct CudaProbe {
  bool built = false;  // this library was built with CUDA
  int devices = 0;
  int driver_version = 0;   // as cudaDriverGetVersion: 13000 is 13.0
  int runtime_version = 0;  // of the static runtime inside this library
  std::string architectures;
  std::string reason;  // empty when devices > 0
};

// How large blocks of page-locked memory are made.
enum class PinnedWay {
  measured,    // the first of those below that is fast enough here, or the fastest
  huge_pages,  // mapped, made present by several threads, registered
  base_pages,  // the same on the system's ordinary pages
  driver,      // cudaHostAlloc
};

// Implemented by csrc/host and csrc/cuda; in a build without CUDA
// runtime/no_cuda.cpp answers instead.
std::shared_ptr<Runtime> make_host_runtime();
std::shared_ptr<Runtime> make_cuda_runtime(
    PinnedWay way = PinnedWay::measured);  // throws Error with CudaProbe::reason
CudaProbe probe_cuda();

}  // namespace streamlap
