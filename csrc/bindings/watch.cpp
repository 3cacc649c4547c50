#include "bindings/watch.h"

#include <algorithm>

#include "base/process.h"
#include "check/order_checker.h"
#include "sim/runtime_sim.h"

namespace streamlap::bindings {

Watch& Watch::instance() {
  static Watch* watch = new Watch();
  return *watch;
}

void Watch::add(std::shared_ptr<Transfer> transfer, SharedObject token) {
  {
    std::lock_guard lock(mutex_);
    watched_.push_back({std::move(transfer), std::move(token)});
  }
  changed_.notify_one();
}

void Watch::post(SharedObject token) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back(std::move(token));
  }
  changed_.notify_one();
}

bool Watch::holding() {
  std::vector<Kept> engines;
  {
    std::lock_guard lock(mutex_);
    engines = engines_;
  }
  for (const Kept& kept : engines) {
    if (kept.engine->expects()) return true;
  }
  std::lock_guard lock(mutex_);
  return dropping_ || !dropped_.empty();
}

void Watch::abandon(const std::shared_ptr<CopyEngine>& engine, std::shared_ptr<Transfer> transfer) {
  engine->abandon(std::move(transfer));
  look_after(engine);
}

void Watch::look_after(const std::shared_ptr<CopyEngine>& engine) {
  {
    std::lock_guard lock(mutex_);
    auto known = std::find_if(engines_.begin(), engines_.end(),
                              [&](const Kept& kept) { return kept.engine == engine; });
    if (known == engines_.end()) {
      engines_.push_back({engine});
    } else {
      known->fresh = true;
    }
    abandoned_ = true;
  }
  changed_.notify_one();
}

void Watch::drop_later(PyObject* object) noexcept {
  try {
    std::lock_guard lock(mutex_);
    dropped_.push_back(object);
    order::released_by_all(this);  // what it dies of is known to this thread alone
  } catch (...) {
    return;  // no memory to remember it by: one reference is lost
  }
  changed_.notify_one();
}

void Watch::stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_one();
}

bool Watch::collect(std::vector<SharedObject>& tokens, std::vector<PyObject*>& dropped) {
  std::vector<Kept> engines;
  std::vector<Watched> watched;
  bool stop = false;
  {
    std::lock_guard lock(mutex_);
    for (Kept& kept : engines_) kept.fresh = false;
    engines = engines_;
    watched.swap(watched_);
    abandoned_ = false;
    stop = stopped_;
  }
  std::size_t in_flight = 0;
  std::vector<CopyEngine*> settled;
  for (const Kept& kept : engines) {
    const std::size_t left = kept.engine->reap();
    in_flight += left;
    if (left == 0) settled.push_back(kept.engine.get());
  }
  std::erase_if(watched, [&](Watched& item) {
    bool over = false;
    try {
      over = item.transfer->done();
    } catch (...) {
      // Its callback will ask, and be told the error; not before it is over.
      over = !item.transfer->pending();
    }
    if (over) tokens.push_back(std::move(item.token));
    return over;
  });
  std::lock_guard lock(mutex_);
  for (Watched& item : watched) watched_.push_back(std::move(item));
  in_flight_ = in_flight > 0;
  // `engines` lets go of them later, without the lock.
  std::erase_if(engines_, [&](const Kept& kept) {
    return !kept.fresh &&
           std::find(settled.begin(), settled.end(), kept.engine.get()) != settled.end();
  });
  dropped.swap(dropped_);
  dropping_ = !dropped.empty();
  for (SharedObject& token : posted_) tokens.push_back(std::move(token));
  posted_.clear();
  return stop || !tokens.empty() || !dropped.empty();
}

void Watch::wait(std::chrono::microseconds& nap) {
  std::unique_lock lock(mutex_);
  if (stopped_ || !dropped_.empty() || !posted_.empty()) return;
  if (watched_.empty() && !in_flight_) {
    nap = std::chrono::microseconds(100);
    changed_.wait(lock, [this] {
      return stopped_ || abandoned_ || !dropped_.empty() || !watched_.empty() || !posted_.empty();
    });
  } else {
    changed_.wait_for(lock, nap);
    nap = std::min(nap * 2, std::chrono::microseconds(1000));
  }
}

py::object Watch::next() {
  keep_thread_to_the_end();
  sim::SimRuntime::stand_by();
  std::vector<SharedObject> tokens;
  std::vector<PyObject*> dropped;
  bool stop = false;
  {
    GilRelease released;
    std::chrono::microseconds nap(100);
    while (!collect(tokens, dropped)) wait(nap);
    std::lock_guard lock(mutex_);
    stop = stopped_;
  }
  if (!dropped.empty()) order::acquired_by_all(this);
  for (PyObject* object : dropped) Py_DECREF(object);
  {
    std::lock_guard lock(mutex_);
    dropping_ = false;
  }
  if (stop && tokens.empty()) return py::none();
  py::list answer;
  for (const SharedObject& token : tokens) answer.append(py::handle(token.get()));
  return answer;
}

}  // namespace streamlap::bindings
