// Moves: the elements bit by bit, the body that kernels and workers share lane by lane, plans, and
// the same programs on every runtime.
#include "moves/move.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "lab.h"
#include "transfer/copy_engine.h"
#include "transfer/tree_plan.h"

using namespace streamlap;
using namespace streamlap::testing;
using moves::BFloat16;
using moves::Change;
using moves::Element;
using moves::Float16;
using moves::Float32;
using moves::Lane;
using moves::Move;
using moves::Way;

namespace {

using Bytes = std::vector<std::byte>;
constexpr std::byte untouched{poison};

// ---- a reference that rounds by looking for the nearest of all values

template <class Small>
double value_of(std::uint16_t bits);
template <>
double value_of<Float16>(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double fraction = bits & 1023;
  const double size =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -size : size;
}
template <>
double value_of<BFloat16>(std::uint16_t bits) {
  const int exponent = bits >> 7 & 255;
  const double fraction = bits & 127;
  const double size =
      exponent == 0 ? std::ldexp(fraction, -133) : std::ldexp(128 + fraction, exponent - 134);
  return bits & 0x8000 ? -size : size;
}

template <class Small>
std::uint16_t nearest(float value) {
  const double size = std::fabs(static_cast<double>(value));
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  // Positive values rise with their bits; infinity stands for the next power of two.
  std::uint16_t low = 0;
  std::uint16_t high = Small::exponent;
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (value_of<Small>(middle) <= size ? low : high) = middle;
  }
  const double below = size - value_of<Small>(low);
  const double above = value_of<Small>(high) - size;
  const bool up = above < below || (above == below && low % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? high : low));
}

bool is_nan(std::uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

// Every upper half with lower halves around each place where rounding changes.
template <class Body>
void each_float(Body&& body) {
  std::vector<std::uint32_t> lower = {0, 1, 2, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};
  for (std::uint32_t step = 0; step < 0x10000; step += 0x1000) {
    for (std::uint32_t off : {0u, 1u, 0xfffu}) lower.push_back(step + off);
  }
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (std::uint32_t low : lower) body(upper << 16 | low);
  }
}

template <class Small>
void check_narrowing(std::uint16_t payload_mask, int shift) {
  std::size_t wrong = 0;
  each_float([&](std::uint32_t bits) {
    const std::uint16_t got = Small::narrowed(bits);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    std::uint16_t expected;
    if (is_nan(bits)) {
      const auto payload = static_cast<std::uint16_t>(bits >> shift & payload_mask);
      expected = static_cast<std::uint16_t>(sign | Small::exponent | (payload ? payload : 1));
    } else if ((bits & 0x7fffffff) == 0x7f800000) {
      expected = static_cast<std::uint16_t>(sign | Small::exponent);
    } else {
      expected = nearest<Small>(moves::as_float(bits));
    }
    wrong += got != expected;
  });
  CHECK_EQ(wrong, 0);
}

template <class Small>
void check_widening(std::uint16_t payload_mask, int shift) {
  std::size_t wrong = 0;
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const std::uint32_t got = Small::widened(bits);
    std::uint32_t expected;
    if ((bits & Small::exponent) == Small::exponent) {
      expected = (i & 0x8000) << 16 | 0x7f800000 | std::uint32_t(bits & payload_mask) << shift;
    } else {
      expected = moves::as_bits(static_cast<float>(value_of<Small>(bits)));
    }
    wrong += got != expected;
    wrong += Small::narrowed(got) != bits;  // and back again, NaNs included
  }
  CHECK_EQ(wrong, 0);
}

// ---- bytes

Bytes random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes made(count);
  // Never what untouched memory holds, so that every byte that arrives is seen.
  for (std::byte& byte : made) byte = static_cast<std::byte>(random() % 255);
  for (std::byte& byte : made) {
    if (byte == untouched) byte = std::byte{255};
  }
  return made;
}

// Memory whose begin is `apart` bytes from a multiple of 64.
struct Placed {
  Placed(std::size_t count, unsigned apart, std::byte fill = untouched)
      : all(count + 256, fill), bytes(count) {
    const auto begin = reinterpret_cast<std::uintptr_t>(all.data()) + 64;
    data = reinterpret_cast<std::byte*>((begin + 63) / 64 * 64 + apart);
  }
  bool clean_outside() const {
    for (const std::byte& byte : all) {
      if ((&byte < data || &byte >= data + bytes) && byte != untouched) return false;
    }
    return true;
  }
  Bytes all;
  std::size_t bytes;
  std::byte* data;
};

template <class From, class To>
Bytes reference(const Bytes& source, const Change& change) {
  using In = typename From::Bits;
  using Out = typename To::Bits;
  Bytes made(source.size() / sizeof(In) * sizeof(Out));
  for (std::size_t i = 0; i < source.size() / sizeof(In); ++i) {
    In in;
    std::memcpy(&in, source.data() + i * sizeof(In), sizeof(In));
    std::uint32_t wide = From::widened(in);
    if (change.scales && !is_nan(wide)) {
      const float product = moves::as_float(wide) * change.scale;
      wide = std::isnan(product) ? 0x7fc00000 : moves::as_bits(product);
    }
    const Out out =
        std::is_same_v<From, To> && !change.scales ? static_cast<Out>(in) : To::narrowed(wide);
    std::memcpy(made.data() + i * sizeof(Out), &out, sizeof(Out));
  }
  return made;
}

template <class From>
std::uint64_t nonfinite_in(const Bytes& source) {
  using In = typename From::Bits;
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < source.size() / sizeof(In); ++i) {
    In in;
    std::memcpy(&in, source.data() + i * sizeof(In), sizeof(In));
    found += !std::isfinite(moves::as_float(From::widened(in)));
  }
  return found;
}

// Calls body.operator()<From, To>() for the nine pairs.
template <class Body>
void each_pair(Body&& body) {
  const auto to = [&]<class From>() {
    body.template operator()<From, Float32>();
    body.template operator()<From, Float16>();
    body.template operator()<From, BFloat16>();
  };
  to.template operator()<Float32>();
  to.template operator()<Float16>();
  to.template operator()<BFloat16>();
}

template <class T>
constexpr Element element_of() {
  if (std::is_same_v<T, Float32>) return Element::float32;
  return std::is_same_v<T, Float16> ? Element::float16 : Element::bfloat16;
}

}  // namespace

// ---- elements

