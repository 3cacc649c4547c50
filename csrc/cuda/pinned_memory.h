// Page-locked memory, made the fastest way that this machine has.
//
// cudaHostAlloc finds and clears pages in one thread. Large blocks are mapped here instead, on huge
// pages that several threads make present, and then registered: about five times as fast, unless
// huge pages are scarce. So the first large blocks are timed.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "runtime/runtime.h"

namespace streamlap::cuda {

// Thread-safe. Its functions need a current context and no lock of the caller's.
class PinnedMemory {
 public:
  explicit PinnedMemory(PinnedWay way) : forced_(way) {}

  // Throws Error(out_of_memory). Whatever was refused has left nothing behind.
  void* allocate(std::size_t bytes);
  void free(void* pointer) noexcept;
  // How large blocks are made, in words.
  std::string how() const;

 private:
  enum Way : std::size_t { huge_pages, base_pages, driver };
  static constexpr std::size_t ways = 3;

  struct Result {
    void* pointer = nullptr;
    double seconds = 0;
    bool refused = false;  // by the registration, rather than for want of memory
  };

  Way choose() const;  // mutex_ held
  Result make(Way way, std::size_t bytes);
  void judge(Way way, double rate);

  const PinnedWay forced_;
  mutable std::mutex mutex_;
  std::array<std::optional<double>, ways> rates_;      // bytes a second, 0: refused
  std::unordered_map<void*, std::size_t> registered_;  // bytes by address; the rest is the driver's
  // Two blocks made present at once take longer than one after the other.
  std::mutex populating_;
};

}  // namespace streamlap::cuda
