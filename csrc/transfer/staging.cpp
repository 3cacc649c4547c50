#include "transfer/staging.h"

#include <algorithm>
#include <deque>
#include <thread>

#include "base/pages.h"

namespace streamlap {
namespace {

constexpr Site site_begin{"staging.record_begin"};
constexpr Site site_moved{"staging.record_moved"};
constexpr Site site_arrival{"staging.arrival_after_dma"};
constexpr Site site_arrived{"staging.record_arrived"};
constexpr Site site_copy_out{"staging.copy_out_after_arrival"};
constexpr Site site_copied_out{"staging.record_copied_out"};
constexpr Site site_in_order{"staging.in_order_after_copy_out"};
constexpr Site site_mark{"staging.record_mark"};
constexpr Site site_read{"staging.record_source_read"};
constexpr Site site_populated{"staging.record_populated"};
constexpr Site site_after_populate{"staging.copy_out_after_populate"};
constexpr Site site_copied_in{"staging.record_copied_in"};
constexpr Site site_dma_after{"staging.dma_after_copy_in"};
constexpr Site site_sent{"staging.record_sent"};
constexpr Site site_device_mark{"staging.record_device_mark"};
constexpr Site site_taken{"staging.record_source_taken"};
constexpr Site site_ask_writer{"staging.ask_writer"};
constexpr Site site_after_writer{"staging.copy_out_after_writer"};
constexpr Site site_drain{"staging.drain"};
constexpr Site site_keep_drain{"staging.keep_what_cannot_be_drained"};
constexpr Site site_keep_fresh{"staging.keep_fresh_destination"};

constexpr std::size_t slot_alignment = 64;
constexpr std::size_t populate_piece = 4 * pages::huge_page;
// Of a transfer's bytes in one chunk: its last copy out of a slot overlaps nothing.
constexpr std::size_t smallest_share = 32;
constexpr std::size_t smallest_chunk = std::size_t{512} << 10;

std::size_t aligned(std::size_t bytes) {
  return (bytes + slot_alignment - 1) / slot_alignment * slot_alignment;
}

void add_written(std::vector<moves::Extent>& ranges, const TransferRequest& request) {
  for (const CopyItem& item : request.items) {
    const auto begin = reinterpret_cast<std::uintptr_t>(item.dst);
    if (item.bytes != 0) ranges.push_back({begin, begin + item.bytes});
  }
}

}  // namespace

void require_valid(const StagingOptions& options) {
  if (options.slots == 0 || options.slot_bytes == 0 || options.copiers < 1 ||
      options.populators < 1) {
    throw Error(ErrorKind::invalid_argument,
                "a ring needs a slot of a byte at least, and a thread for each task");
  }
  if (options.slots > StagingOptions::most_pinned / 2 / options.slot_bytes) {
    throw Error(ErrorKind::invalid_argument, "two rings of " + std::to_string(options.slots) +
                                                 " slots of " + std::to_string(options.slot_bytes) +
                                                 " bytes are more than the " +
                                                 std::to_string(StagingOptions::most_pinned) +
                                                 " bytes that a device's may take");
  }
}

Staging::Staging(std::shared_ptr<Runtime> runtime, int device)
    : runtime_(std::move(runtime)), device_(device), ring_(runtime_, device) {}

// Streams live as long as the runtime: those that were made before one failed are kept.
void Staging::make_streams(const StagingOptions& options) {
  const auto make = [&](StreamRef& stream, StreamKind kind, bool high_priority) {
    if (stream.handle == 0) stream = runtime_->stream_create(device_, kind, high_priority);
  };
  const auto make_all = [&](std::vector<StreamRef>& streams, std::size_t count) {
    streams.resize(std::max(streams.size(), count));
    for (StreamRef& stream : streams) make(stream, StreamKind::host, false);
  };
  make(dma_, StreamKind::copy, true);
  make(arrivals_, StreamKind::host, false);
  make(in_order_, StreamKind::host, false);
  copiers_used_ = static_cast<std::size_t>(options.copiers);
  populators_used_ = static_cast<std::size_t>(options.populators);
  make_all(copiers_, copiers_used_);
  make_all(populators_, populators_used_);
}

ChunkPolicy Staging::policy_for(const TransferRequest& request, std::size_t slot_bytes) {
  std::size_t total = 0;
  std::size_t element = 1;
  bool whole = true;  // a slot holds a whole number of every item's elements
  for (const CopyItem& item : request.items) {
    if (item.body) throw Error(ErrorKind::invalid_argument, "a staged transfer takes no bodies");
    total += item.bytes;
    element = std::max(element, item.element_bytes);
    whole = whole && item.element_bytes != 0 && slot_bytes % item.element_bytes == 0;
  }
  if (element > slot_bytes || (element == slot_bytes && !whole)) {
    throw Error(ErrorKind::invalid_argument, "an element of " + std::to_string(element) +
                                                 " bytes does not fit a slot of " +
                                                 std::to_string(slot_bytes));
  }
  ChunkPolicy policy = request.policy;
  const std::size_t share = std::max(smallest_chunk, aligned(total / smallest_share));
  policy.chunk_bytes = std::min(policy.chunk_bytes, share);
  // A chunk may be longer than its limit by an element, unless that holds a whole number of them.
  if (slot_bytes - element < policy.chunk_bytes) {
    policy.chunk_bytes = whole ? slot_bytes : slot_bytes - element;
  }
  return policy;
}

void Staging::issue(Transfer& transfer, const TransferRequest& request,
                    const StagingOptions& options) {
  if (in_doubt_) {
    if (const std::exception_ptr error = drain()) std::rethrow_exception(error);
  }
  try {
    make_streams(options);
    ring_.shape(options.slot_bytes, options.slots);
    if (request.direction == Direction::to_host) {
      to_host(transfer, request);
    } else {
      to_device(transfer, request);
    }
  } catch (...) {
    if (drain() && !dropped(site_keep_drain)) transfer.keep_for_ever();
    throw;
  }
}

void Staging::to_host(Transfer& transfer, const TransferRequest& request) {
  Runtime& runtime = *runtime_;
  const ChunkPlan& plan = transfer.plan_;
  wait_for_writers(request);
  const std::vector<Present> present = populate(request);
  if (transfer.begin_) runtime.event_record(*transfer.begin_, arrivals_, site_begin);
  for (std::size_t first = 0; first < plan.chunks.size();) {
    Slot& slot = ring_.take();
    const std::size_t last = load_end(plan, first);
    copy(transfer, request, first, last, slot, false, dma_);
    runtime.event_record(*slot.moved, dma_, site_moved);
    runtime.stream_wait(arrivals_, *slot.moved, site_arrival);
    runtime.event_record(*slot.arrived, arrivals_, site_arrived);

    const StreamRef copier = next_copier();
    runtime.stream_wait(copier, *slot.arrived, site_copy_out);
    for (std::size_t i = first; i < last; ++i) {
      const Chunk& chunk = plan.chunks[i];
      const Present& pieces = present[chunk.leaf];
      if (pieces.empty()) continue;
      for (std::size_t piece = chunk.offset / populate_piece;
           piece <= (chunk.offset + chunk.bytes - 1) / populate_piece; ++piece) {
        runtime.stream_wait(copier, *pieces[piece], site_after_populate);
      }
    }
    copy(transfer, request, first, last, slot, true, copier);
    runtime.event_record(*slot.copied, copier, site_copied_out);
    runtime.stream_reset_error(copier);

    runtime.stream_wait(in_order_, *slot.copied, site_in_order);
    if (plan.records_after(last - 1)) {
      runtime.event_record(*transfer.marks_[plan.chunks[last - 1].mark], in_order_, site_mark);
    }
    ring_.put(slot, slot.copied);
    first = last;
  }
  Writes& writes = writing_.emplace_back();
  writes.done = transfer.copied_;
  add_written(writes.ranges, request);
  runtime.event_record(*transfer.read_, dma_, site_read);
  for (StreamRef stream : {dma_, arrivals_, in_order_}) runtime.stream_reset_error(stream);
}

void Staging::to_device(Transfer& transfer, const TransferRequest& request) {
  struct Load {
    Slot* slot;
    std::size_t first;
    std::size_t last;
  };
  Runtime& runtime = *runtime_;
  const ChunkPlan& plan = transfer.plan_;
  if (transfer.begin_) runtime.event_record(*transfer.begin_, dma_, site_begin);
  std::deque<Load> filling;
  for (std::size_t first = 0; first < plan.chunks.size() || !filling.empty();) {
    if (first < plan.chunks.size()) {
      Slot* slot = ring_.take_ready();
      if (slot == nullptr && filling.empty()) slot = &ring_.take();
      if (slot != nullptr) {
        const std::size_t last = load_end(plan, first);
        const StreamRef copier = next_copier();
        copy(transfer, request, first, last, *slot, false, copier);
        runtime.event_record(*slot->copied, copier, site_copied_in);
        runtime.stream_reset_error(copier);
        filling.push_back({slot, first, last});
        first = last;
        continue;
      }
    }
    const Load load = filling.front();
    filling.pop_front();
    sync_event(runtime, *load.slot->copied, site_dma_after);
    copy(transfer, request, load.first, load.last, *load.slot, true, dma_);
    runtime.event_record(*load.slot->moved, dma_, site_sent);
    if (plan.records_after(load.last - 1)) {
      runtime.event_record(*transfer.marks_[plan.chunks[load.last - 1].mark], dma_,
                           site_device_mark);
    }
    ring_.put(*load.slot, load.slot->moved);
  }
  // This thread has waited for every copy out of the source; for a checker, an event says so.
  runtime.event_record(*transfer.read_, in_order_, site_taken);
  for (StreamRef stream : {dma_, in_order_}) runtime.stream_reset_error(stream);
}

std::vector<Staging::Present> Staging::populate(const TransferRequest& request) {
  std::vector<Present> present(request.items.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < request.items.size(); ++i) {
    const CopyItem& item = request.items[i];
    if (!item.fresh) continue;
    for (std::size_t offset = 0; offset < item.bytes; offset += populate_piece) {
      const StreamRef populator = populators_[next++ % populators_used_];
      // The memory must outlive this, however the transfer ends.
      runtime_->launch(
          [piece = static_cast<std::byte*>(item.dst) + offset,
           bytes = std::min(populate_piece, item.bytes - offset),
           keep = dropped(site_keep_fresh) ? nullptr : request.keep_destination] {
            pages::populate(piece, bytes, 1);
          },
          populator);
      present[i].push_back(runtime_->event_create(device_));
      runtime_->event_record(*present[i].back(), populator, site_populated);
      runtime_->stream_reset_error(populator);
    }
  }
  return present;
}

std::size_t Staging::load_end(const ChunkPlan& plan, std::size_t first) const {
  std::size_t used = 0;
  std::size_t index = first;
  do {
    used += aligned(plan.chunks[index].bytes);
    ++index;
  } while (index < plan.chunks.size() && !plan.records_after(index - 1) &&
           used + plan.chunks[index].bytes <= ring_.slot_bytes());
  return index;
}

void Staging::copy(const Transfer& transfer, const TransferRequest& request, std::size_t first,
                   std::size_t last, const Slot& slot, bool from_slot, StreamRef stream) {
  std::byte* place = slot.data;
  for (std::size_t i = first; i < last; ++i) {
    const Chunk& chunk = transfer.plan_.chunks[i];
    const CopyItem& item = request.items[chunk.leaf];
    if (from_slot) {
      runtime_->copy_async(static_cast<std::byte*>(item.dst) + chunk.offset, place, chunk.bytes,
                           stream);
    } else {
      runtime_->copy_async(place, static_cast<const std::byte*>(item.src) + chunk.offset,
                           chunk.bytes, stream);
    }
    place += aligned(chunk.bytes);
  }
}

void Staging::wait_for_writers(const TransferRequest& request) {
  const auto over = [&](const Writes& writes) {
    return runtime_->event_state(*writes.done, site_ask_writer) == EventState::passed;
  };
  std::erase_if(writing_, over);
  for (const Writes& earlier : writing_) {
    std::vector<moves::Extent> ranges = earlier.ranges;
    add_written(ranges, request);
    if (!moves::any_overlap(ranges)) continue;
    try {
      sync_event(*runtime_, *earlier.done, site_after_writer);
    } catch (...) {
      if (!over(earlier)) throw;  // else the error is that transfer's
    }
  }
}

StreamRef Staging::next_copier() { return copiers_[next_copier_++ % copiers_used_]; }

std::exception_ptr Staging::drain() noexcept {
  std::exception_ptr failed;
  const auto settle = [&](StreamRef stream) {
    if (stream.handle == 0) return;
    std::exception_ptr error;
    // A wait that throws the stream's own error has waited and taken it off: the second one cannot.
    for (int waits = 0; waits < 2; ++waits) {
      try {
        runtime_->stream_sync(stream, site_drain);
        return;
      } catch (...) {
        error = std::current_exception();
      }
    }
    failed = error;
  };
  // In the order in which one waits for the other.
  for (StreamRef stream : {dma_, arrivals_}) settle(stream);
  for (StreamRef stream : copiers_) settle(stream);
  settle(in_order_);
  in_doubt_ = failed != nullptr;
  if (!in_doubt_) {
    ring_.reclaim();
    writing_.clear();
  }
  return failed;
}

}  // namespace streamlap
