// CUDA events, recycled: creating one costs as much as recording it.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/runtime.h"
#include "runtime/worker.h"

namespace streamlap::cuda {

class EventCache : public std::enable_shared_from_this<EventCache> {
 public:
  cudaEvent_t take(int device, bool timed);
  void give(int device, bool timed, cudaEvent_t event) noexcept;

 private:
  std::mutex mutex_;
  std::map<std::pair<int, bool>, std::vector<cudaEvent_t>> free_;
};

// One recording: of a CUDA stream (event) or of a worker (completion).
class Recording {
 public:
  Recording(std::shared_ptr<EventCache> cache, int device, bool timed);
  explicit Recording(CompletionPtr completion);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  int device() const noexcept { return device_; }
  cudaEvent_t event() const noexcept { return event_; }
  const CompletionPtr& completion() const noexcept { return completion_; }
  bool done() const;  // throws the error of a failed completion or of the device

 private:
  std::shared_ptr<EventCache> cache_;
  int device_ = 0;
  bool timed_ = false;
  cudaEvent_t event_ = nullptr;
  CompletionPtr completion_;
};
using RecordingPtr = std::shared_ptr<Recording>;

// Whoever waits takes the recording of that moment along; recording again makes a new one.
class CudaEvent final : public Event {
 public:
  CudaEvent(std::shared_ptr<EventCache> cache, int device, bool timed)
      : cache_(std::move(cache)), device_(device), timed_(timed) {}

  RecordingPtr last() const {
    std::lock_guard lock(mutex_);
    return last_;
  }
  void set(RecordingPtr recording) {
    std::lock_guard lock(mutex_);
    last_.swap(recording);
  }
  RecordingPtr fresh(int device) const {
    return std::make_shared<Recording>(cache_, device, timed_);
  }
  bool timed() const noexcept { return timed_; }

 private:
  std::shared_ptr<EventCache> cache_;
  int device_;
  bool timed_;
  mutable std::mutex mutex_;
  RecordingPtr last_;
};

}  // namespace streamlap::cuda
