// What Python holds of a pinned block.
#pragma once

#include <memory>
#include <vector>

#include "base/process.h"
#include "bindings/types.h"

namespace streamlap::bindings {

// torch tells nobody about work it enqueues on memory it did not allocate. So when a block's last
// view dies, its last use is taken to be whatever the current streams have been given by then.
// A copy into the block shares it, and may outlive the views.
class PyBlock {
 public:
  explicit PyBlock(std::shared_ptr<PinnedBlock> block) : block_(std::move(block)) {}
  PyBlock(const PyBlock&) = delete;
  PyBlock& operator=(const PyBlock&) = delete;
  ~PyBlock() {
    if (process::leaking()) {
      new std::shared_ptr<PinnedBlock>(std::move(block_));
      return;
    }
    block_->pool().runtime()->lock_acquired(&interpreter_lock, site_interpreter);
    try {
      const std::vector<PyStream> streams = current_streams(block_->pool().runtime());
      if (streams.empty()) return;
      GilRelease released;  // a driver call waits when a stream's queue is full
      for (const PyStream& stream : streams) {
        // On an idle stream an event is done, but may not be seen to be when this block is taken
        // next: the pool would grow in its place.
        if (!known_idle(stream)) block_->record_use(stream.ref);
      }
    } catch (...) {
      block_->condemn();
    }
  }

  const std::shared_ptr<PinnedBlock>& block() const { return block_; }

 private:
  static bool known_idle(const PyStream& stream) {
    if (stream.runtime->stream_capturing(stream.ref)) return false;
    try {
      return stream.runtime->stream_idle(stream.ref);
    } catch (...) {
      return false;  // then an event tells
    }
  }

  std::shared_ptr<PinnedBlock> block_;
};

// Waits, interruptibly, for blocks in flight where the limit asks for it.
std::shared_ptr<PinnedBlock> allocate_block(PinnedPool& pool, std::size_t bytes);

}  // namespace streamlap::bindings
