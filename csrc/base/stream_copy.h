// Copies in host memory that go past the caches: for large pieces that nobody reads again soon.
#pragma once

#include <cstddef>

namespace streamlap {

// The ranges must not overlap. Small pieces, and all on processors without wide stores, are copied
// by memcpy. Whoever the calling thread tells afterwards (by a lock, an event) sees the bytes.
void stream_copy(void* dst, const void* src, std::size_t bytes) noexcept;

enum class StoreWidth { plain, avx2, avx512 };

// The widest that this processor has.
StoreWidth widest_store() noexcept;
// For tests: by a width that this processor has, however small the piece.
void stream_copy(void* dst, const void* src, std::size_t bytes, StoreWidth width) noexcept;

}  // namespace streamlap
