// Page-locked memory, reused only when every event that used a block is done, under a hard limit.
//
// The limit counts bytes reserved from the runtime: what users hold, what is cached and what still
// waits for its events. Blocks are rounded up to one of eight sizes per power of two (12.5 % waste
// at most, from 4 KiB up). Everything is safe from any thread. No lock is held while memory is
// reserved or given back to the system.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/runtime.h"

namespace streamlap {

class PinnedPool;

// One block, owned by whoever holds the pointer. Dying, it goes back to its pool with its uses.
class PinnedBlock {
 public:
  PinnedBlock(std::shared_ptr<PinnedPool> pool, std::byte* data, std::size_t capacity,
              std::size_t requested)
      : pool_(std::move(pool)), data_(data), capacity_(capacity), requested_(requested) {}
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t capacity() const noexcept { return capacity_; }
  std::size_t requested() const noexcept { return requested_; }
  // The system was asked for it just now; otherwise it had been used before.
  bool fresh() const noexcept { return fresh_; }
  PinnedPool& pool() const noexcept { return *pool_; }

  // Work on `stream` issued so far uses this block: it is not reused before that work is done.
  void record_use(StreamRef stream);
  // The ends of the uses recorded so far: who writes to the block again waits for them.
  std::vector<EventPtr> uses() const;
  // Never give this block to anybody again: its last use could not be recorded.
  void condemn() noexcept { condemned_ = true; }

 private:
  friend class PinnedPool;
  std::shared_ptr<PinnedPool> pool_;
  std::byte* data_;
  std::size_t capacity_;
  std::size_t requested_;
  mutable std::mutex mutex_;
  std::vector<EventPtr> uses_;
  bool condemned_ = false;
  bool fresh_ = false;
};

struct PoolStats {
  std::size_t limit = 0;
  std::size_t reserved = 0;   // live + in_flight + cached
  std::size_t live = 0;       // in blocks that somebody holds
  std::size_t in_flight = 0;  // let go, events not done yet
  std::size_t cached = 0;     // ready for reuse
  std::size_t waste = 0;      // live bytes beyond what was asked for
  std::size_t peak = 0;       // most bytes ever reserved
  std::size_t live_blocks = 0;
  std::size_t hits = 0;
  std::size_t misses = 0;
};

class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  PinnedPool(std::shared_ptr<Runtime> runtime, std::size_t limit);
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // A block of at least `bytes` (1 at least). Empty when one will do after blocks in flight have
  // come home: call again. Throws PoolExhausted when only memory that users hold could help.
  std::unique_ptr<PinnedBlock> try_allocate(std::size_t bytes);

  PoolStats stats();
  // Gives cached memory back to the system; the bytes given back.
  std::size_t trim();
  std::size_t limit() const;
  // Whether `count` more blocks of `bytes` can ever be had beside what is held; asks no device.
  bool has_room(std::size_t bytes, std::size_t count) const;
  // Bytes in blocks that somebody holds; asks no device.
  std::size_t live() const;
  // Lowering it below what is reserved frees nothing that is held; it stops further growth.
  void set_limit(std::size_t limit);
  const std::shared_ptr<Runtime>& runtime() const noexcept { return runtime_; }

  // The live block that contains `pointer`, to record a use of it. False when it is none of ours.
  bool record_use(const void* pointer, StreamRef stream);
  // The uses of that block; none where it is none of ours.
  std::vector<EventPtr> uses(const void* pointer) const;

  static std::size_t size_class(std::size_t bytes);
  static constexpr std::size_t smallest_block = 4096;

 private:
  friend class PinnedBlock;
  struct Retired {
    std::byte* data;
    std::vector<EventPtr> uses;
  };
  using LiveBlocks = std::map<const std::byte*, PinnedBlock*>;  // by address
  using Freed = std::vector<std::pair<std::byte*, std::size_t>>;

  PinnedBlock* find(const void* pointer) const;  // mutex_ held: the live block around it, or null
  void take_back(PinnedBlock& block) noexcept;
  bool finished(Retired& block);                // mutex_ held
  std::byte* take_ready(std::size_t capacity);  // mutex_ held: a block of this size, or null
  void collect_finished();                      // mutex_ held
  void uncache(std::size_t bytes, Freed& out);  // mutex_ held: at least `bytes`, if there are
  void give_to_system(const Freed& freed) noexcept;
  std::byte* reserve(std::size_t capacity);
  // mutex_ held. `entry` is the block's place in live_, made beforehand.
  void hand_out(PinnedBlock& block, std::byte* data, LiveBlocks& entry) noexcept;

  std::shared_ptr<Runtime> runtime_;
  mutable std::mutex mutex_;
  PoolStats stats_;
  std::size_t leaving_ = 0;  // counted in stats_.reserved until the system has them back
  std::map<std::size_t, std::vector<std::byte*>> cached_;  // by capacity
  std::map<std::size_t, std::deque<Retired>> retired_;     // by capacity, longest ago first
  LiveBlocks live_;
};

}  // namespace streamlap
