// A Runtime that forwards to another one: what those derive from that count, refuse or fail calls.
#pragma once

#include <memory>
#include <utility>

#include "runtime/runtime.h"

namespace streamlap {

class ProxyRuntime : public Runtime {
 public:
  explicit ProxyRuntime(std::shared_ptr<Runtime> inner) : inner_(std::move(inner)) {}

  const std::shared_ptr<Runtime>& inner() const noexcept { return inner_; }

  // Before every call that enqueues or allocates; throws in its place where a test wants that.
  virtual void before(const char* /*call*/) {}

  const char* name() const noexcept override { return inner_->name(); }
  int device_count() const override { return inner_->device_count(); }
  bool uses_device_memory() const noexcept override { return inner_->uses_device_memory(); }
  bool virtual_time() const noexcept override { return inner_->virtual_time(); }
  void poll() override { inner_->poll(); }
  bool device_active(int device) override { return inner_->device_active(device); }
  std::shared_ptr<void> hold_device(int device) override { return inner_->hold_device(device); }
  void* alloc_pinned(std::size_t bytes) override {
    before("alloc_pinned");
    return inner_->alloc_pinned(bytes);
  }
  void free_pinned(void* pointer, std::size_t bytes) noexcept override {
    inner_->free_pinned(pointer, bytes);
  }
  std::string pinned_how() const override { return inner_->pinned_how(); }
  void* alloc_device(int device, std::size_t bytes) override {
    return inner_->alloc_device(device, bytes);
  }
  void free_device(int device, void* pointer, std::size_t bytes) noexcept override {
    inner_->free_device(device, pointer, bytes);
  }
  StreamRef stream_create(int device, StreamKind kind, bool high_priority) override {
    before("stream_create");
    return inner_->stream_create(device, kind, high_priority);
  }
  bool stream_capturing(StreamRef stream) override { return inner_->stream_capturing(stream); }
  bool stream_idle(StreamRef stream) override { return inner_->stream_idle(stream); }
  void stream_sync(StreamRef stream, Site site) override { inner_->stream_sync(stream, site); }
  void stream_wait(StreamRef stream, const Event& event, Site site) override {
    before("stream_wait");
    inner_->stream_wait(stream, event, site);
  }
  void stream_reset_error(StreamRef stream) override { inner_->stream_reset_error(stream); }
  EventPtr event_create(int device, bool timed) override {
    before("event_create");
    return inner_->event_create(device, timed);
  }
  void event_record(Event& event, StreamRef stream, Site site) override {
    before("event_record");
    inner_->event_record(event, stream, site);
  }
  bool event_query(const Event& event, Site site) override {
    return inner_->event_query(event, site);
  }
  EventState event_state(const Event& event, Site site) noexcept override {
    return inner_->event_state(event, site);
  }
  bool event_sync_for(const Event& event, std::chrono::nanoseconds timeout, Site site) override {
    return inner_->event_sync_for(event, timeout, site);
  }
  double event_elapsed(const Event& begin, const Event& end) override {
    return inner_->event_elapsed(begin, end);
  }
  double event_time(const Event& event) override { return inner_->event_time(event); }
  void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
    before("copy_async");
    inner_->copy_async(dst, src, bytes, stream);
  }
  void move(moves::MovePtr move, StreamRef stream) override {
    before("move");
    inner_->move(std::move(move), stream);
  }
  void launch(std::function<void()> task, StreamRef stream) override {
    before("launch");
    inner_->launch(std::move(task), stream);
  }
  bool checked() const noexcept override { return inner_->checked(); }
  void taken(void* pointer, std::size_t bytes) override { inner_->taken(pointer, bytes); }
  void fresh(void* pointer, std::size_t bytes) override { inner_->fresh(pointer, bytes); }
  void host_reads(const void* pointer, std::size_t bytes) override {
    inner_->host_reads(pointer, bytes);
  }
  void declare(StreamRef stream, const void* pointer, std::size_t bytes, bool writes) override {
    inner_->declare(stream, pointer, bytes, writes);
  }
  void lock_acquired(const void* lock, Site site) noexcept override {
    inner_->lock_acquired(lock, site);
  }
  void lock_released(const void* lock, Site site) noexcept override {
    inner_->lock_released(lock, site);
  }
  void guarded(const void* lock, Site site) noexcept override { inner_->guarded(lock, site); }
  std::unique_ptr<Gate> gate(StreamRef stream) override { return inner_->gate(stream); }
  std::vector<EventPtr> mark_workers(int device) override { return inner_->mark_workers(device); }
  void device_sync(int device) override { inner_->device_sync(device); }
  double now() const override { return inner_->now(); }
  bool idle() override { return inner_->idle(); }

 private:
  std::shared_ptr<Runtime> inner_;
};

}  // namespace streamlap
