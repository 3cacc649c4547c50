#include "moves/move.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace streamlap::moves {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::invalid_argument, why); }

bool changes(const Move& move) {
  return move.from != move.to || move.change.scales || move.change.counts;
}

std::size_t far_bytes(const Move& move, const Piece& piece) {
  return piece.count * size_of(move.way == Way::gather ? move.from : move.to);
}

std::size_t near_bytes(const Move& move, const Piece& piece) {
  return piece.count * size_of(move.way == Way::gather ? move.to : move.from);
}

Extent extent_of(const void* begin, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  if (bytes > std::numeric_limits<std::uintptr_t>::max() - first) refuse("a range that wraps");
  return {first, first + bytes};
}

bool meet(const Extent& a, const Extent& b) { return a.begin < b.end && b.begin < a.end; }

void check_types(const Move& move) {
  const bool raw = move.from == Element::bytes || move.to == Element::bytes;
  if (!raw && !changes(move)) refuse("a move that changes nothing is one of bytes");
  if (raw && changes(move)) {
    refuse(std::string("a move casts, scales and counts float32, float16 and bfloat16 only, not ") +
           name_of(move.from) + " as " + name_of(move.to));
  }
  if (move.change.scales && !(std::abs(move.change.scale) <= std::numeric_limits<float>::max())) {
    refuse("the scale of a move must be finite");
  }
  if (move.change.counts && move.counts == nullptr) refuse("a count without a place for it");
}

void check_grid(const Grid& grid) {
  if (grid.blocks < 1 || grid.blocks > most_blocks) {
    refuse("a move has 1 to " + std::to_string(most_blocks) + " blocks, not " +
           std::to_string(grid.blocks));
  }
  if (grid.threads < 32 || grid.threads > most_threads || grid.threads % 32 != 0) {
    refuse("a move has 32 to " + std::to_string(most_threads) +
           " threads a block, a multiple of 32, not " + std::to_string(grid.threads));
  }
}

// As one block of one lane.
template <class Body>
void each_tile(const Move& move, Body&& body) {
  std::uint32_t piece = 0;
  const auto count = static_cast<std::uint32_t>(move.pieces.size());
  for (std::uint32_t tile = 0; tile < move.tiles; ++tile) {
    piece = piece_of(move.pieces.data(), count, tile, piece);
    body(move.pieces[piece], tile);
  }
}

}  // namespace

bool any_overlap(std::vector<Extent>& extents) {
  const auto before = [](const Extent& a, const Extent& b) { return a.begin < b.begin; };
  if (!std::is_sorted(extents.begin(), extents.end(), before)) {
    std::sort(extents.begin(), extents.end(), before);
  }
  for (std::size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].begin < extents[i - 1].end) return true;
  }
  return false;
}

const char* name_of(Element element) {
  switch (element) {
    case Element::float32:
      return "float32";
    case Element::float16:
      return "float16";
    case Element::bfloat16:
      return "bfloat16";
    case Element::bytes:
      break;
  }
  return "bytes";
}

void number_tiles(Move& move) {
  const std::uint64_t most = elements_of_tile(size_of(move.from), size_of(move.to));
  std::uint64_t tiles = 0;
  for (Piece& piece : move.pieces) {
    piece.first_tile = static_cast<std::uint32_t>(tiles);
    tiles += piece.count / most + (piece.count % most != 0);
    if (tiles > std::numeric_limits<std::uint32_t>::max() / 2) refuse("a move is too large");
  }
  move.tiles = static_cast<std::uint32_t>(tiles);
}

void check(const Move& move) {
  check_types(move);
  check_grid(move.grid);
  const Extent base = extent_of(move.base, move.base_bytes);
  const std::size_t widest = std::max(size_of(move.from), size_of(move.to));
  std::vector<Extent> written;
  written.reserve(move.pieces.size());
  for (const Piece& piece : move.pieces) {
    if (piece.count == 0 || piece.count > std::numeric_limits<std::size_t>::max() / widest) {
      refuse("a piece of " + std::to_string(piece.count) + " elements");
    }
    if (piece.far == nullptr || move.base == nullptr) refuse("a piece without memory");
    const std::size_t near = near_bytes(move, piece);
    if (near > move.base_bytes || piece.offset > move.base_bytes - near) {
      refuse("a piece of " + std::to_string(near) + " bytes at " + std::to_string(piece.offset) +
             " is not inside a range of " + std::to_string(move.base_bytes) + " bytes");
    }
    const Extent far = extent_of(piece.far, far_bytes(move, piece));
    if (meet(far, base)) refuse("a piece overlaps the range that it is moved to or from");
    written.push_back(move.way == Way::gather ? extent_of(move.base + piece.offset, near) : far);
  }
  if (any_overlap(written)) refuse("two destinations of a move overlap");
}

void run(const Move& move) {
  const bool gathers = move.way == Way::gather;
  const Lane alone{0, 1};
  if (!changes(move)) {
    each_tile(move, [&](const Piece& piece, std::uint32_t tile) {
      copy_tile(piece, tile, move.base, gathers, alone);
    });
    return;
  }
  std::uint64_t found = 0;
  with_types(move, [&]<class From, class To>() {
    each_tile(move, [&](const Piece& piece, std::uint32_t tile) {
      found += change_tile<From, To>(piece, tile, move.base, gathers, move.change, alone);
    });
  });
  if (move.change.counts) {
    std::fill_n(move.counts, move.grid.blocks, std::uint64_t{0});
    move.counts[0] = found;
  }
}

Move from_copy(const Move& move, std::byte* sources) {
  Move moved = move;
  std::uint64_t at = 0;
  if (move.way == Way::scatter) moved.base = sources;
  for (Piece& piece : moved.pieces) {
    if (move.way == Way::scatter) {
      piece.offset = at;
      at += near_bytes(move, piece);
    } else {
      piece.far = sources + at;
      at += far_bytes(move, piece);
    }
  }
  return moved;
}

std::vector<Access> accesses_of(const Move& move) {
  std::vector<Access> accesses;
  const bool gathers = move.way == Way::gather;
  const auto add = [&](std::byte* data, std::size_t bytes, bool writes) {
    if (!accesses.empty()) {
      Access& last = accesses.back();
      if (last.writes == writes && static_cast<std::byte*>(last.data) + last.bytes == data) {
        last.bytes += bytes;
        return;
      }
    }
    accesses.push_back({data, bytes, writes});
  };
  for (const Piece& piece : move.pieces) add(piece.far, far_bytes(move, piece), !gathers);
  for (const Piece& piece : move.pieces) {
    add(move.base + piece.offset, near_bytes(move, piece), gathers);
  }
  if (move.change.counts) {
    accesses.push_back({move.counts, move.grid.blocks * sizeof(std::uint64_t), true});
  }
  return accesses;
}

}  // namespace streamlap::moves
