#include "check/faulty_runtime.h"

#include <new>

namespace streamlap::fault {
namespace {

thread_local int t_callables = 0;  // that this thread is in

struct InCallable {
  InCallable() { ++t_callables; }
  ~InCallable() { --t_callables; }
};

Injected error_of(const Plan& plan, ErrorKind kind) {
  return Injected(kind, "injected fault " + to_string(plan));
}

}  // namespace

void FaultyRuntime::arm(std::vector<Plan> plans) {
  std::lock_guard lock(mutex_);
  plans_.clear();
  for (const Plan& plan : plans) plans_.push_back({plan});
  sites_.clear();
  for (auto& count : counts_) count = 0;
  fired_ = 0;
  lost_ = false;
  armed_ = true;
}

std::vector<std::string> FaultyRuntime::sites() const {
  std::lock_guard lock(mutex_);
  return sites_;
}

std::exception_ptr FaultyRuntime::meet(Call call, Site site) {
  const std::size_t number = ++counts_[static_cast<std::size_t>(call)];
  if (!armed_) return nullptr;
  std::lock_guard lock(mutex_);
  for (Armed& armed : plans_) {
    const Plan& plan = armed.plan;
    if (plan.mode == Mode::sticky && armed.fired) throw error_of(plan, ErrorKind::sticky);
    if (call != plan.call || number < plan.at) continue;
    if (armed.fired && plan.mode != Mode::always) continue;
    if (plan.mode == Mode::interrupt && t_callables > 0) continue;
    armed.fired = true;
    ++fired_;
    if (*site.name != 0) sites_.push_back(site.name);
    if (plan.mode == Mode::later) {
      return std::make_exception_ptr(error_of(plan, ErrorKind::runtime));
    }
    fail(plan);
  }
  return nullptr;
}

void FaultyRuntime::fail(const Plan& plan) {
  switch (plan.mode) {
    case Mode::interrupt:
      throw Interrupt();
    case Mode::sticky:
      lost_ = true;
      throw error_of(plan, ErrorKind::sticky);
    case Mode::memory:
      if (plan.call != Call::alloc_pinned && plan.call != Call::alloc_device) {
        throw std::bad_alloc();
      }
      throw error_of(plan, ErrorKind::out_of_memory);
    default:
      throw error_of(plan, ErrorKind::runtime);
  }
}

// ---- errors that come later

void FaultyRuntime::enqueue(Call call, StreamRef stream, Site site) {
  if (std::exception_ptr error = meet(call, site)) poison(stream, std::move(error));
}

bool FaultyRuntime::poisoned(StreamRef stream) const {
  std::lock_guard lock(mutex_);
  return streams_.contains(stream.handle);
}

void FaultyRuntime::poison(StreamRef stream, std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  streams_.try_emplace(stream.handle, std::move(error));  // the first stays
}

std::exception_ptr FaultyRuntime::carried(const Event& event) const {
  std::lock_guard lock(mutex_);
  const auto found = events_.find(&event);
  return found == events_.end() ? nullptr : found->second;
}

// Another event may have died at this address.
void FaultyRuntime::forget(const EventPtr& event) {
  std::lock_guard lock(mutex_);
  events_.erase(event.get());
}

void FaultyRuntime::copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) {
  enqueue(Call::copy_async, stream);
  if (!poisoned(stream)) ProxyRuntime::copy_async(dst, src, bytes, stream);
}

void FaultyRuntime::move(moves::MovePtr move, StreamRef stream) {
  enqueue(Call::move, stream);
  if (!poisoned(stream)) ProxyRuntime::move(std::move(move), stream);
}

void FaultyRuntime::launch(std::function<void()> task, StreamRef stream) {
  enqueue(Call::launch, stream);
  // One that is skipped still dies in its turn.
  ProxyRuntime::launch(
      [task = std::move(task), skipped = poisoned(stream)] {
        InCallable inside;
        if (!skipped) task();
      },
      stream);
}

