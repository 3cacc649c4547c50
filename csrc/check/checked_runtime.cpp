#include "check/checked_runtime.h"

#include <optional>

namespace streamlap::order {
namespace {

// What accesses memory orders nothing by itself.
constexpr Site no_site{""};

constexpr Site rule_idle{"check.idle_stream_teaches"};
constexpr Site rule_sync{"check.sync_teaches"};
constexpr Site rule_failed_sync{"check.failed_sync_teaches"};
constexpr Site rule_wait{"check.wait_teaches"};
constexpr Site rule_record{"check.record_notes"};
constexpr Site rule_snapshot{"check.record_is_of_its_moment"};
constexpr Site rule_query{"check.query_teaches"};
constexpr Site rule_event_sync{"check.event_sync_teaches"};
constexpr Site rule_late_query{"check.query_of_what_is_not_done_teaches_nothing"};
constexpr Site rule_failed_query{"check.failed_query_teaches"};
constexpr Site rule_failed_event_sync{"check.failed_event_sync_teaches"};
constexpr Site rule_state{"check.state_teaches"};
constexpr Site rule_late_state{"check.state_of_what_is_not_done_teaches_nothing"};
constexpr Site rule_copy_reads{"check.copy_reads"};
constexpr Site rule_copy_writes{"check.copy_writes"};
constexpr Site rule_move_reads{"check.move_reads"};
constexpr Site rule_move_writes{"check.move_writes"};
constexpr Site rule_launch{"check.task_knows_its_launcher"};
constexpr Site rule_marks{"check.marks_of_workers_teach"};
constexpr Site rule_device_sync{"check.device_sync_teaches"};
constexpr Site rule_taken{"check.taken_is_a_write"};
constexpr Site rule_host_reads{"check.host_reads"};
constexpr Site rule_declared_read{"check.declared_read"};
constexpr Site rule_declared_write{"check.declared_write"};

}  // namespace

// An event of the inner runtime, and what its stream knew when it was recorded.
class CheckedRuntime::CheckedEvent final : public Event {
 public:
  explicit CheckedEvent(EventPtr event) : inner(std::move(event)) {}

  Clock clock(OrderChecker& checker) const {
    std::lock_guard lock(mutex_);
    if (dropped(rule_snapshot) && recorded_on_) return checker.stream_knows(*recorded_on_);
    return clock_;
  }
  void set(Clock clock, std::optional<StreamRef> recorded_on) {
    std::lock_guard lock(mutex_);
    clock_ = std::move(clock);
    recorded_on_ = recorded_on;
  }
  const EventPtr inner;

 private:
  mutable std::mutex mutex_;
  Clock clock_;  // empty: never recorded
  std::optional<StreamRef> recorded_on_;
};

CheckedRuntime::~CheckedRuntime() {
  for (auto [stream, high_priority] : taken_) stock_->give_back(stream, high_priority);
}

StreamRef CheckedRuntime::stream_create(int device, StreamKind kind, bool high_priority) {
  if (!stock_) return inner()->stream_create(device, kind, high_priority);
  const StreamRef stream = stock_->take(device, kind, high_priority);
  std::lock_guard lock(mutex_);
  taken_.emplace_back(stream, high_priority);
  return stream;
}

void* CheckedRuntime::alloc_pinned(std::size_t bytes) {
  void* pointer = inner()->alloc_pinned(bytes);
  checker_->fresh(pointer, bytes);
  return pointer;
}

void CheckedRuntime::free_pinned(void* pointer, std::size_t bytes) noexcept {
  checker_->fresh(pointer, bytes);
  inner()->free_pinned(pointer, bytes);
}

void* CheckedRuntime::alloc_device(int device, std::size_t bytes) {
  void* pointer = inner()->alloc_device(device, bytes);
  checker_->fresh(pointer, bytes);
  return pointer;
}

void CheckedRuntime::free_device(int device, void* pointer, std::size_t bytes) noexcept {
  checker_->fresh(pointer, bytes);
  inner()->free_device(device, pointer, bytes);
}

bool CheckedRuntime::stream_idle(StreamRef stream) {
  const Clock clock = checker_->stream_knows(stream);
  if (!inner()->stream_idle(stream)) return false;
  if (!dropped(rule_idle)) checker_->learn(clock);
  return true;
}

void CheckedRuntime::stream_sync(StreamRef stream, Site site) {
  const Clock clock = checker_->issue(stream, site);
  try {
    inner()->stream_sync(stream, site);
  } catch (...) {
    // It threw the stream's error, and so has waited.
    if (!dropped(rule_failed_sync)) checker_->learn(clock);
    throw;
  }
  if (!dropped(rule_sync)) checker_->learn(clock);
}

void CheckedRuntime::stream_wait(StreamRef stream, const Event& event, Site site) {
  const auto& checked = static_cast<const CheckedEvent&>(event);
  const Clock clock = checked.clock(*checker_);
  inner()->stream_wait(stream, *checked.inner, site);
  checker_->issue(stream, site);
  if (!dropped(rule_wait)) checker_->stream_learns(stream, clock);
}

EventPtr CheckedRuntime::event_create(int device, bool timed) {
  return std::make_shared<CheckedEvent>(inner()->event_create(device, timed));
}

void CheckedRuntime::event_record(Event& event, StreamRef stream, Site site) {
  auto& checked = static_cast<CheckedEvent&>(event);
  // Before it can be seen to be done.
  Clock clock = checker_->issue(stream, site);
  if (!dropped(rule_record)) checked.set(std::move(clock), stream);
  inner()->event_record(*checked.inner, stream, site);
}

bool CheckedRuntime::event_query(const Event& event, Site site) {
  const auto& checked = static_cast<const CheckedEvent&>(event);
  const Clock clock = checked.clock(*checker_);
  bool done = false;
  try {
    done = inner()->event_query(*checked.inner, site);
  } catch (...) {
    if (!dropped(rule_failed_query)) checker_->learn(clock);  // it threw the event's error: done
    throw;
  }
  if (dropped(done ? rule_query : rule_late_query) == !done) checker_->learn(clock);
  return done;
}

EventState CheckedRuntime::event_state(const Event& event, Site site) noexcept {
  const auto& checked = static_cast<const CheckedEvent&>(event);
  try {
    const Clock clock = checked.clock(*checker_);
    const EventState state = inner()->event_state(*checked.inner, site);
    const bool passed = state == EventState::passed;
    if (dropped(passed ? rule_state : rule_late_state) == !passed) checker_->learn(clock);
    return state;
  } catch (...) {
    return EventState::pending;  // no memory to learn with
  }
}

bool CheckedRuntime::event_sync_for(const Event& event, std::chrono::nanoseconds timeout,
                                    Site site) {
  const auto& checked = static_cast<const CheckedEvent&>(event);
  const Clock clock = checked.clock(*checker_);
  try {
    if (!inner()->event_sync_for(*checked.inner, timeout, site)) return false;
  } catch (...) {
    if (!dropped(rule_failed_event_sync)) checker_->learn(clock);
    throw;
  }
  if (!dropped(rule_event_sync)) checker_->learn(clock);
  return true;
}

double CheckedRuntime::event_elapsed(const Event& begin, const Event& end) {
  return inner()->event_elapsed(*static_cast<const CheckedEvent&>(begin).inner,
                                *static_cast<const CheckedEvent&>(end).inner);
}

double CheckedRuntime::event_time(const Event& event) {
  return inner()->event_time(*static_cast<const CheckedEvent&>(event).inner);
}

void CheckedRuntime::copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) {
  checker_->issue(stream, no_site);
  if (!dropped(rule_copy_reads)) {
    checker_->stream_access(stream, "a copy's read", src, bytes, Mode::read);
  }
  if (!dropped(rule_copy_writes)) {
    checker_->stream_access(stream, "a copy's write", dst, bytes, Mode::write);
  }
  inner()->copy_async(dst, src, bytes, stream);
}