TEST(float16_is_rounded_to_the_nearest) { check_narrowing<Float16>(0x3ff, 13); }
TEST(bfloat16_is_rounded_to_the_nearest) { check_narrowing<BFloat16>(0x7f, 16); }
TEST(every_float16_is_widened_and_comes_back) { check_widening<Float16>(0x3ff, 13); }
TEST(every_bfloat16_is_widened_and_comes_back) { check_widening<BFloat16>(0x7f, 16); }

TEST(edges_of_narrowing) {
  const auto half = [](float value) { return Float16::narrowed(moves::as_bits(value)); };
  CHECK_EQ(half(65519.996f), 0x7bff);  // the largest, from below the middle
  CHECK_EQ(half(65520.0f), 0x7c00);    // the middle goes to the even one: infinity
  CHECK_EQ(half(0x1p-25f), 0x0000);    // half of the smallest, to even
  CHECK_EQ(half(0x1.000002p-25f), 0x0001);
  CHECK_EQ(half(-0.0f), 0x8000);
  CHECK_EQ(half(0x1p-149f), 0x0000);
  CHECK_EQ(half(0x1.ff8p-15f), 0x03ff);              // the largest denormal
  CHECK_EQ(half(0x1.ffcp-15f), 0x0400);              // the middle above it: the smallest normal
  CHECK_EQ(BFloat16::narrowed(0x7f7fffff), 0x7f80);  // float32's largest becomes infinity
  CHECK_EQ(BFloat16::narrowed(0x00000001), 0x0000);
  CHECK_EQ(BFloat16::narrowed(0x00008001), 0x0001);
}

TEST(a_nan_keeps_its_sign_and_stays_a_nan) {
  for (std::uint32_t sign : {0u, 0x80000000u}) {
    const auto upper = static_cast<std::uint16_t>(sign >> 16);
    CHECK_EQ(Float16::narrowed(sign | 0x7f800001), upper | 0x7c01);  // nothing of it would be left
    CHECK_EQ(BFloat16::narrowed(sign | 0x7f800001), upper | 0x7f81);
    CHECK_EQ(Float16::narrowed(sign | 0x7fc00000), upper | 0x7e00);
    CHECK_EQ(BFloat16::narrowed(sign | 0x7fffffff), upper | 0x7fff);
    CHECK_EQ(moves::scaled(sign | 0x7f812345, 2.0f), sign | 0x7f812345);
  }
  // One that a product makes is the same everywhere, whatever the processor would say.
  CHECK_EQ(moves::scaled(0x7f800000, 0.0f), 0x7fc00000);
  CHECK_EQ(moves::scaled(0xff800000, 0.0f), 0x7fc00000);
  CHECK_EQ(moves::scaled(moves::as_bits(3.0f), 0.5f), moves::as_bits(1.5f));
}

// ---- the body, lane by lane

TEST(bytes_arrive_at_any_alignment_and_size) {
  for (unsigned to = 0; to < 17; ++to) {
    for (unsigned from = 0; from < 17; ++from) {
      for (std::size_t count = 0; count <= 67; ++count) {
        const Bytes source = random_bytes(count, to * 17 + from);
        Placed src(count, from);
        Placed dst(count, to);
        std::copy(source.begin(), source.end(), src.data);
        moves::copy_range(dst.data, src.data, count, Lane{0, 1});
        if (!std::equal(source.begin(), source.end(), dst.data) || !dst.clean_outside()) {
          CHECK_EQ(std::to_string(count),
                   "bytes from " + std::to_string(from) + " to " + std::to_string(to));
          return;
        }
      }
    }
  }
}

TEST(each_byte_is_written_by_one_lane) {
  for (std::size_t count : {std::size_t{1}, std::size_t{15}, std::size_t{4 * 7 * 16 * 2 + 21}}) {
    for (unsigned lanes : {1u, 3u, 7u, 32u}) {
      for (auto [to, from] :
           {std::pair{0u, 0u}, {8u, 0u}, {3u, 3u}, {1u, 2u}, {4u, 8u}, {2u, 12u}}) {
        Placed src(count, from);
        const Bytes source = random_bytes(count, lanes);
        std::copy(source.begin(), source.end(), src.data);
        std::vector<int> written(count);
        for (unsigned lane = 0; lane < lanes; ++lane) {
          Placed dst(count, to);
          moves::copy_range(dst.data, src.data, count, Lane{lane, lanes});
          for (std::size_t i = 0; i < count; ++i) {
            if (dst.data[i] == untouched) continue;
            CHECK(dst.data[i] == source[i]);
            ++written[i];
          }
          CHECK(dst.clean_outside());
        }
        CHECK(std::all_of(written.begin(), written.end(), [](int times) { return times == 1; }));
      }
    }
  }
}

TEST(elements_arrive_changed_at_any_alignment_and_size) {
  each_pair([]<class From, class To>() {
    for (bool scales : {false, true}) {
      const Change change{0.37f, scales, true};
      for (unsigned to : {0u, 1u, 2u, 4u, 6u, 8u, 12u, 14u}) {
        for (unsigned from : {0u, 1u, 2u, 4u, 8u, 10u}) {
          for (std::size_t count : {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 40, 67, 300}) {
            const Bytes source = random_bytes(count * sizeof(typename From::Bits), to + from);
            const Bytes expected = reference<From, To>(source, change);
            for (unsigned lanes : {1u, 5u}) {
              Placed src(source.size(), from);
              Placed dst(expected.size(), to);
              std::copy(source.begin(), source.end(), src.data);
              std::uint64_t found = 0;
              for (unsigned lane = 0; lane < lanes; ++lane) {
                found += moves::change_range<From, To>(dst.data, src.data, count, change,
                                                       Lane{lane, lanes});
              }
              CHECK(std::equal(expected.begin(), expected.end(), dst.data));
              CHECK(dst.clean_outside());
              CHECK_EQ(found, nonfinite_in<From>(source));
            }
          }
        }
      }
    }
  });
}

TEST(every_small_float_arrives_through_the_body) {
  each_pair([]<class From, class To>() {
    Bytes source(0x10000 * sizeof(typename From::Bits));
    for (std::uint32_t i = 0; i < 0x10000; ++i) {
      // Of float32 those that a small one could be, with a tail that has to be rounded.
      const std::uint32_t bits = sizeof(typename From::Bits) == 2 ? i : i << 16 | i * 40503 % 65536;
      std::memcpy(source.data() + i * sizeof(typename From::Bits), &bits,
                  sizeof(typename From::Bits));
    }
    const Bytes expected = reference<From, To>(source, {});
    Bytes got(expected.size());
    moves::change_range<From, To>(got.data(), source.data(), 0x10000, {}, Lane{0, 1});
    CHECK(got == expected);
  });
}

