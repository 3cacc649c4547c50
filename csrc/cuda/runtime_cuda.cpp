#include "cuda/runtime_cuda.h"

#include <algorithm>
#include <limits>
#include <thread>

#include "base/process.h"
#include "base/stream_copy.h"
#include "cuda/context.h"
#include "cuda/cuda_event.h"
#include "cuda/kernels/gate.h"
#include "cuda/kernels/moves.h"
#include "runtime/host_gate.h"

namespace streamlap {

using cuda::check;
using cuda::CudaEvent;
using cuda::DeviceGuard;
using cuda::Recording;
using cuda::RecordingPtr;

namespace {

constexpr Site site_sync{"cuda.sync_stream"};
constexpr Site site_sync_host{"cuda.sync_host_stream"};
constexpr Site site_host_waits{"cuda.host_stream_waits_for_device"};
constexpr Site site_host_waits_host{"cuda.host_stream_waits_for_host"};
constexpr Site site_late{"cuda.refuse_unfinished_host_work"};
constexpr Site site_wait{"cuda.stream_waits"};
constexpr Site site_record{"cuda.record"};
constexpr Site site_record_host{"cuda.record_host_work"};
constexpr Site site_record_anew{"cuda.record_anew"};
constexpr Site site_query{"cuda.query"};
constexpr Site site_event_sync_host{"cuda.sync_event_of_host"};
constexpr Site site_event_sync{"cuda.sync_event"};
constexpr Site site_device_workers{"cuda.sync_device_workers"};
constexpr Site site_device{"cuda.sync_device"};
constexpr Site site_idle_workers{"cuda.drain_workers"};
constexpr Site site_idle_streams{"cuda.drain_streams"};

cudaStream_t native(StreamRef stream) { return reinterpret_cast<cudaStream_t>(stream.handle); }

Worker& worker(StreamRef stream) { return *reinterpret_cast<Worker*>(stream.handle); }

const CudaEvent& cuda_event(const Event& event) { return static_cast<const CudaEvent&>(event); }

std::string where(StreamRef stream) { return "device " + std::to_string(stream.device); }

// The driver has no wait with a limit, and its wait without one either spins for ever or has every
// record interrupt the host. So: poll, quickly at first, then ever more rarely, but never late by
// more than about 150 us.
bool wait_for(const Recording& recording, std::chrono::nanoseconds timeout) {
  using clock = std::chrono::steady_clock;
  constexpr std::chrono::nanoseconds spin = std::chrono::milliseconds(2);
  constexpr std::chrono::nanoseconds shortest = std::chrono::microseconds(20);
  constexpr std::chrono::nanoseconds longest = std::chrono::microseconds(100);
  const auto begin = clock::now();
  for (;;) {
    if (recording.done()) return true;
    const std::chrono::nanoseconds waited = clock::now() - begin;
    if (waited >= timeout) return false;
    if (waited > spin) {
      std::this_thread::sleep_for(std::clamp(waited / 100, shortest, longest));
    } else {
      std::this_thread::yield();
    }
  }
}

// What a kernel on `device` calls this memory. Refused is what it cannot reach: a fault of a kernel
// would be the end of the context.
template <class T>
T* reachable(T* pointer, int device, const char* what) {
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes", what);
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) {
    throw Error(ErrorKind::invalid_argument,
                std::string(what) + " is memory of device " + std::to_string(attributes.device) +
                    ", and the stream is one of device " + std::to_string(device));
  }
  if (attributes.type == cudaMemoryTypeUnregistered || attributes.devicePointer == nullptr) {
    throw Error(ErrorKind::invalid_argument,
                std::string(what) + " is ordinary memory, which a kernel cannot reach");
  }
  return static_cast<T*>(attributes.devicePointer);
}

class CudaGate final : public Gate {
 public:
  explicit CudaGate(StreamRef stream) {
    DeviceGuard guard(stream.device);
    check(cuda::load_gate(), "loading the gate kernel");
    for (auto load : {cuda::load_gather, cuda::load_scatter, cuda::load_cast, cuda::load_strided,
                      cuda::load_checksum}) {
      check(load(), "loading the kernels that move");
    }
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, sizeof(unsigned), cudaHostAllocPortable | cudaHostAllocMapped),
          "cudaHostAlloc", "gate");
    flag_ = static_cast<volatile unsigned*>(memory);
    *flag_ = cuda::gate_closed;
    void* mapped = nullptr;
    check(cudaHostGetDevicePointer(&mapped, memory, 0), "cudaHostGetDevicePointer");
    constexpr auto limit_ns = static_cast<unsigned long long>(limit_seconds * 1e9);
    check(cuda::launch_gate(static_cast<volatile unsigned*>(mapped), limit_ns, native(stream)),
          "launching the gate", [&] { return where(stream); });
  }
  ~CudaGate() override { open(); }

  // The flag's page is never freed: the kernel may read it after this object is gone.
  void open() noexcept override {
    if (*flag_ == cuda::gate_closed) *flag_ = cuda::gate_open;
  }
  bool timed_out() const noexcept override { return *flag_ == cuda::gate_timed_out; }

 private:
  volatile unsigned* flag_ = nullptr;
};

}  // namespace

