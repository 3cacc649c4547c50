#include "check/checked_runtime.h"

namespace streamlap::order {
namespace {

// What accesses memory orders nothing by itself.
constexpr Site no_site{""};

}  // namespace

// An event of the inner runtime, and what its stream knew when it was recorded.
class CheckedRuntime::CheckedEvent final : public Event {
 public:
  explicit CheckedEvent(EventPtr event) : inner(std::move(event)) {}

  Clock clock() const {
    std::lock_guard lock(mutex_);
    return clock_;
  }
  void set(Clock clock) {
    std::lock_guard lock(mutex_);
    clock_ = std::move(clock);
  }
  const EventPtr inner;

 private:
  mutable std::mutex mutex_;
  Clock clock_;  // empty: never recorded
};

void* CheckedRuntime::alloc_pinned(std::size_t bytes) {
  void* pointer = inner_->alloc_pinned(bytes);
  checker_->fresh(pointer, bytes);
  return pointer;
}

void CheckedRuntime::free_pinned(void* pointer, std::size_t bytes) noexcept {
  checker_->fresh(pointer, bytes);
  inner_->free_pinned(pointer, bytes);
}

void* CheckedRuntime::alloc_device(int device, std::size_t bytes) {
  void* pointer = inner_->alloc_device(device, bytes);
  checker_->fresh(pointer, bytes);
  return pointer;
}

void CheckedRuntime::free_device(int device, void* pointer, std::size_t bytes) noexcept {
  checker_->fresh(pointer, bytes);
  inner_->free_device(device, pointer, bytes);
}

bool CheckedRuntime::stream_idle(StreamRef stream) {
  const Clock clock = checker_->stream_knows(stream);
  if (!inner_->stream_idle(stream)) return false;
  checker_->learn(clock);
  return true;
}

void CheckedRuntime::stream_sync(StreamRef stream, Site site) {
  const Clock clock = checker_->issue(stream, site);
  try {
    inner_->stream_sync(stream, site);
  } catch (...) {
    checker_->learn(clock);  // it threw the stream's error, and so has waited
    throw;
  }
  checker_->learn(clock);
}

void CheckedRuntime::stream_wait(StreamRef stream, const Event& event, Site site) {
  const auto& checked = static_cast<const CheckedEvent&>(event);
  const Clock clock = checked.clock();
  inner_->stream_wait(stream, *checked.inner, site);
  checker_->issue(stream, site);
  checker_->stream_learns(stream, clock);
}

EventPtr CheckedRuntime::event_create(int device, bool timed) {
  return std::make_shared<CheckedEvent>(inner_->event_create(device, timed));
}

void CheckedRuntime::event_record(Event& event, StreamRef stream, Site site) {
  auto& checked = static_cast<CheckedEvent&>(event);
  // Before it can be seen to be done.
  checked.set(checker_->issue(stream, site));
  inner_->event_record(*checked.inner, stream, site);
}

bool CheckedRuntime::event_query(const Event& event) {
  const auto& checked = static_cast<const CheckedEvent&>(event);
  const Clock clock = checked.clock();
  try {
    if (!inner_->event_query(*checked.inner)) return false;
  } catch (...) {
    checker_->learn(clock);  // it threw the error of what is done
    throw;
  }
  checker_->learn(clock);
  return true;
}

bool CheckedRuntime::event_sync_for(const Event& event, std::chrono::nanoseconds timeout,
                                    Site site) {
  const auto& checked = static_cast<const CheckedEvent&>(event);
  const Clock clock = checked.clock();
  try {
    if (!inner_->event_sync_for(*checked.inner, timeout, site)) return false;
  } catch (...) {
    checker_->learn(clock);
    throw;
  }
  checker_->learn(clock);
  return true;
}

double CheckedRuntime::event_elapsed(const Event& begin, const Event& end) {
  return inner_->event_elapsed(*static_cast<const CheckedEvent&>(begin).inner,
                               *static_cast<const CheckedEvent&>(end).inner);
}

double CheckedRuntime::event_time(const Event& event) {
  return inner_->event_time(*static_cast<const CheckedEvent&>(event).inner);
}

void CheckedRuntime::copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) {
  checker_->issue(stream, no_site);
  checker_->stream_access(stream, "a copy's read", src, bytes, Mode::read);
  checker_->stream_access(stream, "a copy's write", dst, bytes, Mode::write);
  inner_->copy_async(dst, src, bytes, stream);
}

void CheckedRuntime::launch(std::function<void()> task, StreamRef stream) {
  Clock clock = checker_->issue(stream, no_site);
  inner_->launch(
      [checker = checker_, stream, clock = std::move(clock), task = std::move(task)]() mutable {
        OrderChecker::Task scope(*checker, stream, std::move(clock));
        task();
      },
      stream);
}

std::vector<EventPtr> CheckedRuntime::mark_workers(int device) {
  std::vector<EventPtr> events;
  const Clock clock = checker_->device_knows(device);
  for (EventPtr& inner : inner_->mark_workers(device)) {
    auto event = std::make_shared<CheckedEvent>(std::move(inner));
    event->set(clock);
    events.push_back(std::move(event));
  }
  return events;
}

void CheckedRuntime::device_sync(int device) {
  const Clock clock = checker_->device_knows(device);
  inner_->device_sync(device);
  checker_->learn(clock);
}

void CheckedRuntime::taken(void* pointer, std::size_t bytes) {
  checker_->host_access("handing out", pointer, bytes, Mode::write);
}

void CheckedRuntime::host_reads(const void* pointer, std::size_t bytes) {
  checker_->host_access("a read of a result", pointer, bytes, Mode::read);
}

void CheckedRuntime::declare(StreamRef stream, const void* pointer, std::size_t bytes,
                             bool writes) {
  checker_->issue(stream, no_site);
  checker_->stream_access(stream, writes ? "a declared write" : "a declared read", pointer, bytes,
                          writes ? Mode::write : Mode::read);
}

void CheckedRuntime::lock_acquired(const void* lock) noexcept { checker_->acquired(lock); }

void CheckedRuntime::lock_released(const void* lock) noexcept { checker_->released(lock); }

}  // namespace streamlap::order
