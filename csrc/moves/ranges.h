// How lanes share one range: the body of the kernels and of the worker threads.
//
// The lanes are the threads of a warp; a worker is one lane. Every byte of the destination is
// written once, by one of them. Destinations are written 16 bytes at a time, from the first aligned
// address to the last; what lies before and behind goes element by element. Sources are read as
// widely as they are aligned to that. Nothing is read or written beside the ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "moves/elements.h"
#include "moves/on_both.h"

namespace streamlap::moves {

struct Lane {
  unsigned index;
  unsigned count;
};

// 16 bytes in registers.
struct alignas(16) Quad {
  std::uint32_t words[4];
};

STREAMLAP_ON_BOTH unsigned misalignment(const void* pointer, unsigned bytes) {
  return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(pointer) & (bytes - 1));
}

// One access, for a pointer that is aligned to the type. A host compiler makes one of memcpy; for a
// device it would be one for each byte.
template <class T>
STREAMLAP_ON_BOTH T loaded(const std::byte* pointer) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const T*>(pointer);
#else
  T value;
  memcpy(&value, pointer, sizeof(T));
  return value;
#endif
}

template <class T>
STREAMLAP_ON_BOTH void store(std::byte* pointer, const T& value) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<T*>(pointer) = value;
#else
  memcpy(pointer, &value, sizeof(T));
#endif
}

// A number of 2 or 4 bytes from a place that need not be aligned to it.
template <class T>
STREAMLAP_ON_BOTH T loaded_anywhere(const std::byte* pointer) {
  if (misalignment(pointer, sizeof(T)) == 0) return loaded<T>(pointer);
  T value = 0;
  STREAMLAP_UNROLL
  for (unsigned i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(value | static_cast<T>(loaded<std::uint8_t>(pointer + i)) << 8 * i);
  }
  return value;
}

template <class T>
STREAMLAP_ON_BOTH void store_anywhere(std::byte* pointer, T value) {
  if (misalignment(pointer, sizeof(T)) == 0) return store(pointer, value);
  STREAMLAP_UNROLL
  for (unsigned i = 0; i < sizeof(T); ++i) {
    store(pointer + i, static_cast<std::uint8_t>(value >> 8 * i));
  }
}

// 16 bytes from a place that is aligned to `Width`: 16, 8, 4, 2 or 1.
template <unsigned Width>
STREAMLAP_ON_BOTH Quad quad_at(const std::byte* pointer) {
  if constexpr (Width == 16) {
    return loaded<Quad>(pointer);
  } else {
    Quad quad;
    STREAMLAP_UNROLL
    for (unsigned word = 0; word < 4; ++word) {
      const std::byte* at = pointer + 4 * word;
      if constexpr (Width == 8) {
        if (word % 2 == 0) {
          const auto two = loaded<std::uint64_t>(at);
          quad.words[word] = static_cast<std::uint32_t>(two);
          quad.words[word + 1] = static_cast<std::uint32_t>(two >> 32);
        }
      } else if constexpr (Width == 4) {
        quad.words[word] = loaded<std::uint32_t>(at);
      } else if constexpr (Width == 2) {
        quad.words[word] = loaded<std::uint16_t>(at) | std::uint32_t{loaded<std::uint16_t>(at + 2)}
                                                           << 16;
      } else {
        quad.words[word] = loaded<std::uint8_t>(at) |
                           std::uint32_t{loaded<std::uint8_t>(at + 1)} << 8 |
                           std::uint32_t{loaded<std::uint8_t>(at + 2)} << 16 |
                           std::uint32_t{loaded<std::uint8_t>(at + 3)} << 24;
      }
    }
    return quad;
  }
}

// Reads that are under way before the first of them is needed: the more, the more latency is
// hidden.
inline constexpr unsigned in_flight = 4;

template <unsigned Width>
STREAMLAP_ON_BOTH void copy_quads(std::byte* dst, const std::byte* src, std::size_t quads,
                                  Lane lane) {
  std::size_t at = lane.index;
  const std::size_t step = lane.count;
  for (; at + (in_flight - 1) * step < quads; at += in_flight * step) {
    Quad held[in_flight];
    STREAMLAP_UNROLL
    for (unsigned k = 0; k < in_flight; ++k) held[k] = quad_at<Width>(src + 16 * (at + k * step));
    STREAMLAP_UNROLL
    for (unsigned k = 0; k < in_flight; ++k) store(dst + 16 * (at + k * step), held[k]);
  }
  for (; at < quads; at += step) store(dst + 16 * at, quad_at<Width>(src + 16 * at));
}

STREAMLAP_ON_BOTH void copy_bytes(std::byte* dst, const std::byte* src, std::size_t begin,
                                  std::size_t end, Lane lane) {
  for (std::size_t at = begin + lane.index; at < end; at += lane.count) {
    store(dst + at, loaded<std::uint8_t>(src + at));
  }
}