// ---- tiles

TEST(the_piece_of_a_tile_is_found_from_any_piece_before_it) {
  std::mt19937 random(5);
  for (std::uint32_t count : {1u, 2u, 3u, 17u, 1020u}) {
    std::vector<moves::Piece> pieces(count);
    std::vector<std::uint32_t> owner;
    for (std::uint32_t i = 0; i < count; ++i) {
      pieces[i].first_tile = static_cast<std::uint32_t>(owner.size());
      const std::size_t tiles = random() % 10 == 0 ? 1 + random() % 100 : 1;
      owner.insert(owner.end(), tiles, i);
    }
    for (std::uint32_t tile = 0; tile < owner.size(); ++tile) {
      for (std::uint32_t from : {0u, owner[tile] / 2, owner[tile]}) {
        CHECK_EQ(moves::piece_of(pieces.data(), count, tile, from), owner[tile]);
      }
    }
  }
}

TEST(a_huge_piece_among_small_ones_is_shared_by_all_blocks) {
  Move move;
  move.pieces.resize(100);
  for (moves::Piece& piece : move.pieces) piece.count = 10;
  move.pieces[40].count = std::size_t{64} << 20;
  moves::number_tiles(move);
  CHECK_EQ(move.tiles, 99 + (64 << 20) / moves::tile_bytes);
  std::map<std::uint32_t, std::size_t> of_block;
  for (std::uint32_t block = 0; block < 4; ++block) {
    std::uint32_t piece = 0;
    for (std::uint32_t tile = block; tile < move.tiles; tile += 4) {
      piece = moves::piece_of(move.pieces.data(), 100, tile, piece);
      of_block[block] += piece == 40;
    }
  }
  for (auto [block, tiles] : of_block) CHECK_EQ(tiles, (64 << 20) / moves::tile_bytes / 4);
}

// ---- what is refused

namespace {

struct Small {
  Small() {
    move.base = range.data();
    move.base_bytes = range.size();
    move.pieces = {{one.data(), 0, 16, 0, 0}, {two.data(), 32, 16, 0, 0}};
    moves::number_tiles(move);
  }
  void refused(const char* why) const {
    std::string said = "nothing";
    try {
      moves::check(move);
    } catch (const Error& error) {
      said = error.what();
      CHECK(error.kind() == ErrorKind::invalid_argument);
    }
    if (said.find(why) == std::string::npos) CHECK_EQ(said, why);
  }
  Bytes range = Bytes(64);
  Bytes one = Bytes(64);
  Bytes two = Bytes(64);
  Move move;
};

constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();

}  // namespace

TEST(a_move_that_fits_passes) {
  Small small;
  moves::check(small.move);
  small.move.way = Way::scatter;
  moves::check(small.move);
}

TEST(moves_that_would_write_where_they_must_not_are_refused) {
  Small small;
  small.move.pieces[1].offset = 15;
  small.refused("overlap");
  small.move.way = Way::scatter;  // sources may share bytes
  moves::check(small.move);
  small.move.pieces[1].far = small.one.data() + 15;
  small.refused("overlap");
  small = {};
  small.move.pieces[1].offset = 49;
  small.refused("not inside");
  small.move.pieces[1].offset = huge;
  small.refused("not inside");
  small = {};
  small.move.pieces[0].far = small.range.data() + 60;
  small.refused("overlaps the range");
  small.move.pieces[0].far = nullptr;
  small.refused("without memory");
}

TEST(sizes_that_overflow_are_refused) {
  Small small;
  small.move.from = Element::float32;
  small.move.to = Element::bfloat16;
  small.move.pieces[0].count = huge / 2;
  small.refused("elements");
  small.move.pieces[0].count = 0;
  small.refused("elements");
  small.move.pieces[0].count = std::size_t{1} << 60;
  CHECK_THROWS(moves::number_tiles(small.move), Error);
}

TEST(changes_that_there_are_not_are_refused) {
  Small small;
  small.move.to = Element::float16;
  small.refused("not bytes as float16");
  small.move.to = Element::bytes;
  small.move.change.scales = true;
  small.refused("casts, scales and counts");
  small.move.from = small.move.to = Element::float32;
  small.move.change.scale = std::numeric_limits<float>::infinity();
  small.refused("must be finite");
  small.move.change.scale = std::numeric_limits<float>::quiet_NaN();
  small.refused("must be finite");
  small.move.change = {};
  small.refused("changes nothing");
  small.move.change.counts = true;
  small.refused("without a place");
}

TEST(grids_that_cannot_be_launched_are_refused) {
  for (auto [blocks, threads] :
       {std::pair{0u, 512u}, {1025u, 512u}, {4u, 0u}, {4u, 48u}, {4u, 544u}}) {
    Small small;
    small.move.grid = {blocks, threads};
    small.refused(blocks == 4 ? "threads" : "blocks");
  }
}

// ---- plans

TEST(a_plan_places_its_leaves_apart_and_in_order) {
  TreePlan plan({{Element::bytes, Element::bytes, 5},
                 {Element::float32, Element::bfloat16, 100},
                 {Element::float32, Element::float32, 0},
                 {Element::float16, Element::float16, 3}},
                {});
  CHECK(plan.offsets() == (std::vector<std::size_t>{0, 256, 512, 512}));
  CHECK_EQ(plan.range_bytes(), 518);
  CHECK_EQ(plan.near_bytes(1), 200);
  CHECK_EQ(plan.far_bytes(1), 400);
  Bytes range(plan.range_bytes());
  Bytes a(5), b(400), d(6);
  const std::array<void*, 4> far = {a.data(), b.data(), nullptr, d.data()};
  const auto made = plan.bind(far, range.data(), nullptr);
  REQUIRE(made.size() == 2);  // what is cast, and all the rest as bytes
  CHECK_EQ(made[0]->pieces.size(), 2);
  CHECK_EQ(made[0]->pieces[1].count, 6);
  CHECK_EQ(made[1]->pieces[0].offset, 256);
}

