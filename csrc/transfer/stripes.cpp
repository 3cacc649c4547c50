#include "transfer/stripes.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

namespace streamlap {
namespace {

using moves::Move;
using moves::Piece;

// Where each stripe but the last ends, in bytes. While the first is on the wire, for 38 us, the
// second is told to the device; each is packed at least four times as fast as it is sent.
constexpr std::array<std::size_t, 3> ends = {2 << 20, 10 << 20, 42 << 20};
// Less is one stripe: the second would cost what it hides.
constexpr std::size_t least_bytes = 4 << 20;
// Elements from one place where a piece is cut to the next: whole lines of memory on both sides.
constexpr std::size_t grain = 4096;

std::size_t near_bytes(const Move& move, std::size_t count) {
  return count * moves::size_of(move.to);
}

// The same move without its pieces.
Move shell_of(const Move& move) {
  Move shell;
  shell.way = move.way;
  shell.from = move.from;
  shell.to = move.to;
  shell.change = move.change;
  shell.base = move.base;
  shell.base_bytes = move.base_bytes;
  shell.layout = move.layout;
  shell.grid = move.grid;
  return shell;
}

void add(Stripes& stripes, Move&& part, std::byte* host) {
  const Piece& first = part.pieces.front();
  const Piece& last = part.pieces.back();
  const std::size_t end = last.offset + near_bytes(part, last.count);
  stripes.landings.push_back({host + first.offset, part.base + first.offset, end - first.offset});
  moves::number_tiles(part);
  stripes.moves.push_back(std::make_shared<const Move>(std::move(part)));
}

// Elements [begin, end) of a piece.
Piece slice(const Move& move, const Piece& piece, std::size_t begin, std::size_t end) {
  Piece part = piece;
  part.far += begin * moves::size_of(move.from);
  part.offset += near_bytes(move, begin);
  part.count = end - begin;
  return part;
}

// Where a stripe ends that should have `wanted` elements of `count`.
std::size_t cut_at(std::size_t wanted, std::size_t count, std::size_t multiple) {
  const std::size_t at = (wanted + multiple - 1) / multiple * multiple;
  return std::min(at, count);
}

void cut_pieces(Stripes& stripes, const Move& move, std::byte* host) {
  std::size_t passed = 0;  // bytes of the stripes so far
  std::size_t next = 0;    // of `ends`
  Move part = shell_of(move);
  for (const Piece& piece : move.pieces) {
    for (std::size_t at = 0; at < piece.count;) {
      std::size_t to = piece.count;
      if (next < ends.size()) {
        const std::size_t left = ends[next] - std::min(ends[next], passed);
        const std::size_t wanted = left / moves::size_of(move.to);
        to = at + cut_at(std::max<std::size_t>(wanted, 1), piece.count - at, grain);
      }
      part.pieces.push_back(slice(move, piece, at, to));
      passed += near_bytes(move, to - at);
      at = to;
      if (next < ends.size() && passed >= ends[next]) {
        ++next;
        add(stripes, std::exchange(part, shell_of(move)), host);
      }
    }
  }
  if (!part.pieces.empty()) add(stripes, std::move(part), host);
}

// Along the outermost dimension.
void cut_layout(Stripes& stripes, const Move& move, std::byte* host) {
  const std::uint64_t rows = move.layout->sizes[0];
  const std::size_t each = move.pieces.front().count / rows;  // elements, of bytes: bytes
  // Whole panels, if there are so many.
  const std::uint64_t whole = rows < 16 * moves::panel_rows ? 1 : moves::panel_rows;
  std::uint64_t at = 0;
  for (std::size_t stripe = 0; stripe <= ends.size() && at < rows; ++stripe) {
    const bool last = stripe == ends.size();
    const std::uint64_t wanted = last ? rows : ends[stripe] / near_bytes(move, each);
    const std::uint64_t to = cut_at(std::max(wanted, at + 1), rows, whole);
    Move part = shell_of(move);
    part.layout->sizes[0] = to - at;
    Piece piece = move.pieces.front();
    piece.far += static_cast<std::int64_t>(at) * move.layout->strides[0];
    piece.offset += near_bytes(move, at * each);
    piece.count = (to - at) * each;
    part.pieces.push_back(piece);
    add(stripes, std::move(part), host);
    at = to;
  }
}

}  // namespace

Stripes stripes_of(const moves::Move& gather, std::byte* host, unsigned blocks) {
  Stripes stripes;
  Move whole = gather;
  whole.grid.blocks = blocks;
  std::sort(whole.pieces.begin(), whole.pieces.end(),
            [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  std::size_t bytes = 0;
  for (const Piece& piece : gather.pieces) bytes += near_bytes(gather, piece.count);
  if (bytes < least_bytes) {
    add(stripes, std::move(whole), host);
  } else if (gather.layout && gather.layout->dims > 0) {
    cut_layout(stripes, whole, host);
  } else {
    cut_pieces(stripes, whole, host);
  }
  return stripes;
}

}  // namespace streamlap
