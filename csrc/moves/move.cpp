#include "moves/move.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>

namespace streamlap::moves {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::invalid_argument, why); }

bool changes(const Move& move) {
  return move.from != move.to || move.change.scales || move.change.counts;
}

std::size_t far_bytes(const Move& move, const Piece& piece) {
  return piece.count * size_of(move.way == Way::gather ? move.from : move.to);
}

// Bytes of one element on the far side.
std::size_t far_size(const Move& move) {
  if (move.from == Element::bytes) return move.layout ? move.layout->element_bytes : 1;
  return size_of(move.way == Way::gather ? move.from : move.to);
}

std::size_t near_bytes(const Move& move, const Piece& piece) {
  return piece.count * size_of(move.way == Way::gather ? move.to : move.from);
}

// From the first byte of the far side to the last.
Extent far_extent(const Move& move, const Piece& piece);

Extent extent_of(const void* begin, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  if (bytes > std::numeric_limits<std::uintptr_t>::max() - first) refuse("a range that wraps");
  return {first, first + bytes};
}

Extent far_extent(const Move& move, const Piece& piece) {
  if (!move.layout) return extent_of(piece.far, far_bytes(move, piece));
  const Layout& layout = *move.layout;
  const auto begin = reinterpret_cast<std::uintptr_t>(piece.far);
  Extent extent{begin, begin + far_size(move)};
  for (unsigned dim = 0; dim < layout.dims; ++dim) {
    if (layout.sizes[dim] == 0) continue;
    const auto steps = static_cast<std::int64_t>(layout.sizes[dim] - 1);
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(steps, layout.strides[dim], &reach))
      refuse("a layout that overflows");
    std::uintptr_t& edge = reach < 0 ? extent.begin : extent.end;
    const std::uintptr_t moved = edge + static_cast<std::uintptr_t>(reach);
    if (reach < 0 ? moved > edge : moved < edge) refuse("a layout that overflows");
    edge = moved;
  }
  return extent;
}

// The dimensions by how close together they are, the closest first.
std::vector<unsigned> by_stride(const Layout& layout) {
  std::vector<unsigned> dims;
  for (unsigned dim = 0; dim < layout.dims; ++dim) {
    if (layout.sizes[dim] != 1) dims.push_back(dim);
  }
  std::stable_sort(dims.begin(), dims.end(), [&](unsigned a, unsigned b) {
    return std::abs(layout.strides[a]) < std::abs(layout.strides[b]);
  });
  return dims;
}

// Calls body(data, bytes) for each run of bytes of the far side.
template <class Body>
void each_run(const Move& move, Body&& body) {
  const Layout& layout = *move.layout;
  const Extent extent = far_extent(move, move.pieces[0]);
  std::size_t run = far_size(move);
  std::vector<unsigned> apart;
  std::uint64_t runs = 1;
  for (unsigned dim : by_stride(layout)) {
    const std::int64_t stride = std::abs(layout.strides[dim]);
    if (stride == 0) continue;
    if (apart.empty() && stride == static_cast<std::int64_t>(run)) {
      run *= layout.sizes[dim];
    } else {
      apart.push_back(dim);
      runs *= layout.sizes[dim];
    }
  }
  constexpr std::uint64_t most_runs = 1 << 14;
  if (move.way == Way::gather && runs > most_runs) {
    body(reinterpret_cast<std::byte*>(extent.begin), extent.end - extent.begin);
    return;
  }
  // From the lowest address of all: strides count upwards from there.
  for (std::uint64_t number = 0; number < runs; ++number) {
    std::uint64_t left = number;
    std::uintptr_t at = extent.begin;
    for (unsigned dim : apart) {
      at += left % layout.sizes[dim] * static_cast<std::uint64_t>(std::abs(layout.strides[dim]));
      left /= layout.sizes[dim];
    }
    body(reinterpret_cast<std::byte*>(at), run);
  }
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
  if (move.tells() && move.counts == nullptr) refuse("a count without a place for it");
}

