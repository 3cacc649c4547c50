// Memory that is given back at the end of a scope.
#pragma once

#include <sys/mman.h>

#include <cstddef>

#include "device.h"

namespace bench {

enum class Memory { device, pinned, pageable };

class Buffer {
 public:
  Buffer(Device& device, Memory kind, std::size_t bytes)
      : device_(device), kind_(kind), bytes_(bytes) {
    if (kind == Memory::device) {
      data_ = device.runtime()->alloc_device(device.index(), bytes);
    } else if (kind == Memory::pinned) {
      data_ = device.runtime()->alloc_pinned(bytes);
    } else {
      data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (data_ == MAP_FAILED) {
        throw streamlap::Error(streamlap::ErrorKind::out_of_memory,
                               "the system refused " + std::to_string(bytes) + " bytes");
      }
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (kind_ == Memory::device) {
      device_.runtime()->free_device(device_.index(), data_, bytes_);
    } else if (kind_ == Memory::pinned) {
      device_.runtime()->free_pinned(data_, bytes_);
    } else {
      munmap(data_, bytes_);
    }
  }

  std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  Device& device_;
  Memory kind_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

// Throws UsageError when the device has not got so much; `what` says what to make smaller.
void require_device_room(Device& device, std::size_t bytes, const std::string& what);

}  // namespace bench
