#include "transfer/transfer.h"

#include <limits>

#include "runtime/order_lock.h"

namespace streamlap {
namespace {

constexpr Site site_issued{"transfer.issued"};
constexpr Site site_ask_issued{"transfer.ask_issued"};
constexpr Site site_done{"transfer.done"};
constexpr Site site_ask_done{"transfer.ask_done"};
constexpr Site site_note_done{"transfer.note_done"};
constexpr Site site_known_done{"transfer.known_done"};
constexpr Site site_leaf{"transfer.leaf"};
constexpr Site site_ask_leaf{"transfer.ask_leaf"};
constexpr Site site_chunk{"transfer.chunk"};
constexpr Site site_read{"transfer.source_read"};
constexpr Site site_writer{"transfer.writer_waits"};
constexpr Site site_abandoned{"transfer.abandoned_after_current_streams"};
constexpr Site site_failed{"transfer.outlives_failed_issue"};
constexpr Site site_ask_abandoned{"transfer.ask_abandoned"};
constexpr Site site_ask_end{"transfer.ask_end"};
constexpr Site site_kept_for_ever{"transfer.kept_for_ever"};
constexpr Site site_owed{"transfer.owed_record"};
constexpr Site site_consumer{"transfer.consumer_waits"};
constexpr Site site_release_source{"transfer.release_source"};
constexpr Site site_release_all{"transfer.release_all"};
constexpr Site site_lock_source{"transfer.lock_release_source"};
constexpr Site site_lock_all{"transfer.lock_release_all"};
constexpr Site site_let_go{"transfer.let_go"};
constexpr Site site_died{"transfer.died"};

}  // namespace

Transfer::~Transfer() { runtime_->lock_acquired(this, site_died); }

void Transfer::let_go() noexcept { runtime_->lock_released(this, site_let_go); }

bool Transfer::issued() { return !issued_ || runtime_->event_query(*issued_, site_ask_issued); }

bool Transfer::issued_for(std::chrono::nanoseconds timeout) {
  return !issued_ || runtime_->event_sync_for(*issued_, timeout, site_issued);
}

// Who is told that it is done knows what those knew who saw it.
bool Transfer::known_done() const {
  if (!done_.load(std::memory_order_acquire)) return false;
  runtime_->lock_acquired(&done_, site_known_done);
  return true;
}

void Transfer::note_done() {
  runtime_->lock_released(&done_, site_note_done);
  done_.store(true, std::memory_order_release);
}

// What the copies of an open end failed with is not on their stream any more when the end is
// recorded: they are asked by themselves.
bool Transfer::whole(Site site) {
  if (open_ended_ && !runtime_->event_query(*copied_, site)) return false;
  return empty_ || runtime_->event_query(*end_, site);
}

bool Transfer::whole_for(std::chrono::nanoseconds timeout, Site site) {
  if (open_ended_ && !runtime_->event_sync_for(*copied_, timeout, site)) return false;
  return empty_ || runtime_->event_sync_for(*end_, timeout, site);
}

bool Transfer::done() {
  if (known_done()) return true;
  if (!issued() || !whole(site_ask_done)) return false;
  note_done();
  return true;
}

bool Transfer::sync_for(std::chrono::nanoseconds timeout, bool reads) {
  if (!known_done()) {
    if (!issued_for(timeout)) return false;
    if (!whole_for(timeout, site_done)) return false;
    note_done();
  }
  if (!reads) return true;
  for (auto [data, bytes] : results_) runtime_->host_reads(data, bytes);
  return true;
}

bool Transfer::source_sync_for(std::chrono::nanoseconds timeout) {
  if (known_done()) return true;
  if (!issued_for(timeout)) return false;
  return empty_ || runtime_->event_sync_for(*read_, timeout, site_read);
}

void Transfer::stream_wait_source(StreamRef stream) {
  if (!empty_) runtime_->stream_wait(stream, *read_, site_writer);
}

bool Transfer::leaf_done(std::size_t leaf) {
  if (known_done()) return true;
  if (!issued()) return false;
  const std::size_t mark = plan_.last_mark.at(leaf);
  if (mark == ChunkPlan::no_mark) return true;
  return whole_only_ ? whole(site_ask_leaf) : runtime_->event_query(*marks_[mark], site_ask_leaf);
}

bool Transfer::leaf_sync_for(std::size_t leaf, std::chrono::nanoseconds timeout) {
  if (known_done()) return true;
  if (!issued_for(timeout)) return false;
  const std::size_t mark = plan_.last_mark.at(leaf);
  if (mark == ChunkPlan::no_mark) return true;
  if (whole_only_) return whole_for(timeout, site_leaf);
  return runtime_->event_sync_for(*marks_[mark], timeout, site_leaf);
}

bool Transfer::chunk_sync_for(std::size_t chunk, std::chrono::nanoseconds timeout) {
  if (known_done()) return true;
  if (!issued_for(timeout)) return false;
  const std::size_t mark = plan_.chunks.at(chunk).mark;
  if (whole_only_) return whole_for(timeout, site_chunk);
  return runtime_->event_sync_for(*marks_[mark], timeout, site_chunk);
}

void Transfer::stream_wait(StreamRef stream) {
  if (open_ended_) runtime_->stream_wait(stream, *copied_, site_consumer);
  if (!empty_) runtime_->stream_wait(stream, *end_, site_consumer);
}

double Transfer::elapsed_from(const Transfer& first) {
  if (empty_ || first.empty_) return 0.0;
  if (!begin_ || !first.begin_) {
    throw Error(ErrorKind::invalid_argument,
                "the time of a transfer that was not timed: pass timed=True");
  }
  return runtime_->event_elapsed(*first.begin_, *copied_);
}

std::pair<double, double> Transfer::interval() {
  if (empty_ || !begin_) {
    const double unknown = std::numeric_limits<double>::quiet_NaN();
    return {unknown, unknown};
  }
  return {runtime_->event_time(*begin_), runtime_->event_time(*end_)};
}

void Transfer::also_after(StreamRef stream) {
  // What a graph being captured uses, it uses when it is replayed: no event of now tells.
  if (runtime_->stream_capturing(stream)) return;
  EventPtr event = runtime_->event_create(stream.device);
  runtime_->event_record(*event, stream, site_abandoned);
  also_after_.push_back(std::move(event));
}

void Transfer::outlive(StreamRef stream) noexcept {
  owed_[owed_count_++] = stream;
  record_owed();
}

// What cannot be recorded now is tried again, and stands for more then: never too early.
bool Transfer::record_owed() noexcept {
  try {
    for (; owed_count_ > 0; --owed_count_) {
      const StreamRef stream = owed_[owed_count_ - 1];
      EventPtr event = runtime_->event_create(stream.device);
      also_after_.reserve(also_after_.size() + owed_count_);
      runtime_->event_record(*event, stream, site_failed);
      also_after_.push_back(std::move(event));
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::sticky) keep_for_ever();
  } catch (...) {
  }
  return owed_count_ == 0 || dropped(site_owed);
}

void Transfer::keep_for_ever() noexcept {
  if (!dropped(site_kept_for_ever)) kept_for_ever_ = true;
}

bool Transfer::passed(const EventPtr& event, Site site) noexcept {
  if (!event) return true;
  const EventState state = runtime_->event_state(*event, site);
  if (state == EventState::lost) keep_for_ever();
  return state == EventState::passed;
}

bool Transfer::ended() noexcept {
  // Asked last: the worker that issues it may have found so just now.
  return (known_done() || (passed(issued_, site_ask_end) && passed(end_, site_ask_end))) &&
         !kept_for_ever_;
}

bool Transfer::over() noexcept {
  if (kept_for_ever_ || !record_owed()) return false;
  for (const EventPtr& event : also_after_) {
    if (!passed(event, site_ask_abandoned)) return false;
  }
  return ended();
}

void Transfer::release_source() {
  if (dropped(site_release_source)) return;
  std::shared_ptr<void> source;  // dies after the lock is let go: it may run arbitrary code
  OrderLock lock(*runtime_, mutex_, site_lock_source);
  source.swap(source_);
}

void Transfer::release_all() {
  if (dropped(site_release_all)) return;
  std::shared_ptr<void> source;
  std::shared_ptr<void> destination;
  OrderLock lock(*runtime_, mutex_, site_lock_all);
  source.swap(source_);
  destination.swap(destination_);
}

}  // namespace streamlap
