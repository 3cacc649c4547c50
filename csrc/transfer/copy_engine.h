// Dedicated copy streams, one per device and direction, and the order of work on them.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/runtime.h"
#include "transfer/transfer.h"

namespace streamlap {

enum class Direction { to_host, to_device };

struct CopyItem {
  void* dst = nullptr;
  const void* src = nullptr;
  std::size_t bytes = 0;
  std::size_t element_bytes = 1;
  // Host runtime only: does the copy in place of a plain memcpy (strides, conversion).
  std::function<void()> body;
};

struct TransferRequest {
  int device = 0;
  Direction direction = Direction::to_host;
  std::vector<CopyItem> items;
  // Where there are any, they do what the items say, all at once: these are then destinations only.
  std::vector<moves::MovePtr> moves;
  // The copies start after what these streams have been given so far: the source's producer, and
  // whoever used the destination before.
  std::vector<StreamRef> after;
  ChunkPolicy policy;
  // The copy call may block (ordinary memory in a driver): a host stream makes it.
  bool from_host_stream = false;
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
  // Of from_host_stream, finish and open_ended one at most.
  std::shared_ptr<void> keep_source;
  std::shared_ptr<void> keep_destination;
};

class CopyEngine {
 public:
  explicit CopyEngine(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
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
  const std::shared_ptr<Runtime>& runtime() const noexcept { return runtime_; }

 private:
  struct Lane {
    StreamRef copy;
    StreamRef blocking;  // copies that may block the issuing thread; issued by `host`
    StreamRef host;
    std::mutex order;  // one transfer's calls are issued together
  };

  Lane& lane(int device, Direction direction);
  static void issue(Transfer& transfer, const TransferRequest& request, StreamRef stream);
  void issue_now(Transfer& transfer, TransferRequest& request, Lane& lane);
  void issue_late(const std::shared_ptr<Transfer>& transfer, TransferRequest request, Lane& lane,
                  const std::vector<EventPtr>& ready);
  void end_failed(Transfer& transfer, Lane& lane, bool late) noexcept;
  static void drain(Transfer& transfer, StreamRef stream) noexcept;
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
  std::mutex mutex_;
  std::map<std::pair<int, Direction>, std::unique_ptr<Lane>> lanes_;
  std::shared_ptr<Transfer> abandoned_;  // the first of a list: giving one up needs no memory
  std::size_t abandoned_count_ = 0;
  std::size_t letting_go_ = 0;  // taken off the list, not destroyed yet
};

}  // namespace streamlap
