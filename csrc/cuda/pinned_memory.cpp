#include "cuda/pinned_memory.h"

#include <algorithm>
#include <chrono>

#include "base/pages.h"
#include "cuda/context.h"

namespace streamlap::cuda {
namespace {

// Below, a mapping costs more calls than it saves time.
constexpr std::size_t mapped_from = std::size_t{1} << 20;
// Shorter times say little.
constexpr std::size_t timed_from = std::size_t{32} << 20;
// Bytes a second. Where memory is new to a virtual machine 4 to 5e9 are reached, and cudaHostAlloc
// has 2.6e9 at best.
constexpr double fast_enough = 3e9;

class Clock {
 public:
  // Seconds since the last call.
  double lap() {
    const auto before = last_;
    last_ = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(last_ - before).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace

PinnedMemory::Way PinnedMemory::choose() const {
  switch (forced_) {
    case PinnedWay::huge_pages:
      return huge_pages;
    case PinnedWay::base_pages:
      return base_pages;
    case PinnedWay::driver:
      return driver;
    case PinnedWay::measured:
      break;
  }
  std::size_t best = 0;
  for (std::size_t way = 0; way < ways; ++way) {
    if (!rates_[way]) return static_cast<Way>(way);  // those before it were not fast enough
    if (*rates_[way] >= fast_enough) return static_cast<Way>(way);
    if (*rates_[way] > *rates_[best]) best = way;
  }
  return static_cast<Way>(best);
}

PinnedMemory::Result PinnedMemory::make(Way way, std::size_t bytes) {
  Result result;
  if (way == driver) {
    Clock clock;
    check(cudaHostAlloc(&result.pointer, bytes, cudaHostAllocPortable), "cudaHostAlloc",
          [&] { return std::to_string(bytes) + " bytes"; });
    result.seconds = clock.lap();
    return result;
  }
  void* memory = nullptr;
  try {
    memory = pages::map(bytes, pages::Fork::kept_out, way == huge_pages);
  } catch (const Error&) {
    return result;
  }
  bool present = false;
  try {
    std::lock_guard lock(populating_);
    Clock clock;
    present = pages::populate(memory, bytes, pages::threads());
    result.seconds = clock.lap();
    std::lock_guard books(mutex_);
    registered_.emplace(memory, bytes);  // before the driver knows it: this may fail
  } catch (...) {
    pages::unmap(memory, bytes);
    throw;
  }
  Clock clock;
  const cudaError_t status =
      present ? cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped)
              : cudaErrorMemoryAllocation;
  result.seconds += clock.lap();
  if (status == cudaSuccess) {
    result.pointer = memory;
    return result;
  }
  cudaGetLastError();  // so that nobody else's next call is blamed for it
  {
    std::lock_guard books(mutex_);
    registered_.erase(memory);
  }
  pages::unmap(memory, bytes);
  result.refused = present;
  return result;
}

void* PinnedMemory::allocate(std::size_t bytes) {
  std::size_t way = driver;
  if (bytes >= mapped_from) {
    std::lock_guard lock(mutex_);
    way = choose();
  }
  std::array<bool, ways> refused{};
  for (;; ++way) {
    const Result result = make(static_cast<Way>(way), bytes);  // cudaHostAlloc throws
    refused[way] = result.refused;
    if (result.pointer == nullptr) continue;
    // What is short of memory is refused by all ways; a way is to blame when the next one did it.
    for (std::size_t other = 0; other < way; ++other) {
      if (refused[other]) judge(static_cast<Way>(other), 0);
    }
    if (bytes >= timed_from) {
      judge(static_cast<Way>(way), static_cast<double>(bytes) / std::max(result.seconds, 1e-9));
    }
    return result.pointer;
  }
}

void PinnedMemory::judge(Way way, double rate) {
  std::lock_guard lock(mutex_);
  if (!rates_[way]) rates_[way] = rate;
}

void PinnedMemory::free(void* pointer) noexcept {
  std::size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    if (const auto found = registered_.find(pointer); found != registered_.end()) {
      bytes = found->second;
      registered_.erase(found);
    }
  }
  if (bytes == 0) {
    cudaFreeHost(pointer);
  } else if (cudaHostUnregister(pointer) == cudaSuccess) {
    pages::unmap(pointer, bytes);
  }
  // Memory that the driver did not let go of stays mapped: a device might still write there.
  cudaGetLastError();
}

std::string PinnedMemory::how() const {
  static constexpr std::array<const char*, ways> names{"huge pages, registered",
                                                       "4 KiB pages, registered", "cudaHostAlloc"};
  std::lock_guard lock(mutex_);
  const Way way = choose();
  std::string text = names[way];
  if (rates_[way]) {
    const auto tenths = static_cast<int>(*rates_[way] * 1e-8);
    return text + " (" + std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " GB/s)";
  }
  return text + (forced_ == PinnedWay::measured ? " (not timed yet)" : "");
}

}  // namespace streamlap::cuda
