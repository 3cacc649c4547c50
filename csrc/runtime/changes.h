// A count that can be waited on: for loops that ask again whenever something may have changed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace streamlap {

// What changed is guarded elsewhere; this only wakes those who wait.
class Changes {
 public:
  // To be asked before looking, so that a change in between ends the wait at once.
  std::uint64_t seen() const noexcept { return count_.load(); }

  void note() noexcept {
    {
      std::lock_guard lock(mutex_);
      ++count_;
    }
    changed_.notify_all();
  }

  void wait(std::uint64_t seen, std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return count_ != seen; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::uint64_t> count_{0};
};

}  // namespace streamlap