// The bytes as they are.
STREAMLAP_ON_BOTH void copy_range(std::byte* dst, const std::byte* src, std::size_t bytes,
                                  Lane lane) {
  const unsigned off = misalignment(dst, 16);
  std::size_t head = off == 0 ? 0 : 16 - off;
  if (head > bytes) head = bytes;
  const std::size_t quads = (bytes - head) / 16;
  std::byte* to = dst + head;
  const std::byte* from = src + head;
  const unsigned apart = misalignment(from, 16);
  if (apart == 0) {
    copy_quads<16>(to, from, quads, lane);
  } else if (apart % 8 == 0) {
    copy_quads<8>(to, from, quads, lane);
  } else if (apart % 4 == 0) {
    copy_quads<4>(to, from, quads, lane);
  } else if (apart % 2 == 0) {
    copy_quads<2>(to, from, quads, lane);
  } else {
    copy_quads<1>(to, from, quads, lane);
  }
  copy_bytes(dst, src, 0, head, lane);
  copy_bytes(dst, src, head + 16 * quads, bytes, lane);
}

// Element `index` of a run of quads.
template <class Bits>
STREAMLAP_ON_BOTH Bits element_of(const Quad* quads, unsigned index) {
  if constexpr (sizeof(Bits) == 4) {
    return quads[index / 4].words[index % 4];
  } else {
    return static_cast<Bits>(quads[index / 8].words[index / 2 % 4] >> 16 * (index % 2));
  }
}

// Elements as they are changed; the number of non-finite ones that this lane has seen.
template <class From, class To>
STREAMLAP_ON_BOTH std::uint64_t change_elements(std::byte* dst, const std::byte* src,
                                                std::size_t begin, std::size_t end,
                                                const Change& change, Lane lane) {
  using In = typename From::Bits;
  using Out = typename To::Bits;
  std::uint64_t found = 0;
  for (std::size_t at = begin + lane.index; at < end; at += lane.count) {
    const In bits = loaded_anywhere<In>(src + at * sizeof(In));
    if (change.counts) found += is_nonfinite<From>(bits);
    store_anywhere<Out>(dst + at * sizeof(Out), changed<From, To>(bits, change));
  }
  return found;
}

// As many elements at once as make whole quads on both sides.
template <class From, class To>
struct Group {
  using In = typename From::Bits;
  using Out = typename To::Bits;
  static constexpr unsigned size = sizeof(In) == 4 && sizeof(Out) == 4 ? 4 : 8;
  static constexpr unsigned in_bytes = size * sizeof(In);
  static constexpr unsigned out_bytes = size * sizeof(Out);
};

template <class From, class To, unsigned Width>
STREAMLAP_ON_BOTH std::uint64_t change_groups(std::byte* dst, const std::byte* src,
                                              std::size_t groups, const Change& change, Lane lane) {
  using G = Group<From, To>;
  using In = typename From::Bits;
  using Out = typename To::Bits;
  constexpr unsigned each = 2;  // groups in flight
  constexpr unsigned per_quad = 16 / sizeof(Out);
  std::uint64_t found = 0;
  const std::size_t step = lane.count;
  for (std::size_t at = lane.index; at < groups; at += each * step) {
    Quad in[each][G::in_bytes / 16];
    STREAMLAP_UNROLL
    for (unsigned k = 0; k < each; ++k) {
      if (at + k * step >= groups) continue;
      STREAMLAP_UNROLL
      for (unsigned q = 0; q < G::in_bytes / 16; ++q) {
        in[k][q] = quad_at<Width>(src + (at + k * step) * G::in_bytes + 16 * q);
      }
    }
    STREAMLAP_UNROLL
    for (unsigned k = 0; k < each; ++k) {
      if (at + k * step >= groups) continue;
      STREAMLAP_UNROLL
      for (unsigned q = 0; q < G::out_bytes / 16; ++q) {
        Quad out{};
        STREAMLAP_UNROLL
        for (unsigned e = 0; e < per_quad; ++e) {
          const In bits = element_of<In>(in[k], q * per_quad + e);
          if (change.counts) found += is_nonfinite<From>(bits);
          const std::uint32_t made = changed<From, To>(bits, change);
          if constexpr (sizeof(Out) == 4) {
            out.words[e] = made;
          } else {
            out.words[e / 2] |= made << 16 * (e % 2);
          }
        }
        store(dst + (at + k * step) * G::out_bytes + 16 * q, out);
      }
    }
  }
  return found;
}

// `count` elements as they are changed. The number of non-finite ones that this lane has seen.
template <class From, class To>
STREAMLAP_ON_BOTH std::uint64_t change_range(std::byte* dst, const std::byte* src,
                                             std::size_t count, const Change& change, Lane lane) {
  using In = typename From::Bits;
  using Out = typename To::Bits;
  if (misalignment(dst, sizeof(Out)) != 0) {
    return change_elements<From, To>(dst, src, 0, count, change, lane);
  }
  const unsigned off = misalignment(dst, 16);
  std::size_t head = off == 0 ? 0 : (16 - off) / sizeof(Out);
  if (head > count) head = count;
  const std::size_t groups = (count - head) / Group<From, To>::size;
  const std::size_t tail = head + groups * Group<From, To>::size;
  std::byte* to = dst + head * sizeof(Out);
  const std::byte* from = src + head * sizeof(In);
  std::uint64_t found;
  if (misalignment(from, 16) == 0) {
    found = change_groups<From, To, 16>(to, from, groups, change, lane);
  } else if (misalignment(from, sizeof(In)) == 0) {
    found = change_groups<From, To, sizeof(In)>(to, from, groups, change, lane);
  } else {
    found = change_groups<From, To, 1>(to, from, groups, change, lane);
  }
  found += change_elements<From, To>(dst, src, 0, head, change, lane);
  return found + change_elements<From, To>(dst, src, tail, count, change, lane);
}

}  // namespace streamlap::moves
