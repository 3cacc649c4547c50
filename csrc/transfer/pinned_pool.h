// Page-locked memory, reused only when every event that used a block is done, under a hard limit.
//
// The limit counts bytes reserved from the runtime: what users hold, what is cached, what still
// waits for its events and what is being reserved. Blocks are rounded up to one of eight sizes per
// power of two (12.5 % waste at most, from 4 KiB up). Blocks below 1 MiB are cut from slabs, each
// of one size: a driver call costs as much as many of them. A slab goes back to the system only
// when none of its blocks is in use. Everything is safe from any thread. No lock is held while
// memory is reserved or given back to the system.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/changes.h"
#include "runtime/runtime.h"
#include "runtime/worker.h"
#include "transfer/slabs.h"

namespace streamlap {

class PinnedPool;

// One block, owned by whoever holds the pointer. Dying, it goes back to its pool with its uses.
class PinnedBlock : public std::enable_shared_from_this<PinnedBlock> {
 public:
  PinnedBlock(std::shared_ptr<PinnedPool> pool, std::size_t capacity, std::size_t requested)
      : pool_(std::move(pool)), capacity_(capacity), requested_(requested) {}
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  std::byte* data() const noexcept { return piece_.data; }
  std::size_t capacity() const noexcept { return capacity_; }
  std::size_t requested() const noexcept { return requested_; }
  // The system was asked for it just now; otherwise it was there.
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
  Piece piece_;
  std::size_t capacity_;
  std::size_t requested_;
  mutable std::mutex mutex_;
  std::vector<EventPtr> uses_;
  bool condemned_ = false;
  bool fresh_ = false;
};

struct PoolStats {
  std::size_t limit = 0;
  std::size_t reserved = 0;   // live + in_flight + cached + growing
  std::size_t live = 0;       // in blocks that somebody holds
  std::size_t in_flight = 0;  // let go, events not done yet
  std::size_t cached = 0;     // ready for reuse
  std::size_t growing = 0;    // being reserved, beside what somebody waits for
  std::size_t waste = 0;      // live bytes beyond what was asked for
  std::size_t peak = 0;       // most bytes ever reserved
  std::size_t live_blocks = 0;
  std::size_t slabs = 0;  // reservations that these blocks are cut from
  std::size_t hits = 0;
  std::size_t misses = 0;
};

// Blocks that a pool's own threads make ahead of their use; see PinnedPool::grow_ahead.
class Growth {
 public:
  Growth(std::size_t capacity, std::size_t count) : capacity_(capacity), left_(count) {}

 private:
  friend class PinnedPool;
  // Guarded by the pool's lock.
  std::size_t capacity_;
  std::size_t left_;        // blocks not begun
  std::size_t making_ = 0;  // slabs begun
  std::exception_ptr error_;
};

class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  // Blocks below 1 MiB are cut from slabs of at most `slab_bytes`, and of at most 1/64 of the
  // limit.
  PinnedPool(std::shared_ptr<Runtime> runtime, std::size_t limit,
             std::size_t slab_bytes = usual_slab);
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // A block of at least `bytes` (1 at least). Empty when one will do after blocks in flight have
  // come home, or when one is being made in the background: call again. Throws PoolExhausted when
  // only memory that users hold could help, and Error(sticky) when it is in flight on a device
  // whose context is lost.
  std::shared_ptr<PinnedBlock> try_allocate(std::size_t bytes);

