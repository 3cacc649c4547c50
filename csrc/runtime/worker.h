// A thread with a FIFO of work: what a stream of kind host is everywhere, and any stream without a
// GPU.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace streamlap {

// One recording of a host-side event: done once, perhaps with an error.
class Completion {
 public:
  void finish(std::exception_ptr error, double time);
  bool done() const;
  // Waits; true when done. Does not throw the error.
  bool wait_for(std::chrono::nanoseconds timeout) const;
  void wait() const;
  std::exception_ptr error() const;
  double time() const;
  void rethrow_if_failed() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
  double time_ = 0;
};
using CompletionPtr = std::shared_ptr<Completion>;

double steady_seconds();

// In order: tasks, waits, records. The first exception poisons the worker: later tasks are skipped
// (their callables are still destroyed in turn), waits still wait, records carry the error.
class Worker {
 public:
  Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  // Finishes what is queued, then joins. Leaks the thread at process exit and in a forked child.
  ~Worker();

  void task(std::function<void()> body);
  // `body` blocks until something is done; what it throws poisons this worker.
  void wait(std::function<void()> body);
  CompletionPtr record();
  void reset_error();
  // Blocks until all issued so far is done; throws the error and takes it off. Refused in a task of
  // this worker, which would wait for itself.
  void sync();
  bool idle() const;
  // True in a thread that is running some worker's task.
  static bool inside() noexcept;

 private:
  enum class Kind { task, wait, record, reset };
  struct Item {
    Kind kind;
    std::function<void()> body;
    CompletionPtr completion;
  };
  // What the thread needs; it outlives a Worker that had to be leaked.
  struct State {
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::deque<Item> queue;
    bool busy = false;
    bool stopping = false;
    std::exception_ptr error;  // guarded by mutex
  };

  void push(Item item);
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace streamlap