void CheckedRuntime::move(moves::MovePtr move, StreamRef stream) {
  checker_->issue(stream, no_site);
  for (const moves::Access& access : moves::accesses_of(*move)) {
    if (dropped(access.writes ? rule_move_writes : rule_move_reads)) continue;
    checker_->stream_access(stream, access.writes ? "a move's write" : "a move's read", access.data,
                            access.bytes, access.writes ? Mode::write : Mode::read);
  }
  inner()->move(std::move(move), stream);
}

void CheckedRuntime::launch(std::function<void()> task, StreamRef stream) {
  Clock clock = checker_->issue(stream, no_site);
  if (dropped(rule_launch)) clock.clear();
  inner()->launch(
      [checker = checker_, stream, clock = std::move(clock), task = std::move(task)]() mutable {
        OrderChecker::Task scope(*checker, stream, std::move(clock));
        const std::function<void()> body = std::move(task);  // what it holds dies as the callable
        body();
      },
      stream);
}

std::vector<EventPtr> CheckedRuntime::mark_workers(int device) {
  std::vector<EventPtr> events;
  const Clock clock = checker_->device_knows(device);
  for (EventPtr& inner : inner()->mark_workers(device)) {
    auto event = std::make_shared<CheckedEvent>(std::move(inner));
    if (!dropped(rule_marks)) event->set(clock, std::nullopt);
    events.push_back(std::move(event));
  }
  return events;
}

void CheckedRuntime::device_sync(int device) {
  const Clock clock = checker_->device_knows(device);
  inner()->device_sync(device);
  if (!dropped(rule_device_sync)) checker_->learn(clock);
}

void CheckedRuntime::taken(void* pointer, std::size_t bytes) {
  if (dropped(rule_taken)) return;
  checker_->host_access("handing out", pointer, bytes, Mode::write);
}

void CheckedRuntime::host_reads(const void* pointer, std::size_t bytes) {
  if (dropped(rule_host_reads)) return;
  checker_->host_access("a read of a result", pointer, bytes, Mode::read);
}

void CheckedRuntime::declare(StreamRef stream, const void* pointer, std::size_t bytes,
                             bool writes) {
  checker_->issue(stream, no_site);
  if (dropped(writes ? rule_declared_write : rule_declared_read)) return;
  checker_->stream_access(stream, writes ? "a declared write" : "a declared read", pointer, bytes,
                          writes ? Mode::write : Mode::read);
}

void CheckedRuntime::lock_acquired(const void* lock, Site) noexcept { checker_->acquired(lock); }

void CheckedRuntime::lock_released(const void* lock, Site) noexcept { checker_->released(lock); }

void CheckedRuntime::guarded(const void* lock, Site site) noexcept {
  checker_->guarded(lock, site);
}

}  // namespace streamlap::order
