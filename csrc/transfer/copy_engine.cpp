#include "transfer/copy_engine.h"

#include "base/process.h"

namespace streamlap {
namespace {

constexpr Site site_ready{"engine.record_ready"};
constexpr Site site_after{"engine.copy_after_producer"};
constexpr Site site_after_host{"engine.late_copy_after_producer"};
constexpr Site site_begin{"engine.record_begin"};
constexpr Site site_mark{"engine.record_mark"};
constexpr Site site_end{"engine.record_end"};
constexpr Site site_issued{"engine.record_issued"};
constexpr Site site_failed_now{"engine.record_failed_end"};
constexpr Site site_failed_after{"engine.failed_finish_after_copies"};
constexpr Site site_failed_host{"engine.record_failed_finish"};
constexpr Site site_failed_late{"engine.record_failed_issued"};
constexpr Site site_finish_after{"engine.finish_after_copies"};

}  // namespace

ChunkPlan CopyEngine::plan_for(const TransferRequest& request) const {
  std::vector<LeafExtent> leaves;
  leaves.reserve(request.items.size());
  for (const CopyItem& item : request.items) {
    // A body copies its leaf whole.
    leaves.push_back({item.bytes, item.body ? item.bytes : item.element_bytes});
  }
  return plan_chunks(leaves, request.staged
                                 ? Staging::policy_for(request, staging_options_.slot_bytes)
                                 : request.policy);
}

CopyEngine::Lane& CopyEngine::lane(int device, Direction direction) {
  std::lock_guard lock(mutex_);
  auto& slot = lanes_[{device, direction}];
  if (!slot) {
    auto made = std::make_unique<Lane>();
    made->copy = runtime_->stream_create(device, StreamKind::copy, true);
    made->host = runtime_->stream_create(device, StreamKind::host);
    slot = std::move(made);
  }
  return *slot;
}

std::shared_ptr<Staging> CopyEngine::staging(Lane& lane) {
  std::lock_guard lock(mutex_);
  if (!lane.staging) {
    lane.staging = std::make_shared<Staging>(runtime_, lane.copy.device, staging_options_);
  }
  return lane.staging;
}

std::vector<std::shared_ptr<Staging>> CopyEngine::stagings() const {
  std::vector<std::shared_ptr<Staging>> all;
  std::lock_guard lock(mutex_);
  for (const auto& entry : lanes_) {
    if (entry.second && entry.second->staging) all.push_back(entry.second->staging);
  }
  return all;
}

std::size_t CopyEngine::staging_bytes() const {
  std::size_t bytes = 0;
  for (const auto& staging : stagings()) bytes += staging->bytes();
  return bytes;
}

std::size_t CopyEngine::trim_staging() {
  process::require_usable();
  std::size_t bytes = 0;
  for (const auto& staging : stagings()) bytes += staging->trim();
  return bytes;
}

StreamRef CopyEngine::copy_stream(int device, Direction direction) {
  process::require_usable();
  return lane(device, direction).copy;
}

std::vector<EventPtr> CopyEngine::record_ready(const TransferRequest& request) {
  std::vector<EventPtr> ready;
  ready.reserve(request.after.size());
  for (StreamRef stream : request.after) {
    ready.push_back(runtime_->event_create(stream.device, request.traced));
    runtime_->event_record(*ready.back(), stream, site_ready);
  }
  return ready;
}

std::shared_ptr<Transfer> CopyEngine::submit(TransferRequest request) {
  process::require_usable();
  reap();
  // Each of the three ends a transfer in its own way.
  if (request.staged + request.open_ended + static_cast<bool>(request.finish) > 1) {
    throw Error(ErrorKind::invalid_argument,
                "a transfer is staged, has a last step or an open end: one of them at most");
  }
  auto transfer = std::make_shared<Transfer>(runtime_, plan_for(request), request.keep_source,
                                             request.keep_destination);
  if (transfer->plan_.chunks.empty() && !request.finish && !request.open_ended) {
    transfer->empty_ = true;
    return transfer;
  }
  if (request.direction == Direction::to_host && !request.finish) {
    for (const CopyItem& item : request.items) {
      if (!item.body) transfer->results_.emplace_back(item.dst, item.bytes);
    }
  }
  Lane& lane = this->lane(request.device, request.direction);
  const int device = request.device;
  if (request.timed) transfer->begin_ = runtime_->event_create(device, true);
  transfer->copied_ = runtime_->event_create(device, request.timed || request.traced);
  for (std::size_t i = 1; i < transfer->plan_.marks; ++i) {
    transfer->marks_.push_back(runtime_->event_create(device));
  }
  transfer->marks_.push_back(transfer->copied_);
  transfer->end_ = transfer->copied_;
  if (request.finish || request.open_ended) transfer->end_ = runtime_->event_create(device, true);
  const bool staged_out = request.staged && request.direction == Direction::to_host;
  transfer->waits_on_host_ = request.finish || staged_out;
  transfer->reads_on_host_ = request.staged && !staged_out;
  transfer->read_ = request.staged ? runtime_->event_create(device) : transfer->copied_;
  transfer->whole_only_ = request.finish || request.open_ended;

  const std::vector<EventPtr> ready = record_ready(request);
  if (request.traced) transfer->ready_ = ready;
  std::lock_guard order(lane.order);
  const bool late = request.staged;
  try {
    if (late) {
      issue_late(transfer, std::move(request), lane, ready);
    } else {
      for (const EventPtr& event : ready) runtime_->stream_wait(lane.copy, *event, site_after);
      issue_now(*transfer, request, lane);
    }
  } catch (...) {
    // Some copies may be under way: both ends live until the streams have passed them.
    try {
      end_failed(*transfer, lane, late);
    } catch (...) {
      transfer->keep_for_ever();
    }
    abandon(transfer);
    throw;
  }
  return transfer;
}

// The end of a transfer whose issue failed half-way; its error stays out of the lane.
void CopyEngine::end_failed(Transfer& transfer, Lane& lane, bool late) {
  if (late) {
    if (transfer.issued_) runtime_->event_record(*transfer.issued_, lane.host, site_failed_late);
    runtime_->stream_reset_error(lane.host);
    return;
  }
  runtime_->event_record(*transfer.end_, lane.copy, site_failed_now);
  runtime_->stream_reset_error(lane.copy);
  if (!transfer.waits_on_host_) return;
  // The last step may have been enqueued.
  runtime_->stream_wait(lane.host, *transfer.end_, site_failed_after);
  runtime_->event_record(*transfer.end_, lane.host, site_failed_host);
  runtime_->stream_reset_error(lane.host);
}

void CopyEngine::issue(Transfer& transfer, const TransferRequest& request, StreamRef stream) {
  Runtime& runtime = *transfer.runtime_;
  if (transfer.begin_) runtime.event_record(*transfer.begin_, stream, site_begin);
  const ChunkPlan& plan = transfer.plan_;
  for (std::size_t i = 0; i < plan.chunks.size(); ++i) {
    const Chunk& chunk = plan.chunks[i];
    const CopyItem& item = request.items[chunk.leaf];
    if (item.body) {
      runtime.launch(item.body, stream);
    } else {
      runtime.copy_async(static_cast<std::byte*>(item.dst) + chunk.offset,
                         static_cast<const std::byte*>(item.src) + chunk.offset, chunk.bytes,
                         stream);
    }
    if (plan.records_after(i))
      runtime.event_record(*transfer.marks_[chunk.mark], stream, site_mark);
  }
  if (plan.chunks.empty()) runtime.event_record(*transfer.copied_, stream, site_end);
}

void CopyEngine::issue_now(Transfer& transfer, TransferRequest& request, Lane& lane) {
  issue(transfer, request, lane.copy);
  if (request.finish) {
    runtime_->stream_wait(lane.host, *transfer.copied_, site_finish_after);
    runtime_->launch(std::move(request.finish), lane.host);
    runtime_->event_record(*transfer.end_, lane.host, site_end);
    runtime_->stream_reset_error(lane.host);
  } else if (request.open_ended) {
    runtime_->event_record(*transfer.end_, lane.copy, site_end);  // replaced by complete()
  }
  runtime_->stream_reset_error(lane.copy);
}

void CopyEngine::issue_late(const std::shared_ptr<Transfer>& transfer, TransferRequest request,
                            Lane& lane, const std::vector<EventPtr>& ready) {
  for (const EventPtr& event : ready) runtime_->stream_wait(lane.host, *event, site_after_host);
  transfer->issued_ = runtime_->event_create(request.device);
  auto shared = std::make_shared<TransferRequest>(std::move(request));
  runtime_->launch(
      [transfer, shared, staging = staging(lane)] { staging->issue(*transfer, *shared); },
      lane.host);
  runtime_->event_record(*transfer->issued_, lane.host, site_issued);
  runtime_->stream_reset_error(lane.host);
}

void CopyEngine::complete(Transfer& transfer, StreamRef copy_stream) {
  runtime_->event_record(*transfer.end_, copy_stream, site_end);
}

void CopyEngine::abandon(std::shared_ptr<Transfer> transfer) {
  std::lock_guard lock(mutex_);
  abandoned_.push_back(std::move(transfer));
}

std::size_t CopyEngine::reap() {
  std::vector<std::shared_ptr<Transfer>> finished;  // dies without the lock: it runs arbitrary code
  {
    std::lock_guard lock(mutex_);
    std::erase_if(abandoned_, [&](std::shared_ptr<Transfer>& transfer) {
      if (!transfer->over()) return false;
      finished.push_back(std::move(transfer));
      return true;
    });
    letting_go_ += finished.size();
  }
  const std::size_t gone = finished.size();
  finished.clear();
  std::lock_guard lock(mutex_);
  letting_go_ -= gone;
  return abandoned_.size() + letting_go_;
}

}  // namespace streamlap