  // Makes blocks in the background until `count` of `bytes` are cached or in flight; null when
  // there are so many. It is a hint: what the limit has no room for, and what the system refuses,
  // is not made, and a later allocation tries for itself. On a virtual clock nothing is made.
  std::shared_ptr<Growth> grow_ahead(std::size_t bytes, std::size_t count);
  // What has not been begun is not made. To be called however the work ends that it was for.
  void cancel(Growth& growth) noexcept;
  // True when nothing of it is left to be done; throws what kept blocks from being made.
  bool grown(const Growth& growth);
  // Returns once `count` blocks of `bytes` are cached, in flight or being made for somebody else.
  // Throws PoolExhausted, before anything is made, when they would not fit beside what is held, or
  // Error(out_of_memory).
  void prewarm(std::size_t bytes, std::size_t count);
  // The same without the wait: grow_ahead for what must fit.
  std::shared_ptr<Growth> start_prewarm(std::size_t bytes, std::size_t count);
  // True while the pool's own threads reserve memory.
  bool busy() const;
  // For loops of try_allocate and grown: noted whenever growth has made blocks or ended.
  Changes& changes() noexcept { return changes_; }

  PoolStats stats();
  // Gives cached memory back to the system, slabs without a block in use; the bytes given back.
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
  // That block, for one more to hold it; null where it is none of ours, or about to go.
  std::shared_ptr<PinnedBlock> around(const void* pointer) const;
  // The uses of that block; none where it is none of ours.
  std::vector<EventPtr> uses(const void* pointer) const;

  static std::size_t size_class(std::size_t bytes);
  static constexpr std::size_t smallest_block = 4096;
  static constexpr std::size_t carved_below = std::size_t{1} << 20;
  static constexpr std::size_t usual_slab = std::size_t{2} << 20;

 private:
  friend class PinnedBlock;
  using LiveBlocks = std::map<const std::byte*, PinnedBlock*>;  // by address
  using Freed = std::list<Slab>;
  // Memory on its way from the system, counted already.
  struct Claim {
    SizeClass* size;
    std::size_t count;
    std::size_t bytes;
    std::list<Slab> prepared;
  };

  PinnedBlock* find(const void* pointer) const;  // mutex_ held: the live block around it, or null
  void take_back(PinnedBlock& block) noexcept;
  // These need mutex_.
  SizeClass& size_of(std::size_t capacity);
  bool finished(Retired& block) noexcept;
  Piece take_ready(SizeClass& size);
  void collect_finished();
  // False, and nothing done, where there can be no room. Of `kept`, no block is given up.
  bool make_room(std::size_t bytes, Freed& out, const SizeClass* kept = nullptr) noexcept;
  std::size_t give_up(std::size_t bytes, Freed& out, const SizeClass* kept = nullptr) noexcept;
  std::size_t slab_blocks(const SizeClass& size, std::size_t wanted) const noexcept;
  Claim claim(SizeClass& size, std::size_t count);
  void unclaim(const Claim& claimed) noexcept;
  void settle(Claim& claimed, std::byte* data) noexcept;  // its blocks are cached
  // `entry` is the block's place in live_, made beforehand.
  void hand_out(PinnedBlock& block, SizeClass& size, Piece piece, LiveBlocks& entry) noexcept;
  bool fits(std::size_t capacity, std::size_t count) const;
  PoolExhausted exhausted(const std::string& what) const;
  void drop(Growth& growth, std::exception_ptr error) noexcept;

  // These must not have it.
  std::byte* reserve(std::size_t bytes);
  void give_to_system(const Freed& freed) noexcept;
  bool grow_step(Growth& growth);  // false when nothing is left to begin

  std::shared_ptr<Runtime> runtime_;
  const std::size_t slab_bytes_;
  mutable std::mutex mutex_;
  PoolStats stats_;
  bool lost_ = false;        // some blocks will never come home: their device's context is gone
  std::size_t leaving_ = 0;  // counted in stats_.reserved until the system has them back
  // Of slabs in which somebody holds a block: they cannot be given back before he lets go of it.
  std::size_t held_bytes_ = 0;
  std::map<std::size_t, SizeClass> sizes_;  // by capacity; none is ever taken out
  LiveBlocks live_;

  Changes changes_;
  std::size_t making_ = 0;  // slabs that the workers make
  // Two, so that one slab's pages are found while those of the one before are locked. Last: they
  // end before what they use.
  std::array<Worker, 2> workers_;
};

}  // namespace streamlap
