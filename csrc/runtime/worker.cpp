#include "runtime/worker.h"

#include <cxxabi.h>

#include <algorithm>

#include "base/errors.h"
#include "base/process.h"
#include "base/site.h"

namespace streamlap {

namespace {

constexpr Site site_publish{"worker.publish_done"};
constexpr Site site_tell_done{"worker.tell_done"};
constexpr Site site_ask{"worker.ask_done"};
constexpr Site site_wait_for{"worker.timed_wait"};
constexpr Site site_wait{"worker.wait"};
constexpr Site site_tell_work{"worker.tell_work"};
constexpr Site site_join{"worker.join"};
constexpr Site site_tell_stop{"worker.tell_stop"};
constexpr Site site_sync{"worker.sync"};
constexpr Site site_own_sync{"worker.refuse_own_sync"};
constexpr Site site_queued{"worker.idle_without_queue"};
constexpr Site site_busy{"worker.busy"};
constexpr Site site_in_order{"worker.first_in_first_out"};
constexpr Site site_wait_poisoned{"worker.wait_though_poisoned"};
constexpr Site site_drop{"worker.drop_callable_first"};

thread_local const void* t_running = nullptr;  // the state of the worker this thread is

}  // namespace

bool Worker::inside() noexcept { return t_running != nullptr; }

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Completion::finish(std::exception_ptr error, double time) {
  {
    std::lock_guard lock(mutex_);
    done_ = !dropped(site_publish);
    error_ = std::move(error);
    time_ = time;
  }
  if (!dropped(site_tell_done)) changed_.notify_all();
}

bool Completion::done() const {
  std::lock_guard lock(mutex_);
  return done_ || dropped(site_ask);
}

bool Completion::wait_for(std::chrono::nanoseconds timeout) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return done_ || dropped(site_wait_for); });
}

void Completion::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_ || dropped(site_wait); });
}

std::exception_ptr Completion::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

double Completion::time() const {
  std::lock_guard lock(mutex_);
  return time_;
}

void Completion::rethrow_if_failed() const {
  if (std::exception_ptr failed = error()) std::rethrow_exception(failed);
}

Worker::~Worker() {
  if (!thread_.joinable()) return;
  if (process::leaking()) {
    thread_.detach();
    return;
  }
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  if (!dropped(site_tell_stop)) state_->changed.notify_all();
  if (thread_.get_id() == std::this_thread::get_id() || dropped(site_join)) {
    thread_.detach();  // the last owner died inside a task of this very worker
  } else {
    thread_.join();
  }
}

void Worker::push(Item item) {
  process::require_usable();
  {
    std::lock_guard lock(state_->mutex);
    if (!thread_.joinable()) {
      process::mark_started();
      thread_ = std::thread([state = state_] { run(state); });
    }
    state_->queue.push_back(std::move(item));
  }
  if (!dropped(site_tell_work)) state_->changed.notify_all();
}

void Worker::task(std::function<void()> body) { push({Kind::task, std::move(body), nullptr}); }

void Worker::wait(std::function<void()> body) { push({Kind::wait, std::move(body), nullptr}); }

CompletionPtr Worker::record() {
  auto completion = std::make_shared<Completion>();
  push({Kind::record, nullptr, completion});
  return completion;
}

void Worker::reset_error() { push({Kind::reset, nullptr, nullptr}); }

void Worker::sync() {
  if (t_running == state_.get() && !dropped(site_own_sync)) {
    throw Error(ErrorKind::invalid_argument, "a stream's own work cannot wait for the stream");
  }
  CompletionPtr completion = record();
  if (!dropped(site_sync)) completion->wait();
  if (std::exception_ptr failed = completion->error()) {
    {
      std::lock_guard lock(state_->mutex);
      if (state_->error == failed) state_->error = nullptr;
    }
    std::rethrow_exception(failed);
  }
}

bool Worker::idle() const {
  std::lock_guard lock(state_->mutex);
  return (state_->queue.empty() || dropped(site_queued)) && !state_->busy;
}

void Worker::run(const std::shared_ptr<State>& state) {
  t_running = state.get();
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->busy = false;
    state->changed.wait(lock, [&] { return state->stopping || !state->queue.empty(); });
    if (state->queue.empty()) return;
    if (dropped(site_in_order)) std::reverse(state->queue.begin(), state->queue.end());
    Item item = std::move(state->queue.front());
    state->queue.pop_front();
    // Whoever sees a record done may ask whether the worker is idle, at once: a record is no work.
    state->busy = item.kind != Kind::record && !dropped(site_busy);
    std::exception_ptr error = state->error;
    if (item.kind == Kind::reset) {
      state->error = nullptr;
      continue;
    }
    lock.unlock();
    std::exception_ptr thrown;
    if (item.kind == Kind::record) {
      item.completion->finish(error, steady_seconds());
    } else if ((item.kind == Kind::wait && !dropped(site_wait_poisoned)) || !error) {
      try {
        item.body();
      } catch (abi::__forced_unwind&) {
        throw;  // the interpreter ends this thread; swallowing it would abort the process
      } catch (...) {
        thrown = std::current_exception();
      }
    }
    // What the callable holds is let go without the lock, and before anything later is done.
    if (!dropped(site_drop)) item = {};
    lock.lock();
    if (thrown && !state->error) state->error = thrown;
  }
}

}  // namespace streamlap
