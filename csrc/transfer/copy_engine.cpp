#include "transfer/copy_engine.h"

#include <algorithm>
#include <limits>

#include "base/process.h"
#include "runtime/order_lock.h"

namespace streamlap {
namespace {

constexpr Site site_ready{"engine.record_ready"};
constexpr Site site_after{"engine.copy_after_producer"};
constexpr Site site_after_host{"engine.late_copy_after_producer"};
constexpr Site site_pack_after{"engine.pack_after_producer"};
constexpr Site site_packed{"engine.record_packed"};
constexpr Site site_after_pack{"engine.copy_after_pack"};
constexpr Site site_begin{"engine.record_begin"};
constexpr Site site_mark{"engine.record_mark"};
constexpr Site site_end{"engine.record_end"};
constexpr Site site_issued{"engine.record_issued"};
constexpr Site site_finish_after{"engine.finish_after_copies"};
constexpr Site site_keep_source{"engine.keep_source"};
constexpr Site site_keep_destination{"engine.keep_destination"};
constexpr Site site_keep_failed{"engine.keep_failed_issue"};
constexpr Site site_keep_abandoned{"engine.keep_abandoned"};
constexpr Site site_over{"engine.let_go_when_over"};
constexpr Site site_letting_go{"engine.count_letting_go"};
constexpr Site site_lock_lanes{"engine.lock_lanes"};
constexpr Site site_lock_order{"engine.lock_order"};
constexpr Site site_lock_abandon{"engine.lock_abandon"};
constexpr Site site_lock_reap{"engine.lock_reap"};
constexpr Site site_lock_reaped{"engine.lock_reaped"};
constexpr Site site_lock_configure{"engine.lock_configure"};
constexpr Site site_lock_options{"engine.lock_options"};
constexpr Site site_lock_stagings{"engine.lock_stagings"};

using Keep = std::shared_ptr<void>;

// A chunk size that cuts nothing, and an event after nothing but the last.
constexpr std::size_t whole = std::numeric_limits<std::size_t>::max();

}  // namespace

ChunkPlan CopyEngine::plan_for(const TransferRequest& request, std::size_t slot_bytes) {
  std::vector<LeafExtent> leaves;
  leaves.reserve(request.items.size());
  for (const CopyItem& item : request.items) {
    // A body copies its leaf whole.
    leaves.push_back({item.bytes, item.body ? item.bytes : item.element_bytes});
  }
  if (!request.moves.empty()) return plan_chunks(leaves, {whole, whole});
  return plan_chunks(leaves,
                     request.staged ? Staging::policy_for(request, slot_bytes) : request.policy);
}

CopyEngine::Lane& CopyEngine::lane(int device, Direction direction, bool packs) {
  OrderLock lock(*runtime_, mutex_, site_lock_lanes);
  auto& slot = lanes_[{device, direction}];
  if (!slot) {
    auto made = std::make_unique<Lane>();
    made->staging = std::make_shared<Staging>(runtime_, device);
    slot = std::move(made);
  }
  // Streams live as long as the runtime: those that were made before one failed are kept.
  const auto make = [&](StreamRef& stream, StreamKind kind, bool high_priority) {
    if (stream.handle == 0) stream = runtime_->stream_create(device, kind, high_priority);
  };
  make(slot->copy, StreamKind::copy, true);
  make(slot->host, StreamKind::host, false);
  if (packs) make(slot->pack, StreamKind::compute, true);
  return *slot;
}

void CopyEngine::configure_staging(const StagingOptions& options) {
  require_valid(options);
  OrderLock lock(*runtime_, mutex_, site_lock_configure);
  staging_options_ = options;
}

StagingOptions CopyEngine::staging_options() const {
  OrderLock lock(*runtime_, mutex_, site_lock_options);
  return staging_options_;
}

std::vector<std::shared_ptr<Staging>> CopyEngine::stagings() const {
  std::vector<std::shared_ptr<Staging>> all;
  OrderLock lock(*runtime_, mutex_, site_lock_stagings);
  for (const auto& entry : lanes_) {
    if (entry.second) all.push_back(entry.second->staging);
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
  for (const CopyItem& item : request.items) {
    if (!request.moves.empty()) break;  // they have been looked at
    if (item.body) continue;            // it knows where from and where to
    if (item.bytes != 0 && (item.src == nullptr || item.dst == nullptr)) {
      throw Error(ErrorKind::invalid_argument, "a copy from or to memory that was freed");
    }
  }
  const StagingOptions options = staging_options();
  auto transfer = std::make_shared<Transfer>(
      runtime_, plan_for(request, options.slot_bytes),
      dropped(site_keep_source) ? Keep() : request.keep_source,
      dropped(site_keep_destination) ? Keep() : request.keep_destination);
  if (transfer->plan_.chunks.empty() && !request.finish && !request.open_ended) {
    transfer->empty_ = true;
    return transfer;
  }
  if (runtime_->checked() && request.direction == Direction::to_host && !request.finish) {
    for (const CopyItem& item : request.items) {
      if (!item.body) transfer->results_.emplace_back(item.dst, item.bytes);
    }
  }
  const bool packs = !request.landings.empty();
  if (packs && (request.landings.size() != request.moves.size() || request.staged)) {
    throw Error(ErrorKind::invalid_argument, "each move that packs has one landing");
  }
  Lane& lane = this->lane(request.device, request.direction, packs);
  const int device = request.device;
  const std::shared_ptr<void> held = runtime_->hold_device(device);
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
  transfer->open_ended_ = request.open_ended;
  const bool read_early = request.staged || packs;
  transfer->read_ = read_early ? runtime_->event_create(device) : transfer->copied_;
  transfer->whole_only_ = request.finish || request.open_ended;

  const std::vector<EventPtr> ready = record_ready(request);
  if (request.traced) transfer->ready_ = ready;
  OrderLock order(*runtime_, lane.order, site_lock_order);
  const bool late = request.staged;
  try {
    if (late) {
      issue_late(transfer, std::move(request), lane, ready, options);
    } else {
      for (const EventPtr& event : ready) runtime_->stream_wait(lane.copy, *event, site_after);
      for (const EventPtr& event : ready) {
        if (packs) runtime_->stream_wait(lane.pack, *event, site_pack_after);
      }
      issue_now(*transfer, request, lane);
    }
  } catch (...) {
    end_failed(*transfer, lane, late, packs);
    if (!dropped(site_keep_failed)) abandon(transfer);
    throw;
  }
  return transfer;
}

// Some copies may be under way, and the last step may have been enqueued.
void CopyEngine::end_failed(Transfer& transfer, Lane& lane, bool late, bool packs) noexcept {
  if (!late) cut_off(transfer, lane.copy);
  if (packs) cut_off(transfer, lane.pack);
  if (late || transfer.waits_on_host_) cut_off(transfer, lane.host);
}

void CopyEngine::cut_off(Transfer& transfer, StreamRef stream) noexcept {
  transfer.outlive(stream);
  try {
    runtime_->stream_reset_error(stream);
  } catch (...) {
    // The next transfer there may be told this one's error; it cannot be lost.
  }
}

// The copy engine takes what one move has packed while the next is packed.
void CopyEngine::issue_landings(Transfer& transfer, const TransferRequest& request,
                                const Lane& lane) {
  Runtime& runtime = *transfer.runtime_;
  for (std::size_t i = 0; i < request.moves.size(); ++i) {
    runtime.move(request.moves[i], lane.pack);
    // Only now: telling a device of a kernel takes longer than the kernel.
    if (i == 0 && transfer.begin_) runtime.event_record(*transfer.begin_, lane.copy, site_begin);
    // After the last of them the source has been read.
    const bool last = i + 1 == request.moves.size();
    const EventPtr packed = last ? transfer.read_ : runtime.event_create(request.device);
    runtime.event_record(*packed, lane.pack, site_packed);
    runtime.stream_wait(lane.copy, *packed, site_after_pack);
    const Landing& landing = request.landings[i];
    for (std::size_t at = 0; at < landing.bytes; at += request.policy.chunk_bytes) {
      runtime.copy_async(static_cast<std::byte*>(landing.dst) + at,
                         static_cast<const std::byte*>(landing.src) + at,
                         std::min(request.policy.chunk_bytes, landing.bytes - at), lane.copy);
    }
  }
  runtime.stream_reset_error(lane.pack);
}

void CopyEngine::issue(Transfer& transfer, const TransferRequest& request, const Lane& lane) {
  Runtime& runtime = *transfer.runtime_;
  const StreamRef stream = lane.copy;
  const ChunkPlan& plan = transfer.plan_;
  if (request.landings.empty()) {
    if (transfer.begin_) runtime.event_record(*transfer.begin_, stream, site_begin);
    for (const moves::MovePtr& move : request.moves) runtime.move(move, stream);
  } else {
    issue_landings(transfer, request, lane);
  }
  for (std::size_t i = 0; i < plan.chunks.size(); ++i) {
    const Chunk& chunk = plan.chunks[i];
    const CopyItem& item = request.items[chunk.leaf];
    if (!request.moves.empty()) {
      // It is under way.
    } else if (item.body) {
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
  issue(transfer, request, lane);
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
                            Lane& lane, const std::vector<EventPtr>& ready,
                            const StagingOptions& options) {
  // Of a transfer whose error could not be taken off when it was issued.
  runtime_->stream_reset_error(lane.host);
  for (const EventPtr& event : ready) runtime_->stream_wait(lane.host, *event, site_after_host);
  transfer->issued_ = runtime_->event_create(request.device);
  auto shared = std::make_shared<TransferRequest>(std::move(request));
  runtime_->launch([transfer, shared, staging = lane.staging,
                    options] { staging->issue(*transfer, *shared, options); },
                   lane.host);
  runtime_->event_record(*transfer->issued_, lane.host, site_issued);
  runtime_->stream_reset_error(lane.host);
}

void CopyEngine::complete(Transfer& transfer, StreamRef copy_stream) {
  runtime_->event_record(*transfer.end_, copy_stream, site_end);
  runtime_->stream_reset_error(copy_stream);
}

CopyEngine::~CopyEngine() {
  // What is kept for ever outlives its engine, too; reachable, it is no leak to a leak checker.
  static auto* for_ever = new std::atomic<std::shared_ptr<Transfer>>();
  while (abandoned_) {  // not as one chain of destructors
    std::shared_ptr<Transfer> transfer = pop(abandoned_);
    if (!transfer->kept_for_ever()) continue;
    transfer->next_ = for_ever->load();
    while (!for_ever->compare_exchange_weak(transfer->next_, transfer)) {
    }
  }
}

std::shared_ptr<Transfer> CopyEngine::pop(std::shared_ptr<Transfer>& list) noexcept {
  std::shared_ptr<Transfer> first = std::move(list);
  list = std::move(first->next_);
  return first;
}

void CopyEngine::push(std::shared_ptr<Transfer>& list, std::shared_ptr<Transfer> item) noexcept {
  item->next_ = std::move(list);
  list = std::move(item);
}

void CopyEngine::abandon(std::shared_ptr<Transfer> transfer) noexcept {
  if (dropped(site_keep_abandoned)) return;
  OrderLock lock(*runtime_, mutex_, site_lock_abandon);
  push(abandoned_, std::move(transfer));
  ++abandoned_count_;
}

CopyEngine::Left CopyEngine::let_go_of_finished() noexcept {
  std::shared_ptr<Transfer> finished;  // dies without the lock: it runs arbitrary code
  std::size_t gone = 0;
  {
    OrderLock lock(*runtime_, mutex_, site_lock_reap);
    std::shared_ptr<Transfer> kept;
    while (abandoned_) {
      std::shared_ptr<Transfer> transfer = pop(abandoned_);
      const bool over = dropped(site_over) || transfer->over();
      gone += over;
      push(over ? finished : kept, std::move(transfer));
    }
    abandoned_ = std::move(kept);
    abandoned_count_ -= gone;
    if (gone == 0) return left();
    if (!dropped(site_letting_go)) letting_go_ += gone;
  }
  while (finished) pop(finished);
  OrderLock lock(*runtime_, mutex_, site_lock_reaped);
  if (!dropped(site_letting_go)) letting_go_ -= gone;
  return left();
}

CopyEngine::Left CopyEngine::left() const noexcept {
  Left left{abandoned_count_ + letting_go_, letting_go_ > 0};
  for (const Transfer* transfer = abandoned_.get(); transfer; transfer = transfer->next_.get()) {
    left.expected = left.expected || !transfer->kept_for_ever();
  }
  return left;
}

std::size_t CopyEngine::reap() noexcept { return let_go_of_finished().count; }

bool CopyEngine::expects() noexcept { return let_go_of_finished().expected; }

}  // namespace streamlap
