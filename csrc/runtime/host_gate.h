// The gate of a worker thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "runtime/runtime.h"
#include "runtime/worker.h"

namespace streamlap {

class HostGate final : public Gate {
 public:
  // Queues the holding task on the worker.
  explicit HostGate(Worker& worker) {
    worker.task([state = state_] { hold(*state); });
  }
  ~HostGate() override { open(); }

  void open() noexcept override {
    {
      std::lock_guard lock(state_->mutex);
      state_->open = true;
    }
    state_->changed.notify_all();
  }

  bool timed_out() const noexcept override {
    std::lock_guard lock(state_->mutex);
    return state_->timed_out;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
    bool timed_out = false;
  };

  static void hold(State& state) {
    std::unique_lock lock(state.mutex);
    std::chrono::duration<double> limit(limit_seconds);
    if (!state.changed.wait_for(lock, limit, [&] { return state.open; })) {
      state.timed_out = true;
      throw Error(ErrorKind::runtime, "a gate was not opened within its limit");
    }
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace streamlap
