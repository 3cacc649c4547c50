#include "transfer/slot_ring.h"

#include <algorithm>

#include "base/process.h"

namespace streamlap {
namespace {

constexpr Site site_free{"staging.slot_is_free"};

}  // namespace

void sync_event(Runtime& runtime, const Event& event, Site site) {
  // On a virtual clock a wait without a limit either ends or is reported as a deadlock.
  const std::chrono::nanoseconds slice =
      runtime.virtual_time() ? std::chrono::nanoseconds::max() : std::chrono::seconds(1);
  while (!runtime.event_sync_for(event, slice, site)) {
  }
}

SlotRing::SlotRing(std::shared_ptr<Runtime> runtime, int device, std::size_t slot_bytes,
                   std::size_t most)
    : runtime_(std::move(runtime)), device_(device), slot_bytes_(slot_bytes), most_(most) {
  if (slot_bytes == 0 || most == 0) {
    throw Error(ErrorKind::invalid_argument, "a ring needs a slot of a byte at least");
  }
}

SlotRing::~SlotRing() {
  for (Slots* slots : {&in_, &out_}) {
    for (std::unique_ptr<Slot>& slot : *slots) {
      if (process::leaking()) return;
      try {
        if (slot->busy) sync_event(*runtime_, *slot->busy, site_free);
      } catch (...) {
        // What failed uses it no more.
      }
      runtime_->free_pinned(slot->data, slot_bytes_);
    }
  }
}

// An event that carries an error is done: whoever recorded it is told elsewhere.
bool SlotRing::is_free(const Slot& slot) {
  try {
    return !slot.busy || runtime_->event_query(*slot.busy);
  } catch (...) {
    return true;
  }
}

Slot& SlotRing::take_out(Slots& from) {
  out_.push_back(std::move(from.front()));
  from.pop_front();
  return *out_.back();
}

Slot* SlotRing::take_ready() {
  {
    std::lock_guard lock(mutex_);
    runtime_->lock_acquired(this);
    if (!in_.empty() && is_free(*in_.front())) return &take_out(in_);
  }
  return grow();
}

Slot* SlotRing::grow() {
  {
    std::lock_guard lock(mutex_);
    if (refused_ || in_.size() + out_.size() >= most_) return nullptr;
  }
  Slots made;
  made.push_back(std::make_unique<Slot>());
  Slot& slot = *made.front();
  slot.moved = runtime_->event_create(device_);
  slot.arrived = runtime_->event_create(device_);
  slot.copied = runtime_->event_create(device_);
  try {
    slot.data = static_cast<std::byte*>(runtime_->alloc_pinned(slot_bytes_));
  } catch (const Error& error) {
    std::lock_guard lock(mutex_);
    if (error.kind() != ErrorKind::out_of_memory || in_.size() + out_.size() == 0) throw;
    refused_ = true;  // slower with fewer, but it goes on
    return nullptr;
  }
  std::lock_guard lock(mutex_);
  return &take_out(made);
}

Slot& SlotRing::take() {
  Slot* slot = nullptr;
  while (slot == nullptr) {
    if (Slot* ready = take_ready()) return *ready;
    std::lock_guard lock(mutex_);
    if (!in_.empty()) {
      slot = &take_out(in_);
    } else if (!out_.empty()) {
      throw Error(ErrorKind::runtime, "every slot of a ring is out");
    }  // else they have just been given back, and there is room for a new one
  }
  try {
    sync_event(*runtime_, *slot->busy, site_free);
  } catch (...) {
    // As above.
  }
  return *slot;
}

void SlotRing::put(Slot& slot, EventPtr busy) {
  std::lock_guard lock(mutex_);
  slot.busy = std::move(busy);
  const auto own = std::find_if(out_.begin(), out_.end(),
                                [&](const auto& other) { return other.get() == &slot; });
  in_.push_back(std::move(*own));
  out_.erase(own);
}

void SlotRing::reclaim() {
  std::lock_guard lock(mutex_);
  while (!out_.empty()) {
    out_.front()->busy = nullptr;
    in_.push_front(std::move(out_.front()));
    out_.pop_front();
  }
  runtime_->lock_released(this);  // whoever takes them knows what the one who waited knew
}

std::size_t SlotRing::bytes() const {
  std::lock_guard lock(mutex_);
  return (in_.size() + out_.size()) * slot_bytes_;
}

std::size_t SlotRing::trim() {
  Slots freed;
  {
    std::lock_guard lock(mutex_);
    for (std::unique_ptr<Slot>& slot : in_) {
      if (is_free(*slot)) freed.push_back(std::move(slot));
    }
    std::erase(in_, nullptr);
    refused_ = false;
  }
  for (std::unique_ptr<Slot>& slot : freed) runtime_->free_pinned(slot->data, slot_bytes_);
  return freed.size() * slot_bytes_;
}

}  // namespace streamlap
