// The runtime of NVIDIA GPUs, on the static CUDA runtime alone.
//
// Late issue: a CUDA stream only ever waits for events that are already recorded. "CUDA work after
// host work" is kept by the worker that enqueues the CUDA work once its host work is done; asking a
// CUDA stream to wait for unfinished host work is refused.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/pinned_memory.h"
#include "runtime/runtime.h"
#include "runtime/worker.h"
#include "runtime/worker_list.h"

namespace streamlap {

namespace cuda {
class EventCache;
bool primary_active(int device) noexcept;
}  // namespace cuda

class CudaRuntime final : public Runtime {
 public:
  CudaRuntime(int device_count, PinnedWay way);
  ~CudaRuntime() override;

  const char* name() const noexcept override { return "cuda"; }
  int device_count() const override { return device_count_; }
  bool uses_device_memory() const noexcept override { return true; }
  bool device_active(int device) override { return cuda::primary_active(device); }
  std::shared_ptr<void> hold_device(int device) override;
  void* alloc_pinned(std::size_t bytes) override;
  void free_pinned(void* pointer, std::size_t bytes) noexcept override;
  std::string pinned_how() const override { return pinned_.how(); }
  void* alloc_device(int device, std::size_t bytes) override;
  void free_device(int device, void* pointer, std::size_t bytes) noexcept override;
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
  std::unique_ptr<Gate> gate(StreamRef stream) override;
  std::vector<EventPtr> mark_workers(int device) override;
  void device_sync(int device) override;
  double now() const override { return steady_seconds(); }
  bool idle() override;

 private:
  int device_count_;
  cuda::PinnedMemory pinned_;
  std::shared_ptr<cuda::EventCache> events_;
  std::mutex mutex_;
  std::vector<StreamRef> streams_;  // the CUDA streams this runtime created
  WorkerList workers_;              // streams of kind host
};

}  // namespace streamlap