void FaultyRuntime::event_record(Event& event, StreamRef stream, Site site) {
  enqueue(Call::event_record, stream, site);
  ProxyRuntime::event_record(event, stream, site);
  std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream.handle);
  if (found == streams_.end()) {
    events_.erase(&event);
  } else {
    events_[&event] = found->second;
  }
}

void FaultyRuntime::stream_wait(StreamRef stream, const Event& event, Site site) {
  enqueue(Call::stream_wait, stream, site);
  ProxyRuntime::stream_wait(stream, event, site);
  if (std::exception_ptr error = carried(event)) poison(stream, std::move(error));
}

void FaultyRuntime::stream_reset_error(StreamRef stream) {
  meet(Call::stream_reset_error);
  ProxyRuntime::stream_reset_error(stream);
  std::lock_guard lock(mutex_);
  streams_.erase(stream.handle);
}

void FaultyRuntime::stream_sync(StreamRef stream, Site site) {
  meet(Call::stream_sync, site);
  ProxyRuntime::stream_sync(stream, site);
  std::exception_ptr error;
  {
    std::lock_guard lock(mutex_);
    if (auto found = streams_.extract(stream.handle)) error = std::move(found.mapped());
  }
  if (error) std::rethrow_exception(error);
}

bool FaultyRuntime::event_query(const Event& event, Site site) {
  meet(Call::event_query, site);
  if (!ProxyRuntime::event_query(event, site)) return false;
  if (std::exception_ptr error = carried(event)) std::rethrow_exception(error);
  return true;
}

EventState FaultyRuntime::event_state(const Event& event, Site site) noexcept {
  return armed_ && lost_ ? EventState::lost : ProxyRuntime::event_state(event, site);
}

bool FaultyRuntime::event_sync_for(const Event& event, std::chrono::nanoseconds timeout,
                                   Site site) {
  meet(Call::event_sync, site);
  if (!ProxyRuntime::event_sync_for(event, timeout, site)) return false;
  if (std::exception_ptr error = carried(event)) std::rethrow_exception(error);
  return true;
}

// ---- the others

void* FaultyRuntime::alloc_pinned(std::size_t bytes) {
  meet(Call::alloc_pinned);
  return ProxyRuntime::alloc_pinned(bytes);
}

void* FaultyRuntime::alloc_device(int device, std::size_t bytes) {
  meet(Call::alloc_device);
  return ProxyRuntime::alloc_device(device, bytes);
}

StreamRef FaultyRuntime::stream_create(int device, StreamKind kind, bool high_priority) {
  meet(Call::stream_create);
  return ProxyRuntime::stream_create(device, kind, high_priority);
}

bool FaultyRuntime::stream_capturing(StreamRef stream) {
  meet(Call::stream_capturing);
  return ProxyRuntime::stream_capturing(stream);
}

bool FaultyRuntime::stream_idle(StreamRef stream) {
  meet(Call::stream_idle);
  return ProxyRuntime::stream_idle(stream);
}

EventPtr FaultyRuntime::event_create(int device, bool timed) {
  meet(Call::event_create);
  EventPtr event = ProxyRuntime::event_create(device, timed);
  forget(event);
  return event;
}

double FaultyRuntime::event_elapsed(const Event& begin, const Event& end) {
  meet(Call::event_elapsed);
  return ProxyRuntime::event_elapsed(begin, end);
}

double FaultyRuntime::event_time(const Event& event) {
  meet(Call::event_time);
  return ProxyRuntime::event_time(event);
}

std::vector<EventPtr> FaultyRuntime::mark_workers(int device) {
  meet(Call::mark_workers);
  std::vector<EventPtr> events = ProxyRuntime::mark_workers(device);
  for (const EventPtr& event : events) forget(event);
  return events;
}

void FaultyRuntime::device_sync(int device) {
  meet(Call::device_sync);
  ProxyRuntime::device_sync(device);
}

bool FaultyRuntime::idle() {
  meet(Call::idle);
  return ProxyRuntime::idle();
}

}  // namespace streamlap::fault
