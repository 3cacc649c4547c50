// The runtime of a machine without a GPU: a stream is a worker thread, a copy is a memcpy, and
// everything is as asynchronous as on a device. Logical devices are made as they are asked for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/runtime.h"
#include "runtime/worker.h"
#include "runtime/worker_list.h"

namespace streamlap {

class HostRuntime final : public Runtime {
 public:
  HostRuntime() = default;

  const char* name() const noexcept override { return "host"; }
  int device_count() const override { return max_devices; }
  bool uses_device_memory() const noexcept override { return false; }
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
  double now() const override { return steady_seconds(); }
  bool idle() override;

 private:
  static constexpr int max_devices = 64;

  void check_device(int device) const;
  Worker& worker(StreamRef stream);

  WorkerList workers_;
};

}  // namespace streamlap
