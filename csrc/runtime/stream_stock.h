// Streams of a runtime that lives to the end, for users that come and go: a stream is never
// destroyed, so what one user gives back serves the next.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/runtime.h"

namespace streamlap {

class StreamStock {
 public:
  explicit StreamStock(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  // One that nobody uses and that has nothing left to do; a new one where there is none.
  StreamRef take(int device, StreamKind kind, bool high_priority) {
    std::lock_guard lock(mutex_);
    std::vector<StreamRef>& free = free_[{device, kind, high_priority}];
    for (auto stream = free.begin(); stream != free.end(); ++stream) {
      if (!runtime_->stream_idle(*stream)) continue;
      const StreamRef taken = *stream;
      free.erase(stream);
      runtime_->stream_reset_error(taken);
      return taken;
    }
    return runtime_->stream_create(device, kind, high_priority);
  }

  void give_back(StreamRef stream, bool high_priority) {
    std::lock_guard lock(mutex_);
    free_[{stream.device, stream.kind, high_priority}].push_back(stream);
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::mutex mutex_;
  std::map<std::tuple<int, StreamKind, bool>, std::vector<StreamRef>> free_;
};

}  // namespace streamlap
