#include "host/runtime_host.h"

#include <sys/mman.h>

#include <cstring>
#include <limits>

#include "base/process.h"
#include "base/stream_copy.h"
#include "runtime/host_gate.h"

namespace streamlap {
namespace {

constexpr Site site_sync{"host.stream_sync"};
constexpr Site site_wait{"host.stream_wait"};
constexpr Site site_record{"host.event_record"};
constexpr Site site_ask{"host.event_query"};
constexpr Site site_event_sync{"host.event_sync"};
constexpr Site site_device_sync{"host.device_sync"};

class HostEvent final : public Event {
 public:
  void set(CompletionPtr completion) {
    std::lock_guard lock(mutex_);
    last_.swap(completion);  // the old one dies in the caller, without the lock
  }
  CompletionPtr get() const {
    std::lock_guard lock(mutex_);
    return last_;
  }

 private:
  mutable std::mutex mutex_;
  CompletionPtr last_;  // null: never recorded
};

CompletionPtr completion_of(const Event& event) {
  return static_cast<const HostEvent&>(event).get();
}

void* map_pages(std::size_t bytes) {
  void* pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pointer == MAP_FAILED) {
    throw Error(ErrorKind::out_of_memory, "the system refused " + std::to_string(bytes) + " bytes");
  }
  return pointer;
}

}  // namespace

std::shared_ptr<Runtime> make_host_runtime() { return std::make_shared<HostRuntime>(); }

void HostRuntime::check_device(int device) const {
  if (device < 0 || device >= max_devices) {
    throw Error(ErrorKind::invalid_argument, "no logical CPU device " + std::to_string(device));
  }
}

Worker& HostRuntime::worker(StreamRef stream) { return *reinterpret_cast<Worker*>(stream.handle); }

void* HostRuntime::alloc_pinned(std::size_t bytes) { return map_pages(bytes); }

void HostRuntime::free_pinned(void* pointer, std::size_t bytes) noexcept { munmap(pointer, bytes); }

void* HostRuntime::alloc_device(int device, std::size_t bytes) {
  check_device(device);
  return map_pages(bytes);
}

void HostRuntime::free_device(int, void* pointer, std::size_t bytes) noexcept {
  munmap(pointer, bytes);
}

StreamRef HostRuntime::stream_create(int device, StreamKind kind, bool) {
  check_device(device);
  process::require_usable();
  return workers_.add(device, kind);
}

bool HostRuntime::stream_idle(StreamRef stream) { return worker(stream).idle(); }

void HostRuntime::stream_sync(StreamRef stream, Site) {
  if (!dropped(site_sync)) worker(stream).sync();
}

void HostRuntime::stream_wait(StreamRef stream, const Event& event, Site) {
  CompletionPtr completion = completion_of(event);
  if (!completion || dropped(site_wait)) return;
  worker(stream).wait([completion] {
    completion->wait();
    completion->rethrow_if_failed();
  });
}

void HostRuntime::stream_reset_error(StreamRef stream) { worker(stream).reset_error(); }

EventPtr HostRuntime::event_create(int, bool) { return std::make_shared<HostEvent>(); }

void HostRuntime::event_record(Event& event, StreamRef stream, Site) {
  if (!dropped(site_record)) static_cast<HostEvent&>(event).set(worker(stream).record());
}

bool HostRuntime::event_query(const Event& event, Site) {
  CompletionPtr completion = completion_of(event);
  if (!completion || dropped(site_ask)) return true;
  if (!completion->done()) return false;
  completion->rethrow_if_failed();
  return true;
}

EventState HostRuntime::event_state(const Event& event, Site) noexcept {
  CompletionPtr completion = completion_of(event);
  return !completion || completion->done() ? EventState::passed : EventState::pending;
}

bool HostRuntime::event_sync_for(const Event& event, std::chrono::nanoseconds timeout, Site) {
  CompletionPtr completion = completion_of(event);
  if (!completion || dropped(site_event_sync)) return true;
  if (!completion->wait_for(timeout)) return false;
  completion->rethrow_if_failed();
  return true;
}

double HostRuntime::event_elapsed(const Event& begin, const Event& end) {
  CompletionPtr first = completion_of(begin);
  CompletionPtr last = completion_of(end);
  if (!first || !last || !first->done() || !last->done()) {
    throw Error(ErrorKind::invalid_argument, "elapsed time of events that are not both done");
  }
  return last->time() - first->time();
}

double HostRuntime::event_time(const Event& event) {
  CompletionPtr completion = completion_of(event);
  return completion && completion->done() ? completion->time()
                                          : std::numeric_limits<double>::quiet_NaN();
}

void HostRuntime::copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) {
  if (stream.kind == StreamKind::host) {
    worker(stream).task([=] { stream_copy(dst, src, bytes); });
  } else {
    worker(stream).task([=] { std::memcpy(dst, src, bytes); });
  }
}

void HostRuntime::move(moves::MovePtr move, StreamRef stream) {
  worker(stream).task([move = std::move(move)] { moves::run(*move); });
}

void HostRuntime::launch(std::function<void()> task, StreamRef stream) {
  worker(stream).task(std::move(task));
}

std::unique_ptr<Gate> HostRuntime::gate(StreamRef stream) {
  return std::make_unique<HostGate>(worker(stream));
}

std::vector<EventPtr> HostRuntime::mark_workers(int device) {
  check_device(device);
  std::vector<EventPtr> events;
  for (CompletionPtr& completion : workers_.mark(device)) {
    auto event = std::make_shared<HostEvent>();
    event->set(std::move(completion));
    events.push_back(std::move(event));
  }
  return events;
}

void HostRuntime::device_sync(int device) {
  check_device(device);
  if (dropped(site_device_sync)) return;
  // Twice: what a worker issues in its last task may be another's work.
  for (int round = 0; round < 2; ++round) {
    for (const CompletionPtr& completion : workers_.mark(device)) completion->wait();
  }
}

bool HostRuntime::idle() { return workers_.idle(); }

}  // namespace streamlap