TEST(plans_that_make_no_sense_are_refused) {
  const TreeLeaf ten{Element::bytes, Element::bytes, 10};
  const auto refused = [](std::vector<TreeLeaf> leaves, TreeOptions options) {
    CHECK_THROWS(TreePlan(std::move(leaves), std::move(options)), Error);
  };
  refused({{Element::bytes, Element::bytes, huge}, ten}, {});
  refused({{Element::float32, Element::float16, huge / 3}}, {});
  refused({ten}, {.align = 3});
  refused({ten, ten}, {.offsets = {0}, .range_bytes = 20});
  refused({ten, ten}, {.offsets = {0, 9}, .range_bytes = 20});
  refused({ten, ten}, {.offsets = {0, 11}, .range_bytes = 20});
  TreePlan fits({ten, ten}, {.offsets = {10, 0}, .range_bytes = 20});
  Bytes range(20), a(10), b(10);
  const std::array<void*, 2> far = {a.data(), b.data()};
  CHECK_EQ(fits.bind(far, range.data(), nullptr).size(), 1);
  CHECK_THROWS(fits.bind(std::span(far).first(1), range.data(), nullptr), Error);
  CHECK_THROWS(fits.bind(far, nullptr, nullptr), Error);
}

TEST(destinations_of_different_types_may_not_overlap_either) {
  TreePlan plan({{Element::bytes, Element::bytes, 8}, {Element::float16, Element::float32, 8}},
                {.way = Way::scatter});
  Bytes range(plan.range_bytes()), out(64);
  std::array<void*, 2> far = {out.data(), out.data() + 8};
  CHECK_EQ(plan.bind(far, range.data(), nullptr).size(), 2);
  far[1] = out.data() + 7;
  CHECK_THROWS(plan.bind(far, range.data(), nullptr), Error);
}

// ---- elements that lie apart

namespace {

// A far side in memory of its own, and what it holds in the near side's order.
struct Apart {
  moves::Layout layout;
  std::size_t first = 0;  // bytes from the begin of the memory to the first element
  std::size_t bytes = 0;  // of the memory
  std::size_t count = 1;

  std::size_t place(std::size_t index) const {
    std::int64_t at = static_cast<std::int64_t>(first);
    for (unsigned dim = layout.dims; dim-- > 0;) {
      at += static_cast<std::int64_t>(index % layout.sizes[dim]) * layout.strides[dim];
      index /= layout.sizes[dim];
    }
    return static_cast<std::size_t>(at);
  }
};

// Sizes in the near side's order; `order` has the dimensions from the one that is closest together
// on the far side, with `gap` elements left out after each of it.
Apart lying(std::vector<std::uint64_t> sizes, std::vector<unsigned> order, std::size_t element,
            std::int64_t gap = 1, std::vector<unsigned> reversed = {}) {
  Apart made;
  made.layout.dims = static_cast<std::uint32_t>(sizes.size());
  made.layout.element_bytes = static_cast<std::uint32_t>(element);
  std::int64_t stride = static_cast<std::int64_t>(element) * gap;
  std::copy(sizes.begin(), sizes.end(), made.layout.sizes);
  for (unsigned dim : order) {
    made.layout.strides[dim] = stride;
    stride *= static_cast<std::int64_t>(sizes[dim]);
    made.count *= sizes[dim];
  }
  made.bytes = static_cast<std::size_t>(stride);
  for (unsigned dim : reversed) {
    made.first += (sizes[dim] - 1) * static_cast<std::size_t>(made.layout.strides[dim]);
    made.layout.strides[dim] *= -1;
  }
  return made;
}

std::vector<Apart> layouts(std::size_t element) {
  return {
      lying({1}, {0}, element),
      lying({5000}, {0}, element, 3),
      lying({40, 70}, {0, 1}, element),        // a transpose
      lying({33, 64}, {0, 1}, element, 2),     // with gaps
      lying({35, 1031}, {0, 1}, element),      // several panels across, rows of odd lengths
      lying({3, 100}, {0, 1}, element),        // too narrow for panels
      lying({5, 37, 45}, {1, 2, 0}, element),  // many transposes
      lying({37, 5, 45}, {0, 1, 2}, element),  // all the way round
      lying({2, 3, 4, 5, 6}, {3, 0, 4, 1, 2}, element, 2),
      lying({1, 40, 1, 50, 1}, {1, 0, 2, 4, 3}, element),
      lying({40, 50}, {0, 1}, element, 1, {0}),  // backwards
      lying({60, 7}, {1, 0}, element, 1, {0, 1}),
      lying({2, 2, 2, 2, 2, 2, 2, 9}, {7, 6, 5, 4, 3, 2, 0, 1}, element),
  };
}

template <class From, class To>
std::uint64_t run_lanes(const Move& move, unsigned lanes) {
  const moves::Strides strides = moves::strides_of(move, move.base);
  const bool gathers = move.way == Way::gather;
  std::uint64_t found = 0;
  moves::Stage<typename To::Bits> stage;
  for (std::uint64_t tile = 0; tile < strides.tiles; ++tile) {
    const auto each = [&](auto&& body) {
      for (unsigned lane = 0; lane < lanes; ++lane) body(Lane{lane, lanes});
    };
    if (strides.rows == 0) {
      each([&](Lane lane) {
        found += moves::move_elements<From, To>(strides, tile, gathers, move.change, lane);
      });
      continue;
    }
    const moves::Panel part = moves::panel_of(strides, tile, stage.columns);
    each([&](Lane lane) {
      found += moves::fill_stage<From, To>(strides, part, gathers, move.change, stage, lane);
    });
    each([&](Lane lane) { moves::empty_stage<To>(strides, part, gathers, stage, lane); });
  }
  return found;
}

// Both ways, by one lane and by many, against the plainest loop.
void check_strided(const Apart& apart, std::size_t element) {
  const Bytes far = random_bytes(apart.bytes, 31);
  Bytes near(apart.count * element);
  for (std::size_t i = 0; i < apart.count; ++i) {
    std::memcpy(near.data() + i * element, far.data() + apart.place(i), element);
  }
  for (Way way : {Way::gather, Way::scatter}) {
    for (unsigned lanes : {0u, 1u, 7u, 64u}) {
      Placed range(near.size(), 0);
      Placed other(far.size(), 0);
      std::memcpy(way == Way::gather ? other.data : range.data,
                  way == Way::gather ? far.data() : near.data(),
                  way == Way::gather ? far.size() : near.size());
      Move move;
      move.way = way;
      move.base = range.data;
      move.base_bytes = near.size();
      move.pieces = {{other.data + apart.first, 0, near.size(), 0, 0}};
      move.layout = apart.layout;
      moves::check(move);
      if (lanes == 0) {
        moves::run(move);
      } else {
        moves::with_strided_types(
            move, [&]<class From, class To>() { return run_lanes<From, To>(move, lanes); });
      }
      if (way == Way::gather) {
        CHECK(std::equal(near.begin(), near.end(), range.data));
      } else {
        Bytes expected(far.size(), untouched);  // nothing in the gaps
        for (std::size_t i = 0; i < apart.count; ++i) {
          std::memcpy(expected.data() + apart.place(i), near.data() + i * element, element);
        }
        CHECK(std::equal(expected.begin(), expected.end(), other.data));
      }
      CHECK(range.clean_outside() && other.clean_outside());
      // What a checker and a simulation are told is what was touched, to the byte.
      std::size_t told = 0;
      for (const moves::Access& access : moves::accesses_of(move)) told += access.bytes;
      CHECK_EQ(told, 2 * near.size());
      // From sources of its own it does the same.
      Bytes own;
      Move again = moves::with_own_sources(move, own);
      Bytes twice(near.size());
      if (way == Way::gather) {
        again.base = twice.data();
        moves::run(again);
        CHECK(twice == near);
      }
    }
  }
}

}  // namespace

