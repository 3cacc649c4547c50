// The runtime on a virtual clock: no threads of its own, one step at a time, in an order that a
// strategy picks.
//
// Streams are queues. Each operation starts (a copy reads its source then, and poisons its
// destination) and ends (it writes). Nothing moves but inside a call: those that block move what
// they need, the others as far as the strategy lets the devices run beside the host. Callables run
// in the thread whose call moves their stream, in calls that block, in poll() and in help() only:
// whoever issues may hold locks that a callable needs.
//
// Time is worked out, not measured. An operation begins when its stream, its copy engine and what
// it waits for are ready, at the earliest when it was issued; the cost model says how long it
// takes. The host's clock moves when it waits, to the moment that it waited for.
//
// Several host threads may use it. The clock jumps to a time limit (of a wait, of a gate) only when
// all threads that have used it are blocked in it, or have done nothing with it for a while.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "runtime/runtime.h"
#include "sim/schedule.h"

namespace streamlap::sim {

// Seconds, and bytes a second. Zero bandwidth is none: the bytes cost nothing.
struct CostModel {
  double per_copy = 0;
  double to_host = 0;
  double to_device = 0;
  double on_device = 0;
  double memcpy = 0;  // between two places in host memory
  double task = 0;    // a callable, beside what it spends itself
};

struct SimOptions {
  int devices = 8;
  CostModel cost;
  // Streams behave as CUDA's: those of a device run no callables and refuse to wait for host work
  // that is not done. Otherwise as the host runtime's.
  bool device_rules = false;
};

class SimRuntime final : public Runtime {
 public:
  SimRuntime(SimOptions options, std::unique_ptr<Strategy> strategy);
  ~SimRuntime() override;

  // This thread only looks: nobody waits for what it may do.
  static void stand_by() noexcept;
  // From inside a callable: it takes so many seconds more.
  static void spend(double seconds);
  // The decisions so far; replay() takes them.
  Decisions decisions() const;
  // Moves one stream if any can; for a host that waits for something else. False: none can.
  bool help();
  // Ends the run: all that can move moves, in order of time, from now on whenever it is helped to.
  // What is decided from here on is no part of decisions().
  void finish();
  void poll() override;
  // A stream's name in reports, "2 (copy, device 0)".
  std::string stream_name(StreamRef stream) const;

  const char* name() const noexcept override { return "sim"; }
  int device_count() const override { return options_.devices; }
  bool uses_device_memory() const noexcept override { return options_.device_rules; }
  bool virtual_time() const noexcept override { return true; }
  bool device_active(int) override { return true; }

  void* alloc_pinned(std::size_t bytes) override;
  void free_pinned(void* pointer, std::size_t bytes) noexcept override;
  std::string pinned_how() const override { return "ordinary memory"; }
  void* alloc_device(int device, std::size_t bytes) override;
  void free_device(int device, void* pointer, std::size_t bytes) noexcept override;

  StreamRef stream_create(int device, StreamKind kind, bool high_priority) override;
  bool stream_capturing(StreamRef) override { return false; }
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
  std::unique_ptr<Gate> gate(StreamRef stream) override;
  std::vector<EventPtr> mark_workers(int device) override;
  void device_sync(int device) override;
  double now() const override;
  bool idle() override;

 private:
  struct Mark;
  struct GateState;
  struct Op;
  struct Stream;
  class SimEvent;
  class SimGate;
  struct Attendance;
  using MarkPtr = std::shared_ptr<Mark>;
  using Lock = std::unique_lock<std::mutex>;

  static MarkPtr mark_of(const Event& event);
  Stream& stream_of(StreamRef stream) const;
  void check_device(int device) const;
  void* map(std::size_t bytes);
  void issue(Lock& lock, Stream& stream, Op op);
  MarkPtr record(Lock& lock, Stream& stream);
  void run_beside_host(Lock& lock, bool callables);

  // What can move, not later than `until`; with or without those that have a callable next.
  std::vector<Choice> choices(double until, bool callables) const;
  bool step(Lock& lock, double until, bool callables = true);
  void advance(Lock& lock, Stream& stream);
  static void begin_bytes(Op& op);
  static void end_bytes(Op& op);
  void run_body(Lock& lock, Stream& stream, Op& op);
  double start_time(const Stream& stream, const Op& op) const;
  bool on_device(const std::byte* pointer) const;
  double cost(const Op& op) const;
  double* engine_of(const Op& op, const Stream& stream);

  // Until the mark is done (then true) or the clock has gone on by `timeout` (then false).
  bool block(Lock& lock, const MarkPtr& mark, std::chrono::nanoseconds timeout,
             const std::string& who);
  bool others_may_act() const;
  std::string deadlock_report(const std::string& who) const;

  const SimOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Strategy> strategy_;
  Decisions decisions_;
  bool finished_ = false;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::map<const std::byte*, std::size_t> device_memory_;
  std::map<std::pair<int, int>, double> engines_;  // when each copy engine is free
  double now_ = 0;
  int bodies_ = 0;  // callables that are running and not blocked in here themselves
  std::size_t polls_ = 0;
  std::multiset<double> deadlines_;  // of blocked waits
  std::shared_ptr<Attendance> attendance_;
};

}  // namespace streamlap::sim
