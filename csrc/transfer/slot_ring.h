// A bounded ring of page-locked slots, each used again only after the event of its last use.
//
// One thread at a time takes slots and puts them back; anybody may ask for figures and trim.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>

#include "runtime/runtime.h"

namespace streamlap {

// Blocks the calling thread until an event is done; throws the error that it carries.
void sync_event(Runtime& runtime, const Event& event, Site site);

struct Slot {
  std::byte* data = nullptr;
  // Recorded anew for each use; made with the slot, because they cost more than their recording.
  EventPtr moved;    // DMA has passed: it holds what came from the device, or was read for it
  EventPtr arrived;  // the same for host streams, which need not ask a device then
  EventPtr copied;   // a host stream has copied in or out
  EventPtr busy;     // one of these: after it the slot is free. Null: free
};

class SlotRing {
 public:
  SlotRing(std::shared_ptr<Runtime> runtime, int device);
  // Waits until no slot is in use. Leaks them at process exit and in a forked child, and those of
  // which nobody can tell whether they are in use.
  ~SlotRing();
  SlotRing(const SlotRing&) = delete;
  SlotRing& operator=(const SlotRing&) = delete;

  // From now on at most so many slots of this size. Where that is a change, it blocks the calling
  // thread until the slots are free and gives them back. None may be out.
  void shape(std::size_t slot_bytes, std::size_t most);
  // A slot that is free already, or a new one; null when neither can be had now.
  Slot* take_ready();
  // Blocks the calling thread until the slot that was put back longest ago is free. One at least
  // must not be out. Throws Error(out_of_memory) when there is no memory for a first slot.
  Slot& take();
  // The slot is free after `busy`.
  void put(Slot& slot, EventPtr busy) noexcept;
  // Every slot that is out is free: its user failed and has waited. To be called after any of the
  // functions above has thrown.
  void reclaim() noexcept;

  std::size_t slot_bytes() const noexcept { return slot_bytes_; }  // for who takes slots
  // Page-locked bytes held.
  std::size_t bytes() const;
  // Gives the slots that are free back to the system; the bytes given back.
  std::size_t trim();

 private:
  using Slots = std::list<Slot>;  // moved from list to list without asking for memory

  bool is_free(const Slot& slot) noexcept;
  void wait_free(const Slot& slot);  // throws while that cannot be told
  Slot& take_out() noexcept;         // mutex_ held: the first that is in
  Slot* grow();                      // null: the system has no memory for another

  const std::shared_ptr<Runtime> runtime_;
  const int device_;
  mutable std::mutex mutex_;  // guards all below; only who takes slots changes the shape
  std::size_t slot_bytes_ = 0;
  std::size_t most_ = 0;
  Slots in_;              // longest ago first
  Slots out_;             // taken
  bool refused_ = false;  // the system has no more page-locked memory
};

}  // namespace streamlap
