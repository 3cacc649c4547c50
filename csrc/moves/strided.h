// A tensor whose elements lie apart on the far side of a move, in any order; on the near side they
// are one after the other. The body of the kernel and of the worker threads.
//
// Where the far side has another dimension closest together than the near side, as a transpose has,
// panels go through a stage, the block's shared memory: both sides are then read and written along
// their own closest dimension. A panel is 32 elements of the far side's by 512 bytes of the near
// side's, which may be memory of the host: the link carries long writes best.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "moves/elements.h"
#include "moves/on_both.h"
#include "moves/ranges.h"

namespace streamlap::moves {

inline constexpr unsigned most_dims = 8;
inline constexpr unsigned panel_rows = 32;
inline constexpr unsigned panel_bytes = 512;
// Elements of so many bytes that a panel has along the near side.
constexpr unsigned panel_columns(std::size_t element) {
  return panel_bytes / static_cast<unsigned>(element);
}

// Dimensions from the outermost to the innermost as the near side has them.
struct Layout {
  std::uint32_t dims = 0;
  std::uint32_t element_bytes = 0;  // 1, 2, 4, 8 or 16
  std::uint64_t sizes[most_dims] = {};
  std::int64_t strides[most_dims] = {};  // of the far side, in bytes; 0 repeats, negative reverses
};

// Elements that are not changed, as numbers of their size.
template <class BitsType>
struct Raw {
  using Bits = BitsType;
};

// What a strided move is, worked out once for all blocks.
struct Strides {
  std::byte* far = nullptr;
  std::byte* near = nullptr;
  Layout layout;
  std::uint64_t count = 0;  // elements
  std::uint64_t tiles = 0;
  std::uint64_t rows = 0;       // panels along `fast`; 0: elements go one by one, without a stage
  std::uint64_t columns = 0;    // panels along the innermost dimension
  std::uint32_t fast = 0;       // the dimension in which the far side is closest together
  std::uint64_t near_step = 0;  // elements of the near side from one of `fast` to the next
};

// Elements that a block takes at once where no stage is needed.
inline constexpr std::uint64_t strided_tile = 4096;

template <class Bits>
struct Stage {
  static constexpr unsigned columns = panel_columns(sizeof(Bits));
  Bits cells[panel_rows][columns + 1];  // one more, so that a column is in different banks
};

template <class From, class To>
STREAMLAP_ON_BOTH typename To::Bits made_of(typename From::Bits bits, const Change& change) {
  if constexpr (std::is_same_v<From, Raw<typename From::Bits>>) {
    return bits;
  } else {
    return changed<From, To>(bits, change);
  }
}

template <class From>
STREAMLAP_ON_BOTH unsigned counted(typename From::Bits bits, const Change& change) {
  if constexpr (std::is_same_v<From, Raw<typename From::Bits>>) {
    return 0;
  } else {
    return change.counts ? is_nonfinite<From>(bits) : 0;
  }
}

// Where element `index` of the near side lies on the far side, in bytes from its begin.
STREAMLAP_ON_BOTH std::int64_t far_offset(const Layout& layout, std::uint64_t index) {
  std::int64_t offset = 0;
  for (unsigned dim = layout.dims; dim-- > 0;) {
    const std::uint64_t size = layout.sizes[dim];
    std::uint64_t whole;
    std::uint64_t at;
    if ((index | size) >> 32 == 0) {  // a division of half the width is several times as fast
      const auto small = static_cast<std::uint32_t>(index);
      whole = small / static_cast<std::uint32_t>(size);
      at = small % static_cast<std::uint32_t>(size);
    } else {
      whole = index / size;
      at = index % size;
    }
    offset += static_cast<std::int64_t>(at) * layout.strides[dim];
    index = whole;
  }
  return offset;
}

// One tile without a stage. The number of non-finite elements that this lane has seen.
template <class From, class To>
STREAMLAP_ON_BOTH std::uint64_t move_elements(const Strides& strides, std::uint64_t tile,
                                              bool gathers, const Change& change, Lane lane) {
  using In = typename From::Bits;
  using Out = typename To::Bits;
  std::uint64_t found = 0;
  const std::uint64_t begin = tile * strided_tile;
  const std::uint64_t left = strides.count - begin;
  const std::uint64_t end = begin + (left < strided_tile ? left : strided_tile);
  for (std::uint64_t at = begin + lane.index; at < end; at += lane.count) {
    std::byte* far = strides.far + far_offset(strides.layout, at);
    if (gathers) {
      const In bits = loaded<In>(far);
      found += counted<From>(bits, change);
      store<Out>(strides.near + at * sizeof(Out), made_of<From, To>(bits, change));
    } else {
      const In bits = loaded<In>(strides.near + at * sizeof(In));
      found += counted<From>(bits, change);
      store<Out>(far, made_of<From, To>(bits, change));
    }
  }
  return found;
}

// A panel of the two dimensions: where it begins on both sides, and how much of it there is.
struct Panel {
  std::byte* far;
  std::uint64_t near;      // element
  std::int64_t far_step;   // bytes from one of the innermost dimension to the next
  std::int64_t fast_step;  // bytes from one of the fast dimension to the next
  unsigned rows;           // of the fast dimension
  unsigned columns;        // of the innermost
};

// `most_columns`: those of the stage.
STREAMLAP_ON_BOTH Panel panel_of(const Strides& strides, std::uint64_t tile,
                                 unsigned most_columns) {
  const Layout& layout = strides.layout;
  const unsigned last = layout.dims - 1;
  const std::uint64_t column = tile % strides.columns * most_columns;
  tile /= strides.columns;
  const std::uint64_t row = tile % strides.rows * panel_rows;
  tile /= strides.rows;
  const std::uint64_t columns = layout.sizes[last] - column;
  const std::uint64_t rows = layout.sizes[strides.fast] - row;
  Panel made;
  made.far_step = layout.strides[last];
  made.fast_step = layout.strides[strides.fast];
  made.columns = static_cast<unsigned>(columns < most_columns ? columns : most_columns);
  made.rows = static_cast<unsigned>(rows < panel_rows ? rows : panel_rows);
  std::int64_t offset = static_cast<std::int64_t>(column) * made.far_step +
                        static_cast<std::int64_t>(row) * made.fast_step;
  made.near = row * strides.near_step + column;
  std::uint64_t step = layout.sizes[last];
  for (unsigned dim = last; dim-- > 0;) {  // what is left of the number is of the other dimensions
    if (dim != strides.fast) {
      const std::uint64_t at = tile % layout.sizes[dim];
      tile /= layout.sizes[dim];
      offset += static_cast<std::int64_t>(at) * layout.strides[dim];
      made.near += at * step;
    }
    step *= layout.sizes[dim];
  }
  made.far = strides.far + offset;
  return made;
}

// The first half: into the stage, along the closest dimension of the source. Then all lanes wait
// for each other.
template <class From, class To>
STREAMLAP_ON_BOTH std::uint64_t fill_stage(const Strides& strides, const Panel& part, bool gathers,
                                           const Change& change, Stage<typename To::Bits>& stage,
                                           Lane lane) {
  using In = typename From::Bits;
  const unsigned cells = gathers ? panel_rows * part.columns : part.rows * part.columns;
  // Changing elements takes registers, too.
  constexpr bool is_raw = std::is_same_v<From, Raw<In>>;
  constexpr unsigned under_way = is_raw && sizeof(In) <= 8 ? 2 * in_flight : in_flight;
  std::uint64_t found = 0;
  for (unsigned first = lane.index; first < cells; first += under_way * lane.count) {
    In held[under_way] = {};
    STREAMLAP_UNROLL
    for (unsigned k = 0; k < under_way; ++k) {
      const unsigned cell = first + k * lane.count;
      const unsigned row = gathers ? cell % panel_rows : cell / part.columns;
      const unsigned column = gathers ? cell / panel_rows : cell % part.columns;
      if (cell >= cells || row >= part.rows) continue;
      const std::byte* at =
          gathers ? part.far + row * part.fast_step + column * part.far_step
                  : strides.near + (part.near + row * strides.near_step + column) * sizeof(In);
      held[k] = loaded<In>(at);
    }
    STREAMLAP_UNROLL
    for (unsigned k = 0; k < under_way; ++k) {
      const unsigned cell = first + k * lane.count;
      const unsigned row = gathers ? cell % panel_rows : cell / part.columns;
      const unsigned column = gathers ? cell / panel_rows : cell % part.columns;
      if (cell >= cells || row >= part.rows) continue;
      found += counted<From>(held[k], change);
      stage.cells[row][column] = made_of<From, To>(held[k], change);
    }
  }
  return found;
}

// 16 bytes of a stage's row.
template <class Bits>
STREAMLAP_ON_BOTH Quad quad_of(const Bits* cells) {
  alignas(16) Bits values[16 / sizeof(Bits)];
  STREAMLAP_UNROLL
  for (unsigned i = 0; i < 16 / sizeof(Bits); ++i) values[i] = cells[i];
  Quad quad;
  memcpy(&quad, values, sizeof(Quad));
  return quad;
}

// The second half: out of it, along the closest dimension of the destination. Then they wait again.
template <class To>
STREAMLAP_ON_BOTH void empty_stage(const Strides& strides, const Panel& part, bool gathers,
                                   const Stage<typename To::Bits>& stage, Lane lane) {
  using Out = typename To::Bits;
  if (!gathers) {
    for (unsigned cell = lane.index; cell < panel_rows * part.columns; cell += lane.count) {
      const unsigned row = cell % panel_rows;
      const unsigned column = cell / panel_rows;
      if (row >= part.rows) continue;
      store<Out>(part.far + row * part.fast_step + column * part.far_step,
                 stage.cells[row][column]);
    }
    return;
  }
  // Each row in as many pieces as a warp has lanes: 16 bytes each from the first address that 16
  // divides. What lies before that, and what is left at the end, falls to the last piece.
  constexpr unsigned wide = 16 / sizeof(Out);
  constexpr unsigned pieces = panel_bytes / 16;
  for (unsigned cell = lane.index; cell < part.rows * pieces; cell += lane.count) {
    const unsigned row = cell / pieces;
    const unsigned piece = cell % pieces;
    const Out* cells = stage.cells[row];
    std::byte* begin = strides.near + (part.near + row * strides.near_step) * sizeof(Out);
    const auto one_by_one = [&](unsigned from, unsigned to) {
      for (unsigned i = from; i < to; ++i) store<Out>(begin + i * sizeof(Out), cells[i]);
    };
    const unsigned odd = (16 - misalignment(begin, 16)) % 16 / sizeof(Out);
    const unsigned before = odd < part.columns ? odd : part.columns;
    const unsigned first = before + piece * wide;
    if (first + wide <= part.columns) {
      store<Quad>(begin + first * sizeof(Out), quad_of(cells + first));
    } else {
      one_by_one(first, part.columns);
    }
    if (piece == pieces - 1) one_by_one(0, before);
  }
}

}  // namespace streamlap::moves
