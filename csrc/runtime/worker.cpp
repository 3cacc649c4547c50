#include "runtime/worker.h"

#include <cxxabi.h>

#include "base/errors.h"
#include "base/process.h"

namespace streamlap {

namespace {

thread_local const void* t_running = nullptr;  // the state of the worker this thread is

}  // namespace

bool Worker::inside() noexcept { return t_running != nullptr; }

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Completion::finish(std::exception_ptr error, double time) {
  {
    std::lock_guard lock(mutex_);
    done_ = true;
    error_ = std::move(error);
    time_ = time;
  }
  changed_.notify_all();
}

bool Completion::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

bool Completion::wait_for(std::chrono::nanoseconds timeout) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return done_; });
}

void Completion::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
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
  state_->changed.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) {
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
  state_->changed.notify_all();
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
  if (t_running == state_.get()) {
    throw Error(ErrorKind::invalid_argument, "a stream's own work cannot wait for the stream");
  }
  CompletionPtr completion = record();
  completion->wait();
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
  return state_->queue.empty() && !state_->busy;
}

void Worker::run(const std::shared_ptr<State>& state) {
  t_running = state.get();
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->busy = false;
    state->changed.wait(lock, [&] { return state->stopping || !state->queue.empty(); });
    if (state->queue.empty()) return;
    Item item = std::move(state->queue.front());
    state->queue.pop_front();
    // Whoever sees a record done may ask whether the worker is idle, at once: a record is no work.
    state->busy = item.kind != Kind::record;
    std::exception_ptr error = state->error;
    if (item.kind == Kind::reset) {
      state->error = nullptr;
      continue;
    }
    lock.unlock();
    std::exception_ptr thrown;
    if (item.kind == Kind::record) {
      item.completion->finish(error, steady_seconds());
    } else if (item.kind == Kind::wait || !error) {
      try {
        item.body();
      } catch (abi::__forced_unwind&) {
        throw;  // the interpreter ends this thread; swallowing it would abort the process
      } catch (...) {
        thrown = std::current_exception();
      }
    }
    item = {};  // what the callable holds is let go before anything later is reported done
    lock.lock();
    if (thrown && !state->error) state->error = thrown;
  }
}

}  // namespace streamlap
