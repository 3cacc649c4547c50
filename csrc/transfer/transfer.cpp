#include "transfer/transfer.h"

#include <limits>

namespace streamlap {
namespace {

constexpr Site site_issued{"transfer.issued"};
constexpr Site site_done{"transfer.done"};
constexpr Site site_leaf{"transfer.leaf"};
constexpr Site site_chunk{"transfer.chunk"};
constexpr Site site_read{"transfer.source_read"};
constexpr Site site_writer{"transfer.writer_waits"};
constexpr Site site_abandoned{"transfer.abandoned_after_current_streams"};
constexpr Site site_consumer{"transfer.consumer_waits"};

}  // namespace

bool Transfer::issued() { return !issued_ || runtime_->event_query(*issued_); }

bool Transfer::issued_for(std::chrono::nanoseconds timeout) {
  return !issued_ || runtime_->event_sync_for(*issued_, timeout, site_issued);
}

// Who is told that it is done knows what those knew who saw it.
bool Transfer::known_done() const {
  if (!done_.load(std::memory_order_acquire)) return false;
  runtime_->lock_acquired(&done_);
  return true;
}

void Transfer::note_done() {
  runtime_->lock_released(&done_);
  done_.store(true, std::memory_order_release);
}

bool Transfer::done() {
  if (known_done()) return true;
  if (!issued() || (!empty_ && !runtime_->event_query(*end_))) return false;
  note_done();
  return true;
}

bool Transfer::sync_for(std::chrono::nanoseconds timeout, bool reads) {
  if (!known_done()) {
    if (!issued_for(timeout)) return false;
    if (!empty_ && !runtime_->event_sync_for(*end_, timeout, site_done)) return false;
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

const Event& Transfer::leaf_event(std::size_t leaf) const {
  const std::size_t mark = plan_.last_mark.at(leaf);
  return mark == ChunkPlan::no_mark || whole_only_ ? *end_ : *marks_[mark];
}

bool Transfer::leaf_done(std::size_t leaf) {
  if (known_done()) return true;
  if (!issued()) return false;
  if (empty_ || plan_.last_mark.at(leaf) == ChunkPlan::no_mark) return true;
  return runtime_->event_query(leaf_event(leaf));
}

bool Transfer::leaf_sync_for(std::size_t leaf, std::chrono::nanoseconds timeout) {
  if (known_done()) return true;
  if (!issued_for(timeout)) return false;
  if (empty_ || plan_.last_mark.at(leaf) == ChunkPlan::no_mark) return true;
  return runtime_->event_sync_for(leaf_event(leaf), timeout, site_leaf);
}

bool Transfer::chunk_sync_for(std::size_t chunk, std::chrono::nanoseconds timeout) {
  if (known_done()) return true;
  if (!issued_for(timeout)) return false;
  const Event& event = whole_only_ ? *end_ : *marks_[plan_.chunks.at(chunk).mark];
  return runtime_->event_sync_for(event, timeout, site_chunk);
}

void Transfer::stream_wait(StreamRef stream) {
  if (!empty_) runtime_->stream_wait(stream, *end_, site_consumer);
}

double Transfer::elapsed_from(const Transfer& first) {
  if (empty_ || first.empty_) return 0.0;
  if (!begin_ || !first.begin_) {
    throw Error(ErrorKind::invalid_argument, "the time of a transfer that was not to be timed");
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

bool Transfer::over() noexcept {
  if (kept_for_ever_) return false;
  // What failed is over too, but the rest must still be asked. With the context lost there is no
  // telling what the device does.
  const auto passed = [](auto&& ask) {
    try {
      return ask();
    } catch (const Error& error) {
      return error.kind() != ErrorKind::sticky;
    } catch (...) {
      return true;
    }
  };
  for (const EventPtr& event : also_after_) {
    if (!passed([&] { return runtime_->event_query(*event); })) return false;
  }
  return passed([&] { return done(); });
}

void Transfer::release_source() {
  std::shared_ptr<void> source;  // dies after the lock is let go: it may run arbitrary code
  std::lock_guard lock(mutex_);
  source.swap(source_);
}

void Transfer::release_all() {
  std::shared_ptr<void> source;
  std::shared_ptr<void> destination;
  std::lock_guard lock(mutex_);
  source.swap(source_);
  destination.swap(destination_);
}

}  // namespace streamlap