TEST(elements_that_lie_apart_are_moved_both_ways) {
  for (std::size_t element : {1, 2, 4, 8, 16}) {
    for (const Apart& apart : layouts(element)) check_strided(apart, element);
  }
}

TEST(a_transpose_goes_through_panels_and_a_step_does_not) {
  Bytes memory(40 * 300 * 4);
  Move move;
  move.pieces = {{memory.data(), 0, memory.size(), 0, 0}};
  move.layout = lying({40, 300}, {0, 1}, 4).layout;
  moves::Strides strides = moves::strides_of(move, memory.data());
  CHECK_EQ(strides.rows, 2);
  CHECK_EQ(strides.columns, 3);
  CHECK_EQ(strides.tiles, 6);
  move.layout = lying({40, 300}, {1, 0}, 4).layout;  // one range after all
  strides = moves::strides_of(move, memory.data());
  CHECK_EQ(strides.layout.dims, 1);
  CHECK_EQ(strides.rows, 0);
}

TEST(elements_that_lie_apart_are_changed_and_counted) {
  each_pair([]<class From, class To>() {
    const std::size_t in = sizeof(typename From::Bits);
    for (const Apart& apart : layouts(in)) {
      const Change change{0.37f, true, true};
      const Bytes far = random_bytes(apart.bytes, 32);
      Bytes source(apart.count * in);
      for (std::size_t i = 0; i < apart.count; ++i) {
        std::memcpy(source.data() + i * in, far.data() + apart.place(i), in);
      }
      const Bytes expected = reference<From, To>(source, change);
      Placed other(far.size(), 0);
      std::copy(far.begin(), far.end(), other.data);
      for (unsigned lanes : {1u, 9u}) {
        Placed range(expected.size(), 0);
        Move move;
        move.from = element_of<From>();
        move.to = element_of<To>();
        move.change = change;
        move.base = range.data;
        move.base_bytes = expected.size();
        move.pieces = {{other.data + apart.first, 0, apart.count, 0, 0}};
        move.layout = apart.layout;
        std::array<std::uint64_t, 4> counts;
        move.counts = counts.data();
        moves::check(move);
        CHECK_EQ((run_lanes<From, To>(move, lanes)), nonfinite_in<From>(source));
        CHECK(std::equal(expected.begin(), expected.end(), range.data));
      }
    }
  });
}

TEST(a_source_may_repeat_its_elements) {
  const Bytes far = random_bytes(50 * 4, 33);
  Apart apart = lying({30, 50}, {1, 0}, 4);
  apart.layout.strides[0] = 0;
  Bytes range(30 * 50 * 4);
  Move move;
  move.base = range.data();
  move.base_bytes = range.size();
  Bytes copy = far;
  move.pieces = {{copy.data(), 0, range.size(), 0, 0}};
  move.layout = apart.layout;
  moves::check(move);
  moves::run(move);
  for (std::size_t row = 0; row < 30; ++row) {
    CHECK(
        std::equal(far.begin(), far.end(), range.begin() + static_cast<std::ptrdiff_t>(row * 200)));
  }
  move.way = Way::scatter;
  CHECK_THROWS(moves::check(move), Error);
}

TEST(layouts_that_make_no_sense_are_refused) {
  const auto refused = [](auto&& spoil, const char* why) {
    Small small;
    small.move.pieces.resize(1);
    small.move.pieces[0].count = 16;
    small.move.layout = lying({2, 2}, {0, 1}, 4).layout;
    moves::check(small.move);
    spoil(small.move);
    small.refused(why);
  };
  refused([](Move& move) { move.layout->element_bytes = 3; }, "1, 2, 4, 8 or 16");
  refused([](Move& move) { move.layout->dims = 9; }, "at most 8");
  refused([](Move& move) { move.layout->sizes[0] = 3; }, "6 elements");
  refused([](Move& move) { move.layout->strides[0] = 6; }, "multiples");
  refused([](Move& move) { move.pieces[0].far += 2; }, "not aligned");
  refused([](Move& move) { move.pieces[0].offset = 1; }, "not aligned");
  refused([](Move& move) { move.pieces[0].count = 14; }, "broken");
  refused([](Move& move) { move.pieces.push_back(move.pieces[0]); }, "one piece");
  refused([](Move& move) { move.layout->sizes[0] = huge; }, "overflows");
  refused(
      [](Move& move) {
        move.layout->strides[0] = std::numeric_limits<std::int64_t>::max() / 8 * 4;
        move.layout->sizes[0] = 4;
        move.layout->sizes[1] = 1;
      },
      "overflows");
  refused(
      [](Move& move) {
        move.way = Way::scatter;
        move.layout->strides[0] = move.layout->strides[1];
      },
      "overlap");
}

// ---- checksums

namespace {

std::uint64_t summed(const std::vector<moves::Piece>& pieces, unsigned lanes) {
  std::uint64_t sum = 0;
  for (const moves::Piece& piece : pieces) {
    for (unsigned lane = 0; lane < lanes; ++lane) {
      sum += moves::sum_of_range(piece.far, piece.offset, piece.count, Lane{lane, lanes});
    }
  }
  return sum;
}

}  // namespace

