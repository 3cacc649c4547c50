// A runtime that tells an OrderChecker what it is asked to do, and otherwise is the one it wraps.
#pragma once

#include <memory>

#include "check/order_checker.h"
#include "runtime/proxy_runtime.h"
#include "runtime/stream_stock.h"

namespace streamlap::order {

class CheckedRuntime final : public ProxyRuntime {
 public:
  // With a stock: `inner` outlives this, whose streams come from there and go back.
  explicit CheckedRuntime(std::shared_ptr<Runtime> inner,
                          std::shared_ptr<StreamStock> stock = nullptr)
      : ProxyRuntime(std::move(inner)), stock_(std::move(stock)) {}
  ~CheckedRuntime() override;

  OrderChecker& checker() noexcept { return *checker_; }

  void* alloc_pinned(std::size_t bytes) override;
  void free_pinned(void* pointer, std::size_t bytes) noexcept override;
  void* alloc_device(int device, std::size_t bytes) override;
  void free_device(int device, void* pointer, std::size_t bytes) noexcept override;

  StreamRef stream_create(int device, StreamKind kind, bool high_priority) override;
  bool stream_idle(StreamRef stream) override;
  void stream_sync(StreamRef stream, Site site) override;
  void stream_wait(StreamRef stream, const Event& event, Site site) override;

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

  bool checked() const noexcept override { return true; }
  void taken(void* pointer, std::size_t bytes) override;
  void fresh(void* pointer, std::size_t bytes) override { checker_->fresh(pointer, bytes); }
  void host_reads(const void* pointer, std::size_t bytes) override;
  void declare(StreamRef stream, const void* pointer, std::size_t bytes, bool writes) override;
  void lock_acquired(const void* lock, Site site) noexcept override;
  void lock_released(const void* lock, Site site) noexcept override;
  void guarded(const void* lock, Site site) noexcept override;

 private:
  class CheckedEvent;

  std::shared_ptr<StreamStock> stock_;
  std::mutex mutex_;                               // guards taken_
  std::vector<std::pair<StreamRef, bool>> taken_;  // with their priority, from the stock
  // Callables that still run may outlive the runtime.
  std::shared_ptr<OrderChecker> checker_ = std::make_shared<OrderChecker>();
};

}  // namespace streamlap::order
