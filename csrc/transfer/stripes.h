// A gather to the host by way of the device's own memory.
//
// A kernel that writes the host's memory itself reaches 95 % of what a copy engine does, and needs
// microseconds more to start and to end. So the kernel packs into device memory, at that memory's
// rate, and the copy engine takes it from there: the first stripe is small and soon packed, and the
// next ones are packed while those before them are on the wire.
#pragma once

#include <cstddef>
#include <vector>

#include "moves/move.h"
#include "transfer/request.h"

namespace streamlap {

struct Stripes {
  std::vector<moves::MovePtr> moves;
  std::vector<Landing> landings;
};

// `gather` in parts that follow each other in its range, each with its landing: `host` is where the
// range of the gather, which is of device memory, goes. What lies between two pieces goes with
// them.
Stripes stripes_of(const moves::Move& gather, std::byte* host, unsigned blocks);

}  // namespace streamlap