TEST(a_checksum_depends_on_places_and_not_on_lanes) {
  const Bytes source = random_bytes(1001, 51);
  Placed even(1001, 0);
  Placed odd(1001, 3);
  std::copy(source.begin(), source.end(), even.data);
  std::copy(source.begin(), source.end(), odd.data);
  const std::uint64_t sum = summed({{even.data, 0, 1001, 0, 0}}, 1);
  CHECK_EQ(summed({{odd.data, 0, 1001, 0, 0}}, 33), sum);
  // In two pieces, cut at a word.
  CHECK_EQ(summed({{odd.data + 504, 504, 497, 0, 0}, {even.data, 0, 504, 0, 0}}, 5), sum);
  CHECK(summed({{odd.data, 8, 1001, 0, 0}}, 1) != sum);
  std::swap_ranges(even.data, even.data + 8, even.data + 8);
  CHECK(summed({{even.data, 0, 1001, 0, 0}}, 1) != sum);
  CHECK(moves::checksum_of(sum, 1001) != moves::checksum_of(sum, 1002));
}

// ---- on every runtime

namespace {

struct Tensors {
  Tensors(Lab& with, std::vector<std::size_t> sizes_, unsigned seed) : lab(with), sizes(sizes_) {
    StreamRef filler = lab.compute();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      bytes.push_back(random_bytes(sizes[i], seed + static_cast<unsigned>(i)));
      auto staged = lab.pinned(sizes[i]);
      if (sizes[i] > 0) std::memcpy(staged->data(), bytes[i].data(), sizes[i]);
      // At a different alignment each.
      device.push_back(std::make_shared<DeviceBytes>(lab.runtime, sizes[i] + 32));
      far.push_back(device[i]->data() + i % 17);
      lab.runtime->copy_async(far[i], staged->data(), sizes[i], filler);
    }
    lab.runtime->stream_sync(filler, here);
  }
  std::vector<void*> addresses() const { return {far.begin(), far.end()}; }
  Bytes download(std::size_t i) {
    auto staged = lab.pinned(sizes[i]);
    StreamRef stream = lab.copy();
    lab.runtime->copy_async(staged->data(), far[i], sizes[i], stream);
    lab.runtime->stream_sync(stream, here);
    const auto* data = reinterpret_cast<const std::byte*>(staged->data());
    return {data, data + sizes[i]};
  }

  Lab& lab;
  std::vector<std::size_t> sizes;
  std::vector<Bytes> bytes;
  std::vector<std::shared_ptr<DeviceBytes>> device;
  std::vector<unsigned char*> far;
};

std::vector<TreeLeaf> as_bytes(const std::vector<std::size_t>& sizes) {
  std::vector<TreeLeaf> leaves;
  for (std::size_t size : sizes) leaves.push_back({Element::bytes, Element::bytes, size});
  return leaves;
}

// Ragged, with one that is huge beside the others; more than a kernel's small table holds.
std::vector<std::size_t> ragged(std::size_t count) {
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < count; ++i) sizes.push_back(i % 68);
  sizes[count / 2] = 300'001;
  return sizes;
}

bool holds(const Pinned& range, std::size_t offset, const Bytes& bytes) {
  return bytes.empty() || std::memcmp(range.data() + offset, bytes.data(), bytes.size()) == 0;
}

void issue(Lab& lab, const TreePlan& plan, const std::vector<void*>& far, const PinnedPtr& range,
           std::uint64_t* counts, StreamRef stream) {
  for (const auto& move : plan.bind(far, range->data(), counts)) lab.runtime->move(move, stream);
}

}  // namespace

ON_EACH_RUNTIME(a_gather_comes_after_its_producer_and_before_what_follows) {
  Tensors tensors(lab, {100, 7, 0, 3000}, 1);
  TreePlan plan(as_bytes(tensors.sizes), {});
  auto range = lab.pinned(plan.range_bytes());
  StreamRef stream = lab.compute();
  auto gate = lab.runtime->gate(stream);
  lab.produce(stream, tensors.far[0], 9, 100);
  issue(lab, plan, tensors.addresses(), range, nullptr, stream);
  lab.produce(stream, tensors.far[0], 77, 100);
  EventPtr event = lab.record(stream);
  CHECK(lab.held(event));
  CHECK(range->holds(poison));
  gate->open();
  CHECK(lab.in_time(event));
  CHECK(holds(*range, plan.offsets()[0], Bytes(100, std::byte{9})));
  CHECK(holds(*range, plan.offsets()[1], tensors.bytes[1]));
  CHECK(holds(*range, plan.offsets()[3], tensors.bytes[3]));
  CHECK(holds(*range, plan.offsets()[1] + 7, Bytes(249, untouched)));  // nothing in between
}

ON_EACH_RUNTIME(ragged_tensors_are_gathered_and_scattered_back) {
  const std::size_t count = lab.runtime->virtual_time() ? 40 : 2300;
  Tensors tensors(lab, ragged(count), 3);
  TreePlan plan(as_bytes(tensors.sizes), {.align = 1});  // every alignment of the range, too
  auto range = lab.pinned(plan.range_bytes());
  StreamRef stream = lab.copy();
  issue(lab, plan, tensors.addresses(), range, nullptr, stream);
  lab.runtime->stream_sync(stream, here);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < count; ++i)
    wrong += !holds(*range, plan.offsets()[i], tensors.bytes[i]);
  CHECK_EQ(wrong, 0);

  Tensors back(lab, tensors.sizes, 1000);
  TreePlan way_back(as_bytes(tensors.sizes), {.way = Way::scatter, .align = 1});
  StreamRef other = lab.copy();
  issue(lab, way_back, back.addresses(), range, nullptr, other);
  lab.runtime->stream_sync(other, here);
  for (std::size_t i = 0; i < count; i += lab.cuda() ? 97 : 1)
    wrong += back.download(i) != tensors.bytes[i];
  CHECK_EQ(wrong, 0);
}

namespace {

// Both ways in one plan with all pairs of types, a scale and a count.
void change_all(Lab& lab, Way way, const Change& change) {
  std::vector<std::size_t> sizes;
  std::vector<TreeLeaf> leaves;
  const std::size_t counts[] = {1, 5, 8, 129, 20'011};
  each_pair([&]<class From, class To>() {
    for (std::size_t count : counts) {
      leaves.push_back({element_of<From>(), element_of<To>(), count});
      // Room for either side.
      sizes.push_back(count * 4);
    }
  });
  Tensors tensors(lab, sizes, 11);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (i % 4 == 1) tensors.far[i] = tensors.device[i]->data() + 16;  // some are aligned
  }
  TreePlan plan(leaves, {.way = way, .align = 64, .change = change, .grid = {3, 64}});
  auto range = lab.pinned(plan.range_bytes());
  auto found = lab.pinned(std::max<std::size_t>(plan.counts(), 1) * sizeof(std::uint64_t));
  const Bytes in_range = random_bytes(plan.range_bytes(), 12);
  std::memcpy(range->data(), in_range.data(), in_range.size());
  StreamRef stream = lab.copy();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    lab.runtime->copy_async(tensors.far[i], lab.pinned(sizes[i], poison)->data(), sizes[i], stream);
    if (way == Way::scatter) continue;
    auto staged = lab.pinned(sizes[i]);
    std::memcpy(staged->data(), tensors.bytes[i].data(), sizes[i]);
    lab.runtime->copy_async(tensors.far[i], staged->data(), sizes[i], stream);
  }
  issue(lab, plan, tensors.addresses(), range, reinterpret_cast<std::uint64_t*>(found->data()),
        stream);
  lab.runtime->stream_sync(stream, here);

