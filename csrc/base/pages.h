// Memory straight from the system: huge pages where there are some, made present by several
// threads.
#pragma once

#include <cstddef>

namespace streamlap::pages {

inline constexpr std::size_t huge_page = std::size_t{2} << 20;

// Whether a child may find the memory in place after a fork.
enum class Fork { shared, kept_out };

// Maps `bytes` of private memory, aligned to huge pages from one of them up, and asks for such
// pages. Memory that a driver is to register is kept out of children before that: a page copied on
// write would part the device's view of it from the process's. Throws Error(out_of_memory).
void* map(std::size_t bytes, Fork fork, bool huge = true);
void unmap(void* pointer, std::size_t bytes) noexcept;

// Makes the pages present, `threads` at once; what they hold stays. False, and nothing done, where
// the memory left to this process's control group would not hold them.
bool populate(void* pointer, std::size_t bytes, int threads);

}  // namespace streamlap::pages
