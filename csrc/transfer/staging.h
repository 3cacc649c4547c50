// Copies to and from ordinary memory, which no copy engine reaches: through a small ring of
// page-locked slots, by DMA on one side and by a few threads on the other.
//
// To the host: DMA into a slot; a host stream waits for it and copies the slot out; the next DMA
// into that slot comes after. To a device the other way round. A device's stream waits only for
// events that are recorded, never for the host. So one host stream issues all of it, in a task that
// waits for slots, and a transfer's events stand for its copies once that task has ended.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "moves/move.h"
#include "transfer/request.h"
#include "transfer/slot_ring.h"
#include "transfer/transfer.h"

namespace streamlap {

struct StagingOptions {
  // The rings of both directions of one device together.
  static constexpr std::size_t most_pinned = std::size_t{128} << 20;

  std::size_t slot_bytes = std::size_t{4} << 20;
  std::size_t slots = 16;
  int copiers = 4;     // threads that copy between slots and ordinary memory
  int populators = 4;  // threads that make fresh pages present
};

// Throws Error(invalid_argument) for what is no ring, or holds more than most_pinned.
void require_valid(const StagingOptions& options);

// One device and direction. No streams or slots before they are needed.
class Staging {
 public:
  Staging(std::shared_ptr<Runtime> runtime, int device);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Throws Error(invalid_argument) for what cannot be staged: bodies, elements larger than a slot.
  // Otherwise the policy that cuts chunks to fit the slots.
  static ChunkPolicy policy_for(const TransferRequest& request, std::size_t slot_bytes);

  // Issues all of a transfer, and blocks the calling thread while every slot is in use. Called in
  // tasks of one host stream, one at a time. When it throws, nothing of the transfer is under way,
  // or it is kept for ever. `options`: those that its policy was made for.
  void issue(Transfer& transfer, const TransferRequest& request, const StagingOptions& options);

  // Page-locked bytes held, and giving the idle ones back.
  std::size_t bytes() const { return ring_.bytes(); }
  std::size_t trim() { return ring_.trim(); }

 private:
  // The events after which the pages of a fresh destination are present, a piece each.
  using Present = std::vector<EventPtr>;

  // What the copies of a transfer write to, and the event after which they have.
  struct Writes {
    std::vector<moves::Extent> ranges;
    EventPtr done;
  };

  void make_streams(const StagingOptions& options);
  void to_host(Transfer& transfer, const TransferRequest& request);
  void to_device(Transfer& transfer, const TransferRequest& request);
  std::vector<Present> populate(const TransferRequest& request);
  // The index past the last chunk that goes into the same slot as chunk `first`.
  std::size_t load_end(const ChunkPlan& plan, std::size_t first) const;
  // Between a slot and the items that chunks `first` to `last` belong to.
  void copy(const Transfer& transfer, const TransferRequest& request, std::size_t first,
            std::size_t last, const Slot& slot, bool from_slot, StreamRef stream);
  // Blocks the calling thread until no earlier transfer writes to the same memory: copiers work
  // side by side, and the later transfer's bytes are to stay.
  void wait_for_writers(const TransferRequest& request);
  StreamRef next_copier();
  // Waits for all that was issued and takes the errors off; then every slot is free. Gives the
  // error of a wait that failed: then nothing is known.
  std::exception_ptr drain() noexcept;

  const std::shared_ptr<Runtime> runtime_;
  const int device_;
  SlotRing ring_;
  // The others are used by the issuing thread alone.
  StreamRef dma_;
  StreamRef arrivals_;  // asks the device how far DMA is, for all copiers
  StreamRef in_order_;  // sees the copies of all copiers end, in order of issue
  std::vector<StreamRef> copiers_;
  std::vector<StreamRef> populators_;
  std::size_t copiers_used_ = 1;  // as many as the options say; there may be more
  std::size_t populators_used_ = 1;
  std::size_t next_copier_ = 0;
  std::vector<Writes> writing_;  // of those that may be under way
  bool in_doubt_ = false;        // what a failed transfer left may be under way
};

}  // namespace streamlap
