// Bytes that differ everywhere, so that a copy that was swapped, stale, short or never made shows.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace bench {

// Splits [0, bytes) among the cores.
void in_parallel(std::size_t bytes,
                 const std::function<void(std::size_t begin, std::size_t end)>& body);

// Writes bytes [from, from + bytes) of the endless pattern `seed`.
void write_pattern(void* memory, std::size_t bytes, std::size_t seed, std::size_t from = 0);
// Whether memory holds them.
bool has_pattern(const void* memory, std::size_t bytes, std::size_t seed, std::size_t from = 0);

// Bytes that no pattern has everywhere; also touches the memory.
void poison(void* memory, std::size_t bytes);
bool same_bytes(const void* a, const void* b, std::size_t bytes);

}  // namespace bench
