#include "cuda/cuda_event.h"

#include "base/process.h"
#include "cuda/context.h"

namespace streamlap::cuda {
namespace {

constexpr Site site_ask_host{"cuda.ask_host_work"};
constexpr Site site_ask{"cuda.ask_event"};

}  // namespace

cudaEvent_t EventCache::take(int device, bool timed) {
  {
    std::lock_guard lock(mutex_);
    auto& list = free_[{device, timed}];
    if (!list.empty()) {
      cudaEvent_t event = list.back();
      list.pop_back();
      return event;
    }
  }
  DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  // Not cudaEventBlockingSync: it interrupts the host at every record, and nobody blocks on one.
  check(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
        "cudaEventCreateWithFlags");
  return event;
}

void EventCache::give(int device, bool timed, cudaEvent_t event) noexcept {
  if (process::leaking()) return;
  try {
    std::lock_guard lock(mutex_);
    free_[{device, timed}].push_back(event);
  } catch (...) {
    // No memory to remember it by: one event is lost.
  }
}

Recording::Recording(std::shared_ptr<EventCache> cache, int device, bool timed)
    : cache_(std::move(cache)),
      device_(device),
      timed_(timed),
      event_(cache_->take(device, timed)) {}

Recording::Recording(CompletionPtr completion) : completion_(std::move(completion)) {}

Recording::~Recording() {
  if (event_ != nullptr) cache_->give(device_, timed_, event_);
}

bool Recording::done() const {
  if (completion_) {
    if (!dropped(site_ask_host) && !completion_->done()) return false;
    completion_->rethrow_if_failed();
    return true;
  }
  if (dropped(site_ask)) return true;
  DeviceGuard guard(device_);
  cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

}  // namespace streamlap::cuda
