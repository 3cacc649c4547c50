// The state of one transfer: what keeps its memory alive, and the events that say how far it is.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/runtime.h"
#include "transfer/chunk_plan.h"

namespace streamlap {

// The events of a traced transfer, apart from it: keeping them keeps no memory alive.
struct TransferMarks {
  std::shared_ptr<Runtime> runtime;
  EventPtr issued;              // null: issued by the caller's thread
  std::vector<EventPtr> ready;  // one a producer
  EventPtr begin;               // null: not timed
  EventPtr copied;
  EventPtr end;  // `copied`, unless a last step follows
};

// Made by CopyEngine::submit. Safe from any thread. Errors of the work are thrown by the functions
// that ask how far it is, each time they are asked.
class Transfer {
 public:
  Transfer(std::shared_ptr<Runtime> runtime, ChunkPlan plan, std::shared_ptr<void> source,
           std::shared_ptr<void> destination)
      : runtime_(std::move(runtime)),
        plan_(std::move(plan)),
        source_(std::move(source)),
        destination_(std::move(destination)) {}

  ~Transfer();

  // Whoever lets go of it last knows what the caller knows by now.
  void let_go() noexcept;

  // False while a worker has yet to issue the copies: until then no stream can wait for them.
  bool issued();
  bool issued_for(std::chrono::nanoseconds timeout);

  bool done();
  // `reads`: the caller goes on to read what has come, which a checker is told.
  bool sync_for(std::chrono::nanoseconds timeout, bool reads = true);
  bool leaf_done(std::size_t leaf);
  bool leaf_sync_for(std::size_t leaf, std::chrono::nanoseconds timeout);
  bool chunk_sync_for(std::size_t chunk, std::chrono::nanoseconds timeout);

  // The source has been read, which may be long before the destination is whole.
  bool source_sync_for(std::chrono::nanoseconds timeout);
  // Work issued to `stream` later starts after that. Needs issued() to be true, and
  // source_sync_for() where a host stream reads the source (reads_on_host()).
  void stream_wait_source(StreamRef stream);
  bool reads_on_host() const noexcept { return reads_on_host_; }

  // Work issued to `stream` later starts after the copies. Needs issued() to be true, and done()
  // where the last step ran on the host (waits_on_host()).
  void stream_wait(StreamRef stream);
  // True when the last step runs on a host stream of a device runtime, which no device waits for.
  bool waits_on_host() const noexcept { return waits_on_host_; }

  // Seconds from the start of the first copy of `first` (often this one) to the end of this one's
  // last copy; both must be done.
  double elapsed_from(const Transfer& first);
  // When it began and ended on the runtime's clock; NaN where unknown.
  std::pair<double, double> interval();

  TransferMarks marks() const { return {runtime_, issued_, ready_, begin_, copied_, end_}; }

  const ChunkPlan& plan() const noexcept { return plan_; }
  const std::shared_ptr<Runtime>& runtime() const noexcept { return runtime_; }

  // Lets go of the source before the copy is done. The caller must have ordered every later use of
  // that memory after it, on the stream whose allocator gets it back.
  void release_source();
  // Lets go of both ends; done() must be true.
  void release_all();

  // For an abandoned transfer: both ends also live until `stream` has passed what it has by now.
  void also_after(StreamRef stream);
  // The same of a stream of the engine's, for a transfer whose issue failed; three at most.
  void outlive(StreamRef stream) noexcept;
  // Never lets go: there is no telling what still uses the ends.
  void keep_for_ever() noexcept;
  bool kept_for_ever() const noexcept { return kept_for_ever_; }
  // All that was enqueued for it is known to have ended, well or not.
  bool ended() noexcept;
  // Not ended, but it may yet: no error that was thrown is its own.
  bool pending() noexcept { return !ended() && !kept_for_ever_; }
  // For an abandoned transfer: that, and the streams of also_after() and outlive() have got there.
  bool over() noexcept;

 private:
  friend class CopyEngine;
  friend class Staging;

  bool whole(Site site);
  bool whole_for(std::chrono::nanoseconds timeout, Site site);
  bool record_owed() noexcept;
  bool passed(const EventPtr& event, Site site) noexcept;
  bool known_done() const;
  void note_done();

  std::shared_ptr<Runtime> runtime_;
  ChunkPlan plan_;
  EventPtr issued_;                                           // null: issued by the caller's thread
  std::vector<std::pair<const void*, std::size_t>> results_;  // in host memory, for a checker
  std::vector<EventPtr> ready_;                               // of the producers; empty: not traced
  EventPtr begin_;               // before the first copy; null: not timed
  std::vector<EventPtr> marks_;  // as the plan says; the last is also copied_
  EventPtr copied_;              // after the last copy
  EventPtr read_;                // the source has been read
  EventPtr end_;                 // after everything: copied_, or the last step's
  bool empty_ = false;           // nothing was enqueued
  bool waits_on_host_ = false;
  bool open_ended_ = false;
  bool reads_on_host_ = false;
  bool whole_only_ = false;  // a last step follows the copies: no leaf is ready before end_
  std::atomic<bool> done_{false};
  std::atomic<bool> kept_for_ever_{false};
  std::vector<EventPtr> also_after_;
  std::array<StreamRef, 3> owed_;  // of outlive(): not recorded yet
  std::size_t owed_count_ = 0;
  std::shared_ptr<Transfer> next_;  // in the engine's list, guarded by its lock
  std::mutex mutex_;                // guards the two below
  std::shared_ptr<void> source_;
  std::shared_ptr<void> destination_;
};

}  // namespace streamlap