  std::uint64_t expected_found = 0;
  std::size_t leaf = 0;
  each_pair([&]<class From, class To>() {
    for (std::size_t count : counts) {
      const std::size_t in = count * sizeof(typename From::Bits);
      const auto offset = static_cast<std::ptrdiff_t>(plan.offsets()[leaf]);
      const Bytes source =
          way == Way::gather ? Bytes(tensors.bytes[leaf].begin(),
                                     tensors.bytes[leaf].begin() + static_cast<std::ptrdiff_t>(in))
                             : Bytes(in_range.begin() + offset,
                                     in_range.begin() + offset + static_cast<std::ptrdiff_t>(in));
      const Bytes expected = reference<From, To>(source, change);
      expected_found += nonfinite_in<From>(source);
      if (way == Way::gather) {
        CHECK(holds(*range, plan.offsets()[leaf], expected));
      } else {
        Bytes got = tensors.download(leaf);
        CHECK(std::equal(expected.begin(), expected.end(), got.begin()));
        CHECK(std::all_of(got.begin() + static_cast<std::ptrdiff_t>(expected.size()), got.end(),
                          [](std::byte byte) { return byte == untouched; }));
      }
      ++leaf;
    }
  });
  if (!change.counts) return;
  CHECK(expected_found > 0);
  CHECK_EQ(plan.counts(), 9 * 3);
  const auto* numbers = reinterpret_cast<const std::uint64_t*>(found->data());
  CHECK_EQ(std::accumulate(numbers, numbers + plan.counts(), std::uint64_t{0}), expected_found);
}

}  // namespace

ON_EACH_RUNTIME(elements_are_cast_when_gathered) { change_all(lab, Way::gather, {}); }
ON_EACH_RUNTIME(elements_are_cast_when_scattered) { change_all(lab, Way::scatter, {}); }
ON_EACH_RUNTIME(one_pass_casts_scales_and_counts) {
  change_all(lab, Way::gather, {1.0f / 3, true, true});
}
ON_EACH_RUNTIME(one_pass_scales_and_counts_on_the_way_back) {
  change_all(lab, Way::scatter, {0x1p-12f, true, true});
}

namespace {

void move_apart(Lab& lab, Way way) {
  std::vector<TreeLeaf> leaves;
  std::vector<std::size_t> sizes;
  std::vector<Apart> all;
  for (std::size_t element : {1, 4, 16}) {
    for (const Apart& apart : layouts(element)) {
      leaves.push_back({Element::bytes, Element::bytes, apart.count * element, apart.layout});
      sizes.push_back(apart.bytes);
      all.push_back(apart);
    }
  }
  Tensors tensors(lab, sizes, 41);
  std::vector<void*> far;
  for (std::size_t i = 0; i < all.size(); ++i) {
    tensors.far[i] = tensors.device[i]->data();
    far.push_back(tensors.far[i] + all[i].first);
  }
  TreePlan plan(leaves, {.way = way, .align = 16, .grid = {3, 96}});
  auto range = lab.pinned(plan.range_bytes());
  const Bytes in_range = random_bytes(plan.range_bytes(), 42);
  if (way == Way::scatter) std::memcpy(range->data(), in_range.data(), in_range.size());
  StreamRef stream = lab.copy();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    auto staged = lab.pinned(sizes[i]);
    if (way == Way::gather) std::memcpy(staged->data(), tensors.bytes[i].data(), sizes[i]);
    lab.runtime->copy_async(tensors.far[i], staged->data(), sizes[i], stream);
  }
  issue(lab, plan, far, range, nullptr, stream);
  lab.runtime->stream_sync(stream, here);
  for (std::size_t leaf = 0; leaf < all.size(); ++leaf) {
    const Apart& apart = all[leaf];
    const std::size_t element = apart.layout.element_bytes;
    const std::size_t offset = plan.offsets()[leaf];
    if (way == Way::gather) {
      Bytes near(apart.count * element);
      for (std::size_t i = 0; i < apart.count; ++i) {
        std::memcpy(near.data() + i * element, tensors.bytes[leaf].data() + apart.place(i),
                    element);
      }
      CHECK(holds(*range, offset, near));
    } else {
      Bytes expected(sizes[leaf], untouched);
      for (std::size_t i = 0; i < apart.count; ++i) {
        std::memcpy(expected.data() + apart.place(i), in_range.data() + offset + i * element,
                    element);
      }
      CHECK(tensors.download(leaf) == expected);
    }
  }
}

}  // namespace

ON_EACH_RUNTIME(what_lies_apart_is_gathered) { move_apart(lab, Way::gather); }
ON_EACH_RUNTIME(what_lies_apart_is_scattered) { move_apart(lab, Way::scatter); }

ON_EACH_RUNTIME(destinations_that_interleave_or_run_backwards_are_no_overlap) {
  // Every other element from the first, every other from the last on down, and a dense one behind.
  moves::Layout forth{.dims = 1, .element_bytes = 4};
  forth.sizes[0] = 8;
  forth.strides[0] = 8;
  moves::Layout back = forth;
  back.strides[0] = -8;
  TreePlan plan({{Element::bytes, Element::bytes, 8 * 4, forth},
                 {Element::bytes, Element::bytes, 8 * 4, back},
                 {Element::bytes, Element::bytes, 16, {}}},
                {.way = Way::scatter, .align = 16});
  auto range = lab.pinned(plan.range_bytes());
  const Bytes in_range = random_bytes(plan.range_bytes(), 43);
  std::memcpy(range->data(), in_range.data(), in_range.size());
  auto device = lab.device(64 + 16);
  unsigned char* to = device->data();
  StreamRef stream = lab.copy();
  issue(lab, plan, {to, to + 60, to + 64}, range, nullptr, stream);
  auto got = lab.pinned(80);
  lab.runtime->copy_async(got->data(), to, 80, stream);
  lab.runtime->stream_sync(stream, here);
  Bytes expected(80);
  for (std::size_t i = 0; i < 8; ++i) {
    std::memcpy(expected.data() + 8 * i, in_range.data() + plan.offsets()[0] + 4 * i, 4);
    std::memcpy(expected.data() + 60 - 8 * i, in_range.data() + plan.offsets()[1] + 4 * i, 4);
  }
  std::memcpy(expected.data() + 64, in_range.data() + plan.offsets()[2], 16);
  CHECK(holds(*got, 0, expected));
}

