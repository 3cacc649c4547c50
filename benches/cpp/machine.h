// The machine, and how much memory may still be taken here.
#pragma once

#include <cstddef>
#include <string>

namespace bench {

struct Machine {
  std::string cpu;
  std::string kernel;
  std::size_t cores = 0;   // that this process may use
  std::size_t memory = 0;  // bytes
};

Machine this_machine();

// Bytes that can be had without swapping or meeting the limit of a control group.
std::size_t host_room();

// Throws UsageError when `bytes` of host memory are not there; `what` says what to make smaller.
void require_host_room(std::size_t bytes, const std::string& what);

}  // namespace bench
