// A runtime on which one call fails as planned; otherwise it is the one that it wraps.
#pragma once

#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check/fault_plan.h"
#include "runtime/proxy_runtime.h"

namespace streamlap::fault {

// Events and streams are those of the wrapped runtime, so both may be used side by side: what is
// called on the wrapped one is not counted and does not fail.
class FaultyRuntime final : public ProxyRuntime {
 public:
  explicit FaultyRuntime(std::shared_ptr<Runtime> inner) : ProxyRuntime(std::move(inner)) {}

  // Counts from one again, and fails as planned. Call it while nothing runs.
  void arm(std::vector<Plan> plans);
  // Nothing fails any more, not even after `sticky`; errors on their way stay.
  void disarm() noexcept { armed_ = false; }
  // Since it was made or armed.
  std::size_t count(Call call) const noexcept { return counts_[static_cast<std::size_t>(call)]; }
  std::size_t fired() const noexcept { return fired_; }
  // The sites of the calls that failed, as far as they have one.
  std::vector<std::string> sites() const;

  void* alloc_pinned(std::size_t bytes) override;
  void* alloc_device(int device, std::size_t bytes) override;
  StreamRef stream_create(int device, StreamKind kind, bool high_priority) override;
  bool stream_capturing(StreamRef stream) override;
  bool stream_idle(StreamRef stream) override;
  void stream_sync(StreamRef stream, Site site) override;
  void stream_wait(StreamRef stream, const Event& event, Site site) override;
  void stream_reset_error(StreamRef stream) override;
  EventPtr event_create(int device, bool timed) override;
  void event_record(Event& event, StreamRef stream, Site site) override;
  bool event_query(const Event& event, Site site) override;
  EventState event_state(const Event& event, Site site) noexcept override;
  bool event_sync_for(const Event& event, std::chrono::nanoseconds timeout, Site site) override;
  double event_elapsed(const Event& begin, const Event& end) override;
  double event_time(const Event& event) override;
  void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) override;
  void move(moves::MovePtr move, StreamRef stream) override;
  void launch(std::function<void()> task, StreamRef stream) override;
  std::vector<EventPtr> mark_workers(int device) override;
  void device_sync(int device) override;
  bool idle() override;

 private:
  // Counts the call and throws if it is to fail; if it is to fail later, the error is returned.
  std::exception_ptr meet(Call call, Site site = Site(""));
  [[noreturn]] void fail(const Plan& plan);                         // mutex_ held
  void enqueue(Call call, StreamRef stream, Site site = Site(""));  // may poison the stream
  bool poisoned(StreamRef stream) const;
  void poison(StreamRef stream, std::exception_ptr error);
  std::exception_ptr carried(const Event& event) const;
  void forget(const EventPtr& event);

  std::array<std::atomic<std::size_t>, calls> counts_{};
  std::atomic<std::size_t> fired_{0};
  std::atomic<bool> armed_{false};
  std::atomic<bool> lost_{false};  // a sticky error was thrown
  mutable std::mutex mutex_;       // guards the rest
  struct Armed {
    Plan plan;
    bool fired = false;
  };
  std::vector<Armed> plans_;
  std::vector<std::string> sites_;
  // The errors that came later. The wrapped runtime knows nothing of them: work that was enqueued
  // behind one is left out here.
  std::map<std::uintptr_t, std::exception_ptr> streams_;  // by handle
  std::map<const Event*, std::exception_ptr> events_;
};

}  // namespace streamlap::fault
