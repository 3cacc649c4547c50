#include "transfer/slabs.h"

#include <algorithm>

namespace streamlap {

std::list<Slab> SizeClass::prepare(std::size_t count) {
  std::list<Slab> prepared(1);
  if (const std::size_t wanted = blocks_ + coming_ + count; wanted > ready_.capacity()) {
    ready_.reserve(std::max(wanted, 2 * ready_.capacity()));
  }
  coming_ += count;
  return prepared;
}

void SizeClass::add(std::byte* data, std::size_t count, std::list<Slab> prepared) noexcept {
  Slab& slab = prepared.front();
  slab.data = data;
  slab.bytes = count * capacity_;
  slab.count = count;
  slabs_.splice(slabs_.end(), prepared);
  coming_ -= count;
  blocks_ += count;
  empty_blocks_ += count;
  // The first block is the next to be taken.
  for (std::size_t index = count; index-- > 0;) {
    ready_.push_back({data + index * capacity_, &slab});
  }
}

Piece SizeClass::take() noexcept {
  if (ready_.empty()) return {};
  const Piece piece = ready_.back();
  ready_.pop_back();
  if (piece.slab->taken++ == 0) empty_blocks_ -= piece.slab->count;
  return piece;
}

void SizeClass::put_back(Piece piece) noexcept {
  ready_.push_back(piece);
  if (--piece.slab->taken == 0) empty_blocks_ += piece.slab->count;
}

std::size_t SizeClass::hold(const Piece& piece) noexcept {
  ++live_;
  if (piece.slab->held++ != 0) return 0;
  held_blocks_ += piece.slab->count;
  return piece.slab->bytes;
}

std::size_t SizeClass::let_go(const Piece& piece) noexcept {
  --live_;
  if (--piece.slab->held != 0) return 0;
  held_blocks_ -= piece.slab->count;
  return piece.slab->bytes;
}

std::size_t SizeClass::give_up(std::size_t bytes, std::list<Slab>& out) noexcept {
  std::size_t found = 0;
  for (auto slab = slabs_.begin(); slab != slabs_.end() && found < bytes;) {
    const auto next = std::next(slab);
    if (slab->taken == 0) {
      slab->given_up = true;
      found += slab->bytes;
      out.splice(out.end(), slabs_, slab);
    }
    slab = next;
  }
  if (found == 0) return 0;
  std::erase_if(ready_, [](const Piece& piece) { return piece.slab->given_up; });
  blocks_ -= found / capacity_;
  empty_blocks_ -= found / capacity_;
  return found;
}

}  // namespace streamlap
