// One move: many tensors into one range of memory, or out of it, perhaps changed on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "moves/strided.h"
#include "moves/tiles.h"

namespace streamlap::moves {

// What can be cast into each other.
inline constexpr Element changeable[] = {Element::float32, Element::float16, Element::bfloat16};

// A checksum moves nothing: it reads the pieces, whose offsets are their places in what is summed.
enum class Way { gather, scatter, checksum };

// How many blocks of how many threads run it where a kernel does. A few blocks are enough for the
// link to the host.
struct Grid {
  unsigned blocks = 4;
  unsigned threads = 512;  // a multiple of 32, at most most_threads
};

constexpr unsigned most_blocks = 1024;
constexpr unsigned most_threads = 512;  // so that each has the registers for its reads in flight

struct Move {
  Way way = Way::gather;
  Element from = Element::bytes;
  Element to = Element::bytes;
  Change change;
  // The one range: of page-locked or device memory, on the stream's device.
  std::byte* base = nullptr;
  std::size_t base_bytes = 0;
  std::vector<Piece> pieces;
  std::uint32_t tiles = 0;
  // How the far side of the only piece lies, where it is not one range.
  std::optional<Layout> layout = std::nullopt;
  // Where change.counts: one number for each of grid.blocks, whose sum is the count of non-finite
  // elements. In page-locked memory; all are written.
  // Of a checksum: the parts of the sum.
  std::uint64_t* counts = nullptr;
  Grid grid;

  bool tells() const noexcept { return change.counts || way == Way::checksum; }
};
using MovePtr = std::shared_ptr<const Move>;

// Bytes of one element; 1 for `bytes`.
constexpr std::size_t size_of(Element element) {
  return element == Element::bytes ? 1 : element == Element::float32 ? 4 : 2;
}
const char* name_of(Element element);

// Its one piece as the bodies take it, with as few dimensions as say the same; `base` in place of
// the move's own.
Strides strides_of(const Move& move, std::byte* base);

// Calls body.operator()<From, To>() for the two types of a move with a layout: numbers of the
// elements' size where they are not changed.
template <class Body>
decltype(auto) with_strided_types(const Move& move, Body&& body);

// Calls body.operator()<From, To>() for the two types of a move that changes elements.
template <class Body>
decltype(auto) with_types(const Move& move, Body&& body) {
  const auto to = [&]<class From>() -> decltype(auto) {
    switch (move.to) {
      case Element::float32:
        return body.template operator()<From, Float32>();
      case Element::float16:
        return body.template operator()<From, Float16>();
      case Element::bfloat16:
        return body.template operator()<From, BFloat16>();
      case Element::bytes:
        break;
    }
    throw Error(ErrorKind::invalid_argument, "bytes are not changed on the way");
  };
  switch (move.from) {
    case Element::float32:
      return to.template operator()<Float32>();
    case Element::float16:
      return to.template operator()<Float16>();
    case Element::bfloat16:
      return to.template operator()<BFloat16>();
    case Element::bytes:
      break;
  }
  throw Error(ErrorKind::invalid_argument, "bytes are not changed on the way");
}

template <class Body>
decltype(auto) with_strided_types(const Move& move, Body&& body) {
  if (move.from != Element::bytes) return with_types(move, body);
  switch (move.layout->element_bytes) {
    case 1:
      return body.template operator()<Raw<std::uint8_t>, Raw<std::uint8_t>>();
    case 2:
      return body.template operator()<Raw<std::uint16_t>, Raw<std::uint16_t>>();
    case 4:
      return body.template operator()<Raw<std::uint32_t>, Raw<std::uint32_t>>();
    case 8:
      return body.template operator()<Raw<std::uint64_t>, Raw<std::uint64_t>>();
    case 16:
      return body.template operator()<Raw<Quad>, Raw<Quad>>();
    default:
      break;
  }
  throw Error(ErrorKind::invalid_argument,
              "elements of a strided move have 1, 2, 4, 8 or 16 bytes");
}

// Numbers the tiles of the pieces. Throws Error(invalid_argument) for more than can be numbered.
void number_tiles(Move& move);

// Throws Error(invalid_argument) for what no kernel may be given: a cast that there is not, a piece
// without memory or beyond its range, sizes that overflow, destinations that overlap each other or
// a source, a grid that cannot be launched. Every runtime relies on it having been asked.
void check(const Move& move);

// Does it, in this thread.
void run(const Move& move);

// The same with sources of its own: what they hold now, which is copied to `own`.
Move with_own_sources(const Move& move, std::vector<std::byte>& own);

// Addresses, or offsets.
struct Extent {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};
// Whether two of these share a byte; sorts them.
bool any_overlap(std::vector<Extent>& extents);

struct Access {
  void* data;
  std::size_t bytes;
  bool writes;
};
// What it reads and writes; neighbours are one access. Reads that are too many to be told one by
// one are one from the first byte to the last.
std::vector<Access> accesses_of(const Move& move);

}  // namespace streamlap::moves