ON_EACH_RUNTIME(a_checksum_comes_after_its_producer) {
  const std::size_t count = lab.runtime->virtual_time() ? 30 : 1300;
  Tensors tensors(lab, ragged(count), 61);
  auto sums = lab.pinned(5 * sizeof(std::uint64_t));
  auto move = std::make_shared<Move>();
  move->way = Way::checksum;
  move->counts = reinterpret_cast<std::uint64_t*>(sums->data());
  move->grid = {5, 64};
  std::uint64_t expected = 0;
  std::uint64_t place = 0;
  tensors.bytes[1].assign(tensors.sizes[1], std::byte{7});
  for (std::size_t i = 0; i < count; ++i) {
    if (tensors.sizes[i] == 0) continue;
    move->pieces.push_back(
        {reinterpret_cast<std::byte*>(tensors.far[i]), place, tensors.sizes[i], 0, 0});
    expected += moves::sum_of_range(tensors.bytes[i].data(), place, tensors.sizes[i], Lane{0, 1});
    place += (tensors.sizes[i] + 7) / 8 * 8;
  }
  moves::number_tiles(*move);
  moves::check(*move);
  StreamRef stream = lab.compute();
  auto gate = lab.runtime->gate(stream);
  lab.produce(stream, tensors.far[1], 7, tensors.sizes[1]);
  lab.runtime->move(move, stream);
  EventPtr event = lab.record(stream);
  CHECK(lab.held(event));
  CHECK(sums->holds(poison));
  gate->open();
  CHECK(lab.in_time(event));
  const auto* parts = reinterpret_cast<const std::uint64_t*>(sums->data());
  CHECK_EQ(std::accumulate(parts, parts + 5, std::uint64_t{0}), expected);
}

ON_EACH_RUNTIME(many_pieces_are_counted_once_each) {
  // More than one launch of a kernel holds: each block adds to its number.
  const std::size_t count = lab.runtime->virtual_time() ? 20 : 1500;
  std::vector<TreeLeaf> leaves(count, {Element::float32, Element::float32, 3});
  auto source = lab.pinned(count * 12);
  for (std::size_t i = 0; i < count * 3; ++i) {
    const std::uint32_t bits = i % 3 == 0 ? 0x7f800000u : static_cast<std::uint32_t>(i);
    std::memcpy(source->data() + 4 * i, &bits, 4);
  }
  auto device = lab.device(count * 12);
  StreamRef stream = lab.copy();
  lab.runtime->copy_async(device->data(), source->data(), count * 12, stream);
  std::vector<void*> far;
  for (std::size_t i = 0; i < count; ++i) far.push_back(device->data() + 12 * i);
  TreePlan plan(leaves, {.align = 4, .change = {1, false, true}});
  auto range = lab.pinned(plan.range_bytes());
  auto found = lab.pinned(plan.counts() * sizeof(std::uint64_t));
  auto* numbers = reinterpret_cast<std::uint64_t*>(found->data());
  for (int round = 0; round < 2; ++round) {  // what was there before does not count
    issue(lab, plan, far, range, numbers, stream);
    lab.runtime->stream_sync(stream, here);
    CHECK_EQ(std::accumulate(numbers, numbers + plan.counts(), std::uint64_t{0}), count);
  }
  CHECK_EQ(std::memcmp(range->data(), source->data(), count * 12), 0);
}

ON_EACH_RUNTIME(a_transfer_of_a_tree_has_its_leaves) {
  Tensors tensors(lab, {100, 0, 3000}, 21);
  TreePlan plan(as_bytes(tensors.sizes), {});
  auto range = lab.pinned(plan.range_bytes());
  auto engine = std::make_shared<CopyEngine>(lab.runtime);
  StreamRef producer = lab.compute();
  auto gate = lab.runtime->gate(producer);
  lab.produce(producer, tensors.far[0], 5, 100);
  TransferRequest request;
  for (std::size_t i = 0; i < 3; ++i) {
    request.items.push_back({range->data() + plan.offsets()[i], nullptr, tensors.sizes[i], 1, {}});
  }
  request.moves = plan.bind(tensors.addresses(), range->data(), nullptr);
  request.after = {producer};
  auto transfer = engine->submit(std::move(request));
  CHECK(!transfer->sync_for(moment));
  CHECK(!transfer->leaf_done(2));
  CHECK(transfer->leaf_done(1));
  CHECK(range->holds(poison));
  gate->open();
  REQUIRE(transfer->leaf_sync_for(2, patience));
  CHECK(transfer->sync_for(patience));
  CHECK(holds(*range, 0, Bytes(100, std::byte{5})));
  CHECK(holds(*range, plan.offsets()[2], tensors.bytes[2]));
  REQUIRE(transfer->plan().chunks.size() == 2);
  CHECK_EQ(transfer->plan().chunks[1].bytes, 3000);
  CHECK_EQ(transfer->plan().marks, 1);
}

TEST(cuda_memory_that_a_kernel_cannot_reach_is_refused) {
  Lab lab(cuda_backend());
  auto device = lab.device(64);
  Bytes ordinary(256);
  TreePlan plan(as_bytes({64}), {});
  StreamRef stream = lab.copy();
  std::vector<void*> far = {device->data()};
  for (const auto& move : plan.bind(far, ordinary.data(), nullptr)) {
    CHECK_THROWS(lab.runtime->move(move, stream), Error);
  }
  far = {ordinary.data() + 64};
  auto range = lab.pinned(64);
  for (const auto& move : plan.bind(far, range->data(), nullptr)) {
    CHECK_THROWS(lab.runtime->move(move, stream), Error);
    CHECK_THROWS(lab.runtime->move(move, lab.host()), Error);
  }
  issue(lab, plan, {device->data()}, range, nullptr, stream);  // the stream is good
  lab.runtime->stream_sync(stream, here);
}
