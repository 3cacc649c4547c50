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
  explicit CopyEngine(std::shared_ptr<Runtime> runtime, StagingOptions staging = staging_options())
      : runtime_(std::move(runtime)), staging_options_(staging) {}
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Enqueues and returns; never waits for a device. When it throws after something was enqueued,
  // both ends stay alive until that is done.
  std::shared_ptr<Transfer> submit(TransferRequest request);
  // The end of an open-ended transfer is what its copy stream has been given by now.
  void complete(Transfer& transfer, StreamRef copy_stream);
  StreamRef copy_stream(int device, Direction direction);

  // Takes over a transfer that its last user let go of, and keeps both ends alive until it is done.
  void abandon(std::shared_ptr<Transfer> transfer);
  // Lets go of abandoned transfers that are done; the number that still hold their ends, be it in
  // another thread's call of this.
  std::size_t reap();
  // Page-locked bytes that all rings hold, and giving the idle ones back to the system.
  std::size_t staging_bytes() const;
  std::size_t trim_staging();
  const std::shared_ptr<Runtime>& runtime() const noexcept { return runtime_; }

 private:
  struct Lane {
    StreamRef copy;
    StreamRef host;                    // last steps, and the issue of staged copies
    std::shared_ptr<Staging> staging;  // made for the first of these
    std::mutex order;                  // one transfer's calls are issued together
  };

  Lane& lane(int device, Direction direction);
  std::shared_ptr<Staging> staging(Lane& lane);
  std::vector<std::shared_ptr<Staging>> stagings() const;
  ChunkPlan plan_for(const TransferRequest& request) const;
  static void issue(Transfer& transfer, const TransferRequest& request, StreamRef stream);
  void issue_now(Transfer& transfer, TransferRequest& request, Lane& lane);
  void issue_late(const std::shared_ptr<Transfer>& transfer, TransferRequest request, Lane& lane,
                  const std::vector<EventPtr>& ready);
  void end_failed(Transfer& transfer, Lane& lane, bool late);
  std::vector<EventPtr> record_ready(const TransferRequest& request);

  std::shared_ptr<Runtime> runtime_;
  const StagingOptions staging_options_;
  mutable std::mutex mutex_;
  std::map<std::pair<int, Direction>, std::unique_ptr<Lane>> lanes_;
  std::vector<std::shared_ptr<Transfer>> abandoned_;
  std::size_t letting_go_ = 0;  // taken off the list, not destroyed yet
};

}  // namespace streamlap
