// Dedicated copy streams, one per device and direction, and the order of work on them.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/runtime.h"
#include "transfer/request.h"
#include "transfer/staging.h"
#include "transfer/transfer.h"

namespace streamlap {

class CopyEngine {
 public:
  explicit CopyEngine(std::shared_ptr<Runtime> runtime, StagingOptions staging = {})
      : runtime_(std::move(runtime)), staging_options_(staging) {
    require_valid(staging);
  }
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Enqueues and returns; never waits for a device. When it throws after something was enqueued,
  // both ends stay alive until that is done.
  std::shared_ptr<Transfer> submit(TransferRequest request);
  // The end of an open-ended transfer is what its copy stream has been given by now.
  void complete(Transfer& transfer, StreamRef copy_stream);
  // Instead of that, for one that is about to be abandoned: it ends with what the stream has been
  // given by now, and what failed there is taken off.
  void cut_off(Transfer& transfer, StreamRef stream) noexcept;
  StreamRef copy_stream(int device, Direction direction);

  // Takes over a transfer that its last user let go of, and keeps both ends alive until it is done.
  void abandon(std::shared_ptr<Transfer> transfer) noexcept;
  // Lets go of abandoned transfers that are done; the number that still hold their ends, be it in
  // another thread's call of this.
  std::size_t reap() noexcept;
  // Whether any of these may yet let go: not those that are kept for ever.
  bool expects() noexcept;
  // How later transfers are staged. Throws Error(invalid_argument) for what is no ring, or holds
  // more than StagingOptions::most_pinned in both directions.
  void configure_staging(const StagingOptions& options);
  StagingOptions staging_options() const;
  // Page-locked bytes that all rings hold, and giving the idle ones back to the system.
  std::size_t staging_bytes() const;
  std::size_t trim_staging();
  const std::shared_ptr<Runtime>& runtime() const noexcept { return runtime_; }

 private:
  struct Lane {
    StreamRef copy;
    StreamRef host;  // last steps, and the issue of staged copies
    StreamRef pack;  // moves into device memory; made when there is one
    std::shared_ptr<Staging> staging;
    std::mutex order;  // one transfer's calls are issued together
  };

  Lane& lane(int device, Direction direction, bool packs = false);
  std::vector<std::shared_ptr<Staging>> stagings() const;
  static ChunkPlan plan_for(const TransferRequest& request, std::size_t slot_bytes);
  static void issue(Transfer& transfer, const TransferRequest& request, const Lane& lane);
  static void issue_landings(Transfer& transfer, const TransferRequest& request, const Lane& lane);
  void issue_now(Transfer& transfer, TransferRequest& request, Lane& lane);
  void issue_late(const std::shared_ptr<Transfer>& transfer, TransferRequest request, Lane& lane,
                  const std::vector<EventPtr>& ready, const StagingOptions& options);
  void end_failed(Transfer& transfer, Lane& lane, bool late, bool packs) noexcept;
  static std::shared_ptr<Transfer> pop(std::shared_ptr<Transfer>& list) noexcept;
  static void push(std::shared_ptr<Transfer>& list, std::shared_ptr<Transfer> item) noexcept;
  // What still holds its ends, be it in another thread's call of this; and whether any of it ever
  // comes to its end.
  struct Left {
    std::size_t count = 0;
    bool expected = false;
  };
  Left let_go_of_finished() noexcept;
  Left left() const noexcept;  // mutex_ held
  std::vector<EventPtr> record_ready(const TransferRequest& request);

  std::shared_ptr<Runtime> runtime_;
  mutable std::mutex mutex_;
  StagingOptions staging_options_;
  std::map<std::pair<int, Direction>, std::unique_ptr<Lane>> lanes_;
  std::shared_ptr<Transfer> abandoned_;  // the first of a list: giving one up needs no memory
  std::size_t abandoned_count_ = 0;
  std::size_t letting_go_ = 0;  // taken off the list, not destroyed yet
};

}  // namespace streamlap