CudaProbe probe_cuda() {
  CudaProbe probe;
  probe.built = true;
  probe.architectures = STREAMLAP_CUDA_ARCHS;
  cudaDriverGetVersion(&probe.driver_version);
  cudaRuntimeGetVersion(&probe.runtime_version);
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) {
    probe.devices = count;
    if (count == 0) probe.reason = "the CUDA driver reports no device";
    return probe;
  }
  cudaGetLastError();
  if (status == cudaErrorInsufficientDriver) {
    probe.reason = "no CUDA driver, or one older than CUDA " +
                   std::to_string(probe.runtime_version / 1000) + "." +
                   std::to_string(probe.runtime_version % 1000 / 10) + " needs";
  } else if (status == cudaErrorNoDevice) {
    probe.reason = "the CUDA driver reports no device (is CUDA_VISIBLE_DEVICES empty?)";
  } else {
    probe.reason = std::string("the CUDA driver answered ") + cudaGetErrorName(status) + ": " +
                   cudaGetErrorString(status);
  }
  return probe;
}

std::shared_ptr<Runtime> make_cuda_runtime(PinnedWay way) {
  process::require_usable();
  CudaProbe probe = probe_cuda();
  if (probe.devices == 0) throw Error(ErrorKind::runtime, probe.reason);
  process::mark_started();
  return std::make_shared<CudaRuntime>(probe.devices, way);
}

CudaRuntime::CudaRuntime(int device_count, PinnedWay way)
    : device_count_(device_count), pinned_(way), events_(std::make_shared<cuda::EventCache>()) {}

CudaRuntime::~CudaRuntime() = default;

std::shared_ptr<void> CudaRuntime::hold_device(int device) {
  return std::make_shared<DeviceGuard>(device);
}

void* CudaRuntime::alloc_pinned(std::size_t bytes) {
  process::require_usable();
  DeviceGuard guard(cuda::any_active_device());
  return pinned_.allocate(bytes);
}

void CudaRuntime::free_pinned(void* pointer, std::size_t) noexcept {
  if (process::leaking() || cuda::sticky()) return;
  try {
    DeviceGuard guard(cuda::any_active_device());
    pinned_.free(pointer);
  } catch (const Error&) {
    // A context that is gone takes its page-locked memory along.
  }
}

void* CudaRuntime::alloc_device(int device, std::size_t bytes) {
  DeviceGuard guard(device);
  void* pointer = nullptr;
  check(cudaMalloc(&pointer, bytes), "cudaMalloc",
        [&] { return std::to_string(bytes) + " bytes"; });
  return pointer;
}

void CudaRuntime::free_device(int device, void* pointer, std::size_t) noexcept {
  if (process::leaking() || cuda::sticky()) return;
  try {
    DeviceGuard guard(device);
    cudaFree(pointer);
    cudaGetLastError();
  } catch (const Error&) {
    // As above.
  }
}

StreamRef CudaRuntime::stream_create(int device, StreamKind kind, bool high_priority) {
  process::require_usable();
  if (device < 0 || device >= device_count_) {
    throw Error(ErrorKind::invalid_argument, "no CUDA device " + std::to_string(device));
  }
  if (kind == StreamKind::host) return workers_.add(device, kind);
  DeviceGuard guard(device);
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                     high_priority ? greatest : least),
        "cudaStreamCreateWithPriority");
  StreamRef ref{reinterpret_cast<std::uintptr_t>(stream), device, kind};
  std::lock_guard lock(mutex_);
  streams_.push_back(ref);
  return ref;
}

