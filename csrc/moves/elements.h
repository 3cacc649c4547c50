// The elements that a move can change on the way: float32, float16 and bfloat16, as bits.
//
// Integer arithmetic, so that a GPU and a CPU give the same bits whatever their settings are.
// Narrowing rounds to nearest, ties to even. A NaN keeps its sign and the upper bits of its
// payload; where none of these is set, the lowest becomes one, so that it stays a NaN. Widening is
// exact, NaNs included: a value that was widened and is narrowed again has its old bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "moves/on_both.h"

namespace streamlap::moves {

// `bytes` are elements of any type that travel as they are.
enum class Element : std::uint8_t { bytes, float32, float16, bfloat16 };

STREAMLAP_ON_BOTH float as_float(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

STREAMLAP_ON_BOTH std::uint32_t as_bits(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline constexpr std::uint32_t infinity_bits = 0x7f800000;
inline constexpr std::uint32_t magnitude_mask = 0x7fffffff;

struct Float32 {
  using Bits = std::uint32_t;
  static constexpr Bits exponent = 0x7f800000;
  STREAMLAP_ON_BOTH static std::uint32_t widened(Bits bits) { return bits; }
  STREAMLAP_ON_BOTH static Bits narrowed(std::uint32_t bits) { return bits; }
};

struct BFloat16 {
  using Bits = std::uint16_t;
  static constexpr Bits exponent = 0x7f80;
  STREAMLAP_ON_BOTH static std::uint32_t widened(Bits bits) { return std::uint32_t{bits} << 16; }
  STREAMLAP_ON_BOTH static Bits narrowed(std::uint32_t bits) {
    const std::uint32_t upper = bits >> 16;
    if ((bits & magnitude_mask) > infinity_bits) {
      return static_cast<Bits>((upper & 0x7f) == 0 ? upper | 1 : upper);
    }
    // What is cut off carries when it is more than a half, or a half above an odd last bit.
    return static_cast<Bits>((bits + 0x7fff + (upper & 1)) >> 16);
  }
};

struct Float16 {
  using Bits = std::uint16_t;
  static constexpr Bits exponent = 0x7c00;
  // float32's exponent is biased by 127, float16's by 15.
  static constexpr std::uint32_t rebias = (127 - 15) << 23;

  STREAMLAP_ON_BOTH static std::uint32_t widened(Bits bits) {
    const std::uint32_t sign = (std::uint32_t{bits} & 0x8000) << 16;
    const std::uint32_t magnitude = bits & 0x7fff;
    if (magnitude >= exponent) return sign | infinity_bits | (magnitude & 0x3ff) << 13;
    if (magnitude >= 0x400) return sign | ((magnitude << 13) + rebias);
    // A multiple of 2^-24, which float32 has as a normal number.
    return sign | as_bits(static_cast<float>(magnitude) * 0x1p-24f);
  }
  STREAMLAP_ON_BOTH static Bits narrowed(std::uint32_t bits) {
    const std::uint32_t sign = bits >> 16 & 0x8000;
    const std::uint32_t magnitude = bits & magnitude_mask;
    if (magnitude > infinity_bits) {
      const std::uint32_t payload = magnitude >> 13 & 0x3ff;
      return static_cast<Bits>(sign | exponent | (payload == 0 ? 1 : payload));
    }
    if (magnitude >= 0x47800000) return static_cast<Bits>(sign | exponent);  // from 2^16 on
    if (magnitude < 0x38800000) {
      // Below 2^-14 the result counts steps of 2^-24, the last place of a sum with one half.
      const float sum = as_float(magnitude) + 0.5f;
      return static_cast<Bits>(sign | (as_bits(sum) - as_bits(0.5f)));
    }
    const std::uint32_t odd = magnitude >> 13 & 1;
    return static_cast<Bits>(sign | ((magnitude - rebias + 0xfff + odd) >> 13));
  }
};

// float32 times a factor. A NaN stays what it is, and what becomes one is the same on every
// processor.
STREAMLAP_ON_BOTH std::uint32_t scaled(std::uint32_t bits, float scale) {
  if ((bits & magnitude_mask) > infinity_bits) return bits;
  const std::uint32_t product = as_bits(as_float(bits) * scale);
  return (product & magnitude_mask) > infinity_bits ? 0x7fc00000 : product;
}

// What happens to each element on the way.
struct Change {
  float scale = 1;
  bool scales = false;
  bool counts = false;  // those that are infinite or NaN, before they are scaled
};

template <class From, class To>
STREAMLAP_ON_BOTH typename To::Bits changed(typename From::Bits bits, const Change& change) {
  if constexpr (std::is_same_v<From, To>) {
    if (!change.scales) return bits;
  }
  const std::uint32_t wide = From::widened(bits);
  return To::narrowed(change.scales ? scaled(wide, change.scale) : wide);
}

template <class From>
STREAMLAP_ON_BOTH unsigned is_nonfinite(typename From::Bits bits) {
  return (bits & From::exponent) == From::exponent;
}

}  // namespace streamlap::moves