void check_layout(const Move& move) {
  const Layout& layout = *move.layout;
  if (move.pieces.size() != 1 || move.pieces[0].count == 0) {
    refuse("a move with a layout has one piece");
  }
  if (layout.dims > most_dims)
    refuse("a layout has at most " + std::to_string(most_dims) + " dimensions");
  const std::size_t element = layout.element_bytes;
  const bool raw = move.from == Element::bytes;
  if (raw && (element == 0 || element > 16 || (element & (element - 1)) != 0)) {
    refuse("elements of a strided move have 1, 2, 4, 8 or 16 bytes");
  }
  std::uint64_t count = 1;
  for (unsigned dim = 0; dim < layout.dims; ++dim) {
    if (__builtin_mul_overflow(count, layout.sizes[dim], &count)) refuse("a layout that overflows");
    if (layout.strides[dim] % static_cast<std::int64_t>(far_size(move)) != 0) {
      refuse("strides of a layout are multiples of the element's size");
    }
  }
  const Piece& piece = move.pieces[0];
  std::uint64_t counted = piece.count;
  if (raw && counted % element != 0) refuse("a piece of broken elements");
  if (raw) counted /= element;
  if (count != counted)
    refuse("a layout of " + std::to_string(count) + " elements for a piece of " +
           std::to_string(counted));
  const std::size_t near = raw ? element : near_bytes(move, piece) / piece.count;
  if (misalignment(piece.far, static_cast<unsigned>(far_size(move))) != 0 ||
      misalignment(move.base + piece.offset, static_cast<unsigned>(near)) != 0) {
    refuse("elements of a strided move that are not aligned to their size");
  }
  if (move.way == Way::gather) return;
  std::uint64_t reach = 0;
  for (unsigned dim : by_stride(layout)) {
    const auto stride = static_cast<std::uint64_t>(std::abs(layout.strides[dim]));
    if (stride < reach + far_size(move)) refuse("two destinations of a move overlap");
    reach += (layout.sizes[dim] - 1) * stride;
  }
}

void check_checksum(const Move& move) {
  if (move.from != Element::bytes || move.layout) refuse("a checksum is one of bytes in ranges");
  for (const Piece& piece : move.pieces) {
    if (piece.far == nullptr || piece.count == 0) refuse("a piece without memory");
    extent_of(piece.far, piece.count);
    if (piece.offset % 8 != 0) refuse("places in a checksum are multiples of 8");
  }
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

void tell(const Move& move, std::uint64_t found) {
  if (!move.tells()) return;
  std::fill_n(move.counts, move.grid.blocks, std::uint64_t{0});
  move.counts[0] = found;
}

template <class From, class To>
std::uint64_t run_strided(const Move& move, const Strides& strides) {
  const bool gathers = move.way == Way::gather;
  const Lane alone{0, 1};
  std::uint64_t found = 0;
  Stage<typename To::Bits> stage;
  for (std::uint64_t tile = 0; tile < strides.tiles; ++tile) {
    if (strides.rows == 0) {
      found += move_elements<From, To>(strides, tile, gathers, move.change, alone);
    } else {
      const Panel part = panel_of(strides, tile, stage.columns);
      found += fill_stage<From, To>(strides, part, gathers, move.change, stage, alone);
      empty_stage<To>(strides, part, gathers, stage, alone);
    }
  }
  return found;
}

}  // namespace

