#include "transfer/slot_ring.h"

#include <algorithm>

#include "base/process.h"
#include "runtime/order_lock.h"

namespace streamlap {
namespace {

constexpr Site site_free{"staging.slot_is_free"};
constexpr Site site_ask_free{"staging.ask_slot"};
constexpr Site site_lock_take_ready{"staging.lock_take_ready"};
constexpr Site site_lock_grow{"staging.lock_grow"};
constexpr Site site_lock_refused{"staging.lock_refused"};
constexpr Site site_lock_take{"staging.lock_take"};
constexpr Site site_lock_put{"staging.lock_put"};
constexpr Site site_lock_reclaim{"staging.lock_reclaim"};
constexpr Site site_lock_empty{"staging.lock_empty"};
constexpr Site site_lock_shape{"staging.lock_shape"};
constexpr Site site_lock_bytes{"staging.lock_bytes"};
constexpr Site site_lock_trim{"staging.lock_trim"};

}  // namespace

void sync_event(Runtime& runtime, const Event& event, Site site) {
  // On a virtual clock a wait without a limit either ends or is reported as a deadlock.
  const std::chrono::nanoseconds slice =
      runtime.virtual_time() ? std::chrono::nanoseconds::max() : std::chrono::seconds(1);
  while (!runtime.event_sync_for(event, slice, site)) {
  }
}

SlotRing::SlotRing(std::shared_ptr<Runtime> runtime, int device)
    : runtime_(std::move(runtime)), device_(device) {}

SlotRing::~SlotRing() {
  for (Slot& slot : in_) {
    if (process::leaking()) return;
    try {
      wait_free(slot);
    } catch (...) {
      continue;  // it may be in use, now and for ever
    }
    runtime_->free_pinned(slot.data, slot_bytes_);
  }
}

bool SlotRing::is_free(const Slot& slot) noexcept {
  return !slot.busy || runtime_->event_state(*slot.busy, site_ask_free) == EventState::passed;
}

void SlotRing::wait_free(const Slot& slot) {
  if (!slot.busy) return;
  try {
    sync_event(*runtime_, *slot.busy, site_free);
  } catch (...) {
    // The event's own error is told elsewhere, and then the slot is free.
    if (!is_free(slot)) throw;
  }
}

Slot& SlotRing::take_out() noexcept {
  out_.splice(out_.end(), in_, in_.begin());
  return out_.back();
}

Slot* SlotRing::take_ready() {
  {
    OrderLock lock(*runtime_, mutex_, site_lock_take_ready);
    if (!in_.empty() && is_free(in_.front())) return &take_out();
    if (refused_ || in_.size() + out_.size() >= most_) return nullptr;
  }
  return grow();
}

Slot* SlotRing::grow() {
  Slots made(1);
  Slot& slot = made.front();
  slot.moved = runtime_->event_create(device_);
  slot.arrived = runtime_->event_create(device_);
  slot.copied = runtime_->event_create(device_);
  try {
    slot.data = static_cast<std::byte*>(runtime_->alloc_pinned(slot_bytes_));
  } catch (const Error& error) {
    OrderLock lock(*runtime_, mutex_, site_lock_refused);
    if (error.kind() != ErrorKind::out_of_memory || in_.size() + out_.size() == 0) throw;
    refused_ = true;  // slower with fewer, but it goes on
    return nullptr;
  }
  OrderLock lock(*runtime_, mutex_, site_lock_grow);
  out_.splice(out_.end(), made);
  return &slot;
}

Slot& SlotRing::take() {
  Slot* slot = nullptr;
  while (slot == nullptr) {
    if (Slot* ready = take_ready()) return *ready;
    OrderLock lock(*runtime_, mutex_, site_lock_take);
    if (!in_.empty()) {
      slot = &take_out();
    } else if (!out_.empty()) {
      throw Error(ErrorKind::runtime, "every slot of a ring is out");
    }  // else they have just been given back, and there is room for a new one
  }
  wait_free(*slot);
  return *slot;
}

void SlotRing::put(Slot& slot, EventPtr busy) noexcept {
  OrderLock lock(*runtime_, mutex_, site_lock_put);
  slot.busy = std::move(busy);
  const auto own =
      std::find_if(out_.begin(), out_.end(), [&](const Slot& other) { return &other == &slot; });
  in_.splice(in_.end(), out_, own);
}

void SlotRing::reclaim() noexcept {
  OrderLock lock(*runtime_, mutex_, site_lock_reclaim);
  for (Slot& slot : out_) slot.busy = nullptr;
  in_.splice(in_.begin(), out_);
}

void SlotRing::shape(std::size_t slot_bytes, std::size_t most) {
  {
    OrderLock lock(*runtime_, mutex_, site_lock_empty);
    if (slot_bytes == slot_bytes_ && most == most_) return;
    out_.splice(out_.end(), in_);
  }
  for (const Slot& slot : out_) wait_free(slot);
  Slots gone;
  std::size_t gone_bytes = slot_bytes;
  {
    OrderLock lock(*runtime_, mutex_, site_lock_shape);
    gone.swap(out_);
    std::swap(slot_bytes_, gone_bytes);
    most_ = most;
    refused_ = false;
  }
  for (const Slot& slot : gone) runtime_->free_pinned(slot.data, gone_bytes);
}

std::size_t SlotRing::bytes() const {
  OrderLock lock(*runtime_, mutex_, site_lock_bytes);
  return (in_.size() + out_.size()) * slot_bytes_;
}

std::size_t SlotRing::trim() {
  Slots freed;
  std::size_t each = 0;
  {
    OrderLock lock(*runtime_, mutex_, site_lock_trim);
    for (auto slot = in_.begin(); slot != in_.end();) {
      const auto next = std::next(slot);
      if (is_free(*slot)) freed.splice(freed.end(), in_, slot);
      slot = next;
    }
    each = slot_bytes_;
    refused_ = false;
  }
  for (const Slot& slot : freed) runtime_->free_pinned(slot.data, each);
  return freed.size() * each;
}

}  // namespace streamlap
