// The worker threads of a runtime, made as streams are asked for.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "runtime/runtime.h"
#include "runtime/worker.h"

namespace streamlap {

class WorkerList {
 public:
  StreamRef add(int device, StreamKind kind) {
    std::lock_guard lock(mutex_);
    entries_.push_back({device, kind, std::make_unique<Worker>()});
    return {reinterpret_cast<std::uintptr_t>(entries_.back().worker.get()), device, kind};
  }

  // What Runtime::mark_workers says.
  std::vector<CompletionPtr> mark(int device) {
    std::lock_guard lock(mutex_);
    std::vector<CompletionPtr> marks;
    for (Entry& entry : entries_) {
      if (entry.device != device || entry.worker->idle()) continue;
      if (Worker::inside() && entry.kind == StreamKind::compute) continue;
      marks.push_back(entry.worker->record());
    }
    return marks;
  }

  bool idle() {
    std::lock_guard lock(mutex_);
    for (Entry& entry : entries_) {
      if (!entry.worker->idle()) return false;
    }
    return true;
  }

 private:
  struct Entry {
    int device;
    StreamKind kind;
    std::unique_ptr<Worker> worker;
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace streamlap
