// What CopyEngine::submit is asked to do.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "moves/move.h"
#include "runtime/runtime.h"
#include "transfer/chunk_plan.h"

namespace streamlap {

enum class Direction { to_host, to_device };

struct CopyItem {
  void* dst = nullptr;
  const void* src = nullptr;
  std::size_t bytes = 0;
  std::size_t element_bytes = 1;
  // Host runtime only: does the copy in place of a plain memcpy (strides, conversion).
  std::function<void()> body;
  // Staged to the host only: the destination's pages are not present yet, and are made so ahead of
  // the copy.
  bool fresh = false;
};

// Bytes of device memory that a move has written, and where they go.
struct Landing {
  void* dst = nullptr;
  const void* src = nullptr;
  std::size_t bytes = 0;
};

struct TransferRequest {
  int device = 0;
  Direction direction = Direction::to_host;
  std::vector<CopyItem> items;
  // Where there are any, they do what the items say, all at once: these are then destinations only.
  std::vector<moves::MovePtr> moves;
  // Where there are any, one for each move: it writes device memory, on a stream of its own, and
  // what it wrote is copied from there as soon as it is done: see stripes.h.
  std::vector<Landing> landings;
  // The copies start after what these streams have been given so far: the source's producer, and
  // whoever used the destination before.
  std::vector<StreamRef> after;
  ChunkPolicy policy;
  // The host's side is ordinary memory, which no copy engine reaches: see staging.h. Takes no
  // bodies.
  bool staged = false;
  // Runs on a host stream after the copies, before the transfer counts as done.
  std::function<void()> finish;
  // Note when the copies begin and end. Two of them widen the gap between
  // two copies from 2 to 8 us.
  bool timed = true;
  // For a timeline: note when the producers were ready and when the copies ended. Their begin
  // follows from these and from the copy before, and another note would widen the gap between the
  // two.
  bool traced = false;
  // The caller adds work to the copy stream after the copies and then calls complete().
  bool open_ended = false;
  // Of staged, finish and open_ended one at most.
  std::shared_ptr<void> keep_source;
  std::shared_ptr<void> keep_destination;
};

}  // namespace streamlap
