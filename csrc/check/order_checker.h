// Whether every access to memory is ordered after those that it must come after.
//
// Vector clocks, as in "FastTrack: efficient and precise dynamic race detection" (Flanagan and
// Freund, 2009). Actors are host threads and streams. An operation on a stream comes after what its
// issuer knew and after the stream's work before; a recorded event carries what its stream knew;
// who waits for the event knows it, too. Two accesses to a byte of which one writes must be ordered
// that way, whatever the schedule happened to be.
//
// It sees what is declared: copies, taking and giving back of pool memory, reads of results by the
// host, and what callers tell by declare().
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/runtime.h"

namespace streamlap::order {

using Actor = std::size_t;
using Clock = std::vector<std::uint64_t>;  // by actor; what is beyond the end is 0

void join(Clock& into, const Clock& from);

enum class Mode { read, write };

// One access, small enough to be kept for every piece of memory.
struct Access {
  Actor actor = 0;
  std::uint64_t tick = 0;
  const char* what = "";
  const char* site = "";
  std::size_t bytes = 0;
};

// The last accesses of each byte. Not thread-safe.
class Shadow {
 public:
  // The earlier access that is in conflict with this one and that `known` does not cover, if any;
  // else the access is noted.
  const Access* touch(std::uintptr_t begin, std::size_t bytes, const Access& access, Mode mode,
                      const Clock& known);
  void forget(std::uintptr_t begin, std::size_t bytes);
  std::size_t pieces() const noexcept { return pieces_.size(); }

 private:
  struct Piece {
    std::uintptr_t end = 0;
    bool written = false;
    Access write;
    std::vector<Access> reads;  // one an actor: its last
  };
  using Pieces = std::map<std::uintptr_t, Piece>;

  Pieces::iterator cut(std::uintptr_t at);

  Pieces pieces_;
  Access conflict_;
};

// For threads that hand each other something outside the seam: tells every checker that there is.
// What a lock is, see Runtime::lock_acquired().
void acquired_by_all(const void* lock) noexcept;
void released_by_all(const void* lock) noexcept;

class OrderChecker {
 public:
  OrderChecker();
  ~OrderChecker();
  OrderChecker(const OrderChecker&) = delete;
  OrderChecker& operator=(const OrderChecker&) = delete;

  // What the calling thread, or the callable that it runs, knows; copies, so that it can be kept.
  Clock known();
  void learn(const Clock& clock);

  // An operation is issued to a stream: it comes after what the caller knows. Answers what the
  // stream knows from then on.
  Clock issue(StreamRef stream, Site site);
  Clock stream_knows(StreamRef stream);
  void stream_learns(StreamRef stream, const Clock& clock);
  // What all streams of a device know.
  Clock device_knows(int device);

  // Error(order) where the access races with an earlier one.
  void stream_access(StreamRef stream, const char* what, const void* data, std::size_t bytes,
                     Mode mode);
  void host_access(const char* what, const void* data, std::size_t bytes, Mode mode);
  // Memory that nobody else can know: fresh from the system.
  void fresh(const void* data, std::size_t bytes);

  void acquired(const void* lock);
  void released(const void* lock);
  // What `lock` guards is touched. Where that is not ordered after the time before, the next access
  // throws: this is called where nothing may.
  void guarded(const void* lock, Site site) noexcept;

  std::uint64_t accesses() const;

  // While it lives, the calling thread is a callable on a stream, issued when it knew `clock`.
  class Task {
   public:
    Task(OrderChecker& checker, StreamRef stream, Clock clock);
    ~Task();
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;

   private:
    friend class OrderChecker;
    OrderChecker& checker_;
    StreamRef stream_;
    Actor actor_;
    Clock clock_;
    Task* outer_;
  };

 private:
  using StreamKey = std::pair<std::uintptr_t, int>;

  Actor actor_of(StreamRef stream);
  Actor this_thread();
  Clock& clock_of(Actor actor);
  Task* task() const;
  void access(const Access& access, const Clock& known, const void* data, Mode mode);
  std::string name_of(Actor actor) const;

  mutable std::mutex mutex_;
  std::map<StreamKey, Actor> streams_;
  std::map<std::uint64_t, Actor> threads_;
  std::vector<Clock> clocks_;
  std::vector<std::string> names_;
  std::vector<const char*> sites_;  // the last ordering call of each actor
  std::map<const void*, Clock> locks_;
  std::map<const void*, Access> guarded_;  // by lock: the last touch
  std::string unguarded_;                  // what the next access will say
  Shadow shadow_;
  std::uint64_t accesses_ = 0;
};

}  // namespace streamlap::order
