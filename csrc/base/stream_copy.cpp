#include "base/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace streamlap {
namespace {

// Below this, what was written is likely to be read while a cache still has it.
constexpr std::size_t smallest_streamed = std::size_t{256} << 10;

#if defined(__x86_64__)

constexpr std::size_t line = 64;
constexpr std::size_t block = 4 * line;  // as many loads in flight before the stores

[[gnu::target("avx512f")]] void copy_blocks_512(std::byte* dst, const std::byte* src,
                                                std::size_t bytes) noexcept {
  for (std::size_t i = 0; i < bytes; i += block) {
    const __m512i a = _mm512_loadu_si512(src + i);
    const __m512i b = _mm512_loadu_si512(src + i + line);
    const __m512i c = _mm512_loadu_si512(src + i + 2 * line);
    const __m512i d = _mm512_loadu_si512(src + i + 3 * line);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + line), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 2 * line), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 3 * line), d);
  }
}

[[gnu::target("avx2")]] void copy_blocks_256(std::byte* dst, const std::byte* src,
                                             std::size_t bytes) noexcept {
  constexpr std::size_t half = line / 2;
  for (std::size_t i = 0; i < bytes; i += 2 * line) {
    const auto* from = reinterpret_cast<const __m256i*>(src + i);
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    const __m256i c = _mm256_loadu_si256(from + 2);
    const __m256i d = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + half), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 2 * half), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 3 * half), d);
  }
}

#endif

}  // namespace

StoreWidth widest_store() noexcept {
#if defined(__x86_64__)
  static const StoreWidth width = __builtin_cpu_supports("avx512f") ? StoreWidth::avx512
                                  : __builtin_cpu_supports("avx2")  ? StoreWidth::avx2
                                                                    : StoreWidth::plain;
  return width;
#else
  return StoreWidth::plain;
#endif
}

void stream_copy(void* dst, const void* src, std::size_t bytes, StoreWidth width) noexcept {
  if (bytes == 0) return;
#if defined(__x86_64__)
  if (width != StoreWidth::plain) {
    auto* to = static_cast<std::byte*>(dst);
    const auto* from = static_cast<const std::byte*>(src);
    // Such stores write whole lines: the ragged ends go the ordinary way.
    const std::size_t past = reinterpret_cast<std::uintptr_t>(to) % line;
    const std::size_t head = std::min(bytes, past == 0 ? 0 : line - past);
    const std::size_t middle = (bytes - head) / block * block;
    const std::size_t tail = bytes - head - middle;
    std::memcpy(to, from, head);
    if (width == StoreWidth::avx512) {
      copy_blocks_512(to + head, from + head, middle);
    } else {
      copy_blocks_256(to + head, from + head, middle);
    }
    std::memcpy(to + head + middle, from + head + middle, tail);
    _mm_sfence();  // they are weakly ordered: a lock released next would not wait for them
    return;
  }
#endif
  std::memcpy(dst, src, bytes);
}

void stream_copy(void* dst, const void* src, std::size_t bytes) noexcept {
  stream_copy(dst, src, bytes, bytes < smallest_streamed ? StoreWidth::plain : widest_store());
}

}  // namespace streamlap