bool CudaRuntime::stream_capturing(StreamRef stream) {
  if (stream.kind == StreamKind::host) return false;
  DeviceGuard guard(stream.device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t answer = cudaStreamIsCapturing(native(stream), &status);
  if (answer == cudaErrorStreamCaptureImplicit) {
    // Asked about the legacy stream while another one is captured.
    cudaGetLastError();
    return true;
  }
  check(answer, "cudaStreamIsCapturing", [&] { return where(stream); });
  return status != cudaStreamCaptureStatusNone;
}

bool CudaRuntime::stream_idle(StreamRef stream) {
  if (stream.kind == StreamKind::host) return worker(stream).idle();
  if (cuda::sticky()) return true;
  DeviceGuard guard(stream.device);
  bool busy = cudaStreamQuery(native(stream)) == cudaErrorNotReady;
  cudaGetLastError();
  return !busy;
}

void CudaRuntime::stream_sync(StreamRef stream, Site) {
  if (stream.kind == StreamKind::host) {
    if (!dropped(site_sync_host)) worker(stream).sync();
    return;
  }
  if (dropped(site_sync)) return;
  DeviceGuard guard(stream.device);
  check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize",
        [&] { return where(stream); });
}

void CudaRuntime::stream_wait(StreamRef stream, const Event& event, Site) {
  RecordingPtr recording = cuda_event(event).last();
  if (!recording) return;
  if (stream.kind == StreamKind::host) {
    worker(stream).wait([recording] {
      if (const CompletionPtr& completion = recording->completion()) {
        if (dropped(site_host_waits_host)) return;
        completion->wait();
        completion->rethrow_if_failed();
      } else if (!dropped(site_host_waits)) {
        wait_for(*recording, std::chrono::nanoseconds::max());
      }
    });
    return;
  }
  if (recording->completion()) {
    if (!dropped(site_late) && !recording->done()) {
      throw Error(ErrorKind::invalid_argument,
                  "a CUDA stream cannot wait for host work that is not finished; enqueue the CUDA "
                  "work from a host stream after it");
    }
    return;
  }
  if (dropped(site_wait)) return;
  DeviceGuard guard(stream.device);
  check(cudaStreamWaitEvent(native(stream), recording->event(), 0), "cudaStreamWaitEvent",
        [&] { return where(stream); });
}

void CudaRuntime::stream_reset_error(StreamRef stream) {
  if (stream.kind == StreamKind::host) worker(stream).reset_error();
}

EventPtr CudaRuntime::event_create(int device, bool timed) {
  return std::make_shared<CudaEvent>(events_, device, timed);
}

void CudaRuntime::event_record(Event& event, StreamRef stream, Site) {
  auto& target = static_cast<CudaEvent&>(event);
  if (stream.kind == StreamKind::host) {
    if (dropped(site_record_host)) return;
    target.set(std::make_shared<Recording>(worker(stream).record()));
    return;
  }
  if (dropped(site_record)) return;
  RecordingPtr recording = target.fresh(stream.device);
  if (dropped(site_record_anew)) {
    if (RecordingPtr last = target.last(); last && last->event()) recording = std::move(last);
  }
  DeviceGuard guard(stream.device);
  check(cudaEventRecord(recording->event(), native(stream)), "cudaEventRecord",
        [&] { return where(stream); });
  target.set(std::move(recording));
}

bool CudaRuntime::event_query(const Event& event, Site) {
  RecordingPtr recording = cuda_event(event).last();
  return !recording || dropped(site_query) || recording->done();
}

EventState CudaRuntime::event_state(const Event& event, Site) noexcept {
  RecordingPtr recording = cuda_event(event).last();
  if (!recording) return EventState::passed;
  if (const CompletionPtr& completion = recording->completion()) {
    return completion->done() ? EventState::passed : EventState::pending;
  }
  try {
    return recording->done() ? EventState::passed : EventState::pending;
  } catch (...) {
    return cuda::sticky() ? EventState::lost : EventState::pending;
  }
}

bool CudaRuntime::event_sync_for(const Event& event, std::chrono::nanoseconds timeout, Site) {
  RecordingPtr recording = cuda_event(event).last();
  if (!recording) return true;
  if (const CompletionPtr& completion = recording->completion()) {
    if (!dropped(site_event_sync_host) && !completion->wait_for(timeout)) return false;
    completion->rethrow_if_failed();
    return true;
  }
  return dropped(site_event_sync) || wait_for(*recording, timeout);
}