Strides strides_of(const Move& move, std::byte* base) {
  const Piece& piece = move.pieces.front();
  Strides made;
  made.far = piece.far;
  made.near = base + piece.offset;
  made.layout.element_bytes = move.layout->element_bytes;
  made.count = 1;
  Layout& layout = made.layout;
  // From the innermost: what continues the dimension within is one with it.
  std::vector<std::pair<std::uint64_t, std::int64_t>> dims;
  for (unsigned dim = move.layout->dims; dim-- > 0;) {
    const std::uint64_t size = move.layout->sizes[dim];
    const std::int64_t stride = move.layout->strides[dim];
    made.count *= size;
    if (size == 1) continue;
    if (!dims.empty() &&
        stride == dims.back().second * static_cast<std::int64_t>(dims.back().first)) {
      dims.back().first *= size;
    } else {
      dims.emplace_back(size, stride);
    }
  }
  if (dims.empty()) dims.emplace_back(1, 0);
  layout.dims = static_cast<std::uint32_t>(dims.size());
  const unsigned last = layout.dims - 1;
  for (unsigned dim = 0; dim < layout.dims; ++dim) {
    std::tie(layout.sizes[dim], layout.strides[dim]) = dims[last - dim];
  }
  made.fast = last;
  for (unsigned dim = 0; dim < layout.dims; ++dim) {
    const std::int64_t stride = std::abs(layout.strides[dim]);
    if (stride != 0 && stride < std::abs(layout.strides[made.fast])) made.fast = dim;
  }
  // A panel that is a sliver is no help.
  constexpr std::uint64_t least = 4;
  if (made.fast == last || layout.sizes[made.fast] < least || layout.sizes[last] < least) {
    made.tiles = (made.count + strided_tile - 1) / strided_tile;
    return made;
  }
  const std::size_t element =
      move.from == Element::bytes ? layout.element_bytes : size_of(move.to);  // as the stage has it
  const std::uint64_t across = panel_columns(element);
  made.rows = (layout.sizes[made.fast] + panel_rows - 1) / panel_rows;
  made.columns = (layout.sizes[last] + across - 1) / across;
  made.near_step = 1;
  for (unsigned dim = made.fast + 1; dim <= last; ++dim) made.near_step *= layout.sizes[dim];
  made.tiles = made.count / layout.sizes[made.fast] / layout.sizes[last] * made.rows * made.columns;
  return made;
}

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
  if (move.layout) check_layout(move);
  if (move.way == Way::checksum) {
    check_checksum(move);
    return;
  }
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
    const Extent far = far_extent(move, piece);
    if (meet(far, base)) refuse("a piece overlaps the range that it is moved to or from");
    written.push_back(move.way == Way::gather ? extent_of(move.base + piece.offset, near) : far);
  }
  if (any_overlap(written)) refuse("two destinations of a move overlap");
}

void run(const Move& move) {
  const bool gathers = move.way == Way::gather;
  const Lane alone{0, 1};
  if (move.way == Way::checksum) {
    std::uint64_t sum = 0;
    each_tile(move,
              [&](const Piece& piece, std::uint32_t tile) { sum += sum_tile(piece, tile, alone); });
    tell(move, sum);
    return;
  }
  if (move.layout) {
    const Strides strides = strides_of(move, move.base);
    const std::uint64_t seen = with_strided_types(
        move, [&]<class From, class To>() { return run_strided<From, To>(move, strides); });
    tell(move, seen);
    return;
  }
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
  tell(move, found);
}

Move with_own_sources(const Move& move, std::vector<std::byte>& own) {
  Move moved = move;
  // Of a layout all that lies between its elements, too.
  std::size_t bytes = 0;
  std::vector<Extent> sources;
  for (const Piece& piece : move.pieces) {
    sources.push_back(move.way == Way::scatter
                          ? extent_of(move.base + piece.offset, near_bytes(move, piece))
                          : far_extent(move, piece));
    bytes += sources.back().end - sources.back().begin;
  }
  own.resize(bytes);
  std::size_t at = 0;
  if (move.way == Way::scatter) moved.base = own.data();
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::size_t here = sources[i].end - sources[i].begin;
    std::memcpy(own.data() + at, reinterpret_cast<const void*>(sources[i].begin), here);
    if (move.way == Way::scatter) {
      moved.pieces[i].offset = at;
    } else {
      const auto far = reinterpret_cast<std::uintptr_t>(move.pieces[i].far);
      moved.pieces[i].far = own.data() + at + (far - sources[i].begin);
    }
    at += here;
  }
  return moved;
}

std::vector<Access> accesses_of(const Move& move) {
  std::vector<Access> accesses;
  const bool gathers = move.way != Way::scatter;
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
  for (const Piece& piece : move.pieces) {
    if (move.layout) {
      each_run(move, [&](std::byte* data, std::size_t bytes) { add(data, bytes, !gathers); });
    } else {
      add(piece.far, far_bytes(move, piece), !gathers);
    }
  }
  if (move.way == Way::checksum) {
    accesses.push_back({move.counts, move.grid.blocks * sizeof(std::uint64_t), true});
    return accesses;
  }
  for (const Piece& piece : move.pieces) {
    add(move.base + piece.offset, near_bytes(move, piece), gathers);
  }
  if (move.tells()) {
    accesses.push_back({move.counts, move.grid.blocks * sizeof(std::uint64_t), true});
  }
  return accesses;
}

}  // namespace streamlap::moves
