// How a move's pieces are shared out: in tiles of one size, numbered through all pieces, so that
// one huge piece among small ones keeps every block busy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moves/checksum.h"
#include "moves/on_both.h"
#include "moves/ranges.h"

namespace streamlap::moves {

// One tensor of a move. `far` is where it lies; its place in the one range is `offset` bytes from
// the range's begin. A gather reads the far side, a scatter writes it.
struct Piece {
  std::byte* far = nullptr;
  std::uint64_t offset = 0;
  std::uint64_t count = 0;       // elements; at least one
  std::uint32_t first_tile = 0;  // tiles of all pieces before this one
  std::uint32_t unused = 0;
};
static_assert(sizeof(Piece) == 32);

// Bytes of a tile on the side where it has more. A warp takes one at a time: so small pieces, too,
// keep all warps of a block busy, and a warp reads four times 512 bytes before it writes.
inline constexpr unsigned tile_bytes = 4 << 10;

constexpr STREAMLAP_ON_BOTH std::uint64_t elements_of_tile(std::size_t from_bytes,
                                                           std::size_t to_bytes) {
  return tile_bytes / (from_bytes > to_bytes ? from_bytes : to_bytes);
}

// The piece that `tile` is of, if it is none before `from`. Warps take tiles in rising order, a
// few apart: so this looks nearby first, twice as far each time, and then halves.
STREAMLAP_ON_BOTH std::uint32_t piece_of(const Piece* pieces, std::uint32_t count,
                                         std::uint32_t tile, std::uint32_t from) {
  std::uint32_t low = from;
  std::uint32_t step = 1;
  while (step < count - low && pieces[low + step].first_tile <= tile) {
    low += step;
    step *= 2;
  }
  std::uint32_t high = step < count - low ? low + step : count;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (pieces[middle].first_tile <= tile ? low : high) = middle;
  }
  return low;
}

// Which of the two sides is the source.
struct Sides {
  std::byte* dst;
  const std::byte* src;
};

STREAMLAP_ON_BOTH Sides sides_of(const Piece& piece, std::byte* base, bool gathers) {
  std::byte* near = base + piece.offset;
  return gathers ? Sides{near, piece.far} : Sides{piece.far, near};
}

STREAMLAP_ON_BOTH void copy_tile(const Piece& piece, std::uint32_t tile, std::byte* base,
                                 bool gathers, Lane lane) {
  const Sides sides = sides_of(piece, base, gathers);
  const std::uint64_t begin = std::uint64_t{tile - piece.first_tile} * tile_bytes;
  const std::uint64_t left = piece.count - begin;
  copy_range(sides.dst + begin, sides.src + begin, left < tile_bytes ? left : tile_bytes, lane);
}

// This lane's part of a checksum, in which a piece's bytes begin at its offset.
STREAMLAP_ON_BOTH std::uint64_t sum_tile(const Piece& piece, std::uint32_t tile, Lane lane) {
  const std::uint64_t begin = std::uint64_t{tile - piece.first_tile} * tile_bytes;
  const std::uint64_t left = piece.count - begin;
  return sum_of_range(piece.far + begin, piece.offset + begin,
                      left < tile_bytes ? left : tile_bytes, lane);
}

// The number of non-finite elements that this lane has seen.
template <class From, class To>
STREAMLAP_ON_BOTH std::uint64_t change_tile(const Piece& piece, std::uint32_t tile, std::byte* base,
                                            bool gathers, const Change& change, Lane lane) {
  constexpr std::size_t in = sizeof(typename From::Bits);
  constexpr std::size_t out = sizeof(typename To::Bits);
  constexpr std::uint64_t most = elements_of_tile(in, out);
  const Sides sides = sides_of(piece, base, gathers);
  const std::uint64_t begin = (tile - piece.first_tile) * most;
  const std::uint64_t left = piece.count - begin;
  return change_range<From, To>(sides.dst + begin * out, sides.src + begin * in,
                                left < most ? left : most, change, lane);
}

}  // namespace streamlap::moves