double CudaRuntime::event_elapsed(const Event& begin, const Event& end) {
  RecordingPtr first = cuda_event(begin).last();
  RecordingPtr last = cuda_event(end).last();
  if (!first || !last || !first->done() || !last->done()) {
    throw Error(ErrorKind::invalid_argument, "elapsed time of events that are not both done");
  }
  if (first->completion() || last->completion()) {
    if (first->completion() && last->completion()) {
      return last->completion()->time() - first->completion()->time();
    }
    throw Error(ErrorKind::invalid_argument, "elapsed time between a device's and a host's event");
  }
  DeviceGuard guard(first->device());
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, first->event(), last->event()), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

double CudaRuntime::event_time(const Event& event) {
  RecordingPtr recording = cuda_event(event).last();
  return recording && recording->completion() && recording->completion()->done()
             ? recording->completion()->time()
             : std::numeric_limits<double>::quiet_NaN();
}

void CudaRuntime::copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) {
  if (stream.kind == StreamKind::host) {
    worker(stream).task([=] { stream_copy(dst, src, bytes); });
    return;
  }
  DeviceGuard guard(stream.device);
  check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, native(stream)), "cudaMemcpyAsync",
        [&] { return std::to_string(bytes) + " bytes, " + where(stream); });
}

void CudaRuntime::move(moves::MovePtr move, StreamRef stream) {
  if (stream.kind == StreamKind::host) {
    throw Error(ErrorKind::invalid_argument, "a move needs a CUDA stream, not a host stream");
  }
  DeviceGuard guard(stream.device);
  const bool sums = move->way == moves::Way::checksum;
  std::byte* base = sums ? nullptr : reachable(move->base, stream.device, "the range of a move");
  // One stands for all: its neighbours are of the same device, as callers have made sure.
  reachable(move->pieces.front().far, stream.device, "a piece of a move");
  const bool casts = move->from != moves::Element::bytes;
  std::uint64_t* counts = nullptr;
  if (move->tells()) counts = reachable(move->counts, stream.device, "the count of a move");
  cudaError_t status = cudaSuccess;
  if (sums) {
    status = cuda::launch_checksum(*move, counts, native(stream));
  } else if (move->layout) {
    status = cuda::launch_strided(*move, base, counts, native(stream));
  } else if (casts) {
    status = cuda::launch_cast(*move, base, counts, native(stream));
  } else if (move->way == moves::Way::gather) {
    status = cuda::launch_gather(*move, base, native(stream));
  } else {
    status = cuda::launch_scatter(*move, base, native(stream));
  }
  check(status, "launching a move",
        [&] { return std::to_string(move->pieces.size()) + " pieces, " + where(stream); });
}

void CudaRuntime::launch(std::function<void()> task, StreamRef stream) {
  if (stream.kind != StreamKind::host) {
    throw Error(ErrorKind::invalid_argument, "a callable runs on a host stream, not a CUDA stream");
  }
  worker(stream).task(std::move(task));
}

std::unique_ptr<Gate> CudaRuntime::gate(StreamRef stream) {
  if (stream.kind == StreamKind::host) return std::make_unique<HostGate>(worker(stream));
  return std::make_unique<CudaGate>(stream);
}

std::vector<EventPtr> CudaRuntime::mark_workers(int device) {
  std::vector<EventPtr> events;
  for (CompletionPtr& completion : workers_.mark(device)) {
    auto event = std::make_shared<CudaEvent>(events_, device, false);
    event->set(std::make_shared<Recording>(std::move(completion)));
    events.push_back(std::move(event));
  }
  return events;
}

void CudaRuntime::device_sync(int device) {
  DeviceGuard guard(device);
  // The workers first: they may have CUDA work yet to issue. Twice: what one of them issues may be
  // another's work.
  for (int round = 0; round < 2; ++round) {
    for (const CompletionPtr& completion : workers_.mark(device)) {
      if (!dropped(site_device_workers)) completion->wait();
    }
  }
  if (dropped(site_device)) return;
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize",
        [&] { return "device " + std::to_string(device); });
}

bool CudaRuntime::idle() {
  if (!dropped(site_idle_workers) && !workers_.idle()) return false;
  std::lock_guard lock(mutex_);
  for (StreamRef stream : streams_) {
    if (!dropped(site_idle_streams) && !stream_idle(stream)) return false;
  }
  return true;
}

}  // namespace streamlap
