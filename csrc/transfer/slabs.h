// Reservations cut into blocks of one size: which are ready, which reservations are empty.
//
// Bookkeeping alone: no lock, no runtime, no limit. The pool has all three.
#pragma once

#include <cstddef>
#include <deque>
#include <list>
#include <vector>

#include "runtime/runtime.h"

namespace streamlap {

// One reservation from the runtime.
struct Slab {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t count = 0;  // blocks, one after the other
  std::size_t taken = 0;  // blocks that are held or in flight: it is empty without any
  std::size_t held = 0;   // blocks that somebody holds
  bool given_up = false;
};

// A block's memory.
struct Piece {
  std::byte* data = nullptr;
  Slab* slab = nullptr;
};

struct Retired {
  Piece piece;
  std::vector<EventPtr> uses;
};

// All slabs of one size of block.
class SizeClass {
 public:
  explicit SizeClass(std::size_t capacity) : capacity_(capacity) {}

  std::size_t capacity() const noexcept { return capacity_; }
  std::size_t blocks() const noexcept { return blocks_; }
  std::size_t slabs() const noexcept { return slabs_.size(); }
  std::size_t ready() const noexcept { return ready_.size(); }
  // Blocks that nobody holds of slabs with a held one: only this size can use them.
  std::size_t spare() const noexcept { return held_blocks_ - live_; }
  // Bytes of slabs without a block in use.
  std::size_t empty_bytes() const noexcept { return empty_blocks_ * capacity_; }

  // Makes room for a slab of that many blocks, so that adding it cannot fail. Each call is followed
  // by one of the two below.
  std::list<Slab> prepare(std::size_t count);
  void add(std::byte* data, std::size_t count, std::list<Slab> prepared) noexcept;
  void abandon(std::size_t count) noexcept { coming_ -= count; }
  // Takes the block that became ready last; null when there is none.
  Piece take() noexcept;
  void put_back(Piece piece) noexcept;  // taken before; ready again
  // Somebody holds a block that was taken, or no longer. They return the bytes of its slab when it
  // is the first held block there, or was the last.
  std::size_t hold(const Piece& piece) noexcept;
  std::size_t let_go(const Piece& piece) noexcept;
  // Moves empty slabs of at least `bytes` to `out`, as far as there are.
  std::size_t give_up(std::size_t bytes, std::list<Slab>& out) noexcept;

  std::deque<Retired> retired;  // longest ago first
  std::size_t promised = 0;     // blocks that are being made in the background, or will be

 private:
  std::size_t capacity_;
  std::list<Slab> slabs_;
  std::vector<Piece> ready_;  // with room for all blocks
  std::size_t blocks_ = 0;
  std::size_t coming_ = 0;
  std::size_t empty_blocks_ = 0;
  std::size_t held_blocks_ = 0;  // of slabs with a held one
  std::size_t live_ = 0;
};

}  // namespace streamlap
