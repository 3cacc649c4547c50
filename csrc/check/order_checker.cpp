#include "check/order_checker.h"

#include <algorithm>
#include <atomic>

#include "base/process.h"

namespace streamlap::order {
namespace {

// The rules, each of which the mutation gate leaves out.
constexpr Site rule_first_byte{"check.first_byte"};
constexpr Site rule_last_byte{"check.last_byte"};
constexpr Site rule_read_after_write{"check.read_after_write"};
constexpr Site rule_write_after_write{"check.write_after_write"};
constexpr Site rule_write_after_read{"check.write_after_read"};
constexpr Site rule_read_after_read{"check.read_after_read"};
constexpr Site rule_note_write{"check.note_write"};
constexpr Site rule_note_read{"check.note_read"};
constexpr Site rule_note_again{"check.note_read_again"};
constexpr Site rule_every_reader{"check.every_reader_counts"};
constexpr Site rule_fresh{"check.fresh"};
constexpr Site rule_task{"check.task_is_its_stream"};
constexpr Site rule_task_teaches{"check.task_teaches_its_stream"};
constexpr Site rule_learn{"check.thread_learns"};
constexpr Site rule_learn_task{"check.task_learns"};
constexpr Site rule_issue{"check.stream_learns_from_thread"};
constexpr Site rule_issue_task{"check.stream_learns_from_task"};
constexpr Site rule_tick_stream{"check.operation_ticks_its_stream"};
constexpr Site rule_tick_stream_task{"check.operation_of_a_task_ticks_its_stream"};
constexpr Site rule_tick_thread{"check.operation_ticks_its_thread"};
constexpr Site rule_stream_learns{"check.stream_learns_from_event"};
constexpr Site rule_device{"check.device_knows_its_streams"};
constexpr Site rule_own_device{"check.device_knows_no_others"};
constexpr Site rule_acquired{"check.lock_teaches_thread"};
constexpr Site rule_acquired_task{"check.lock_teaches_task"};
constexpr Site rule_released{"check.thread_teaches_lock"};
constexpr Site rule_released_task{"check.task_teaches_lock"};
constexpr Site rule_tick_released{"check.release_ticks_its_thread"};
constexpr Site rule_guarded{"check.guarded_needs_its_lock"};

thread_local OrderChecker::Task* t_task = nullptr;

// Not std::thread::id: the system gives a thread that ended's to the next one.
std::uint64_t thread_number() {
  static std::atomic<std::uint64_t> next{0};
  thread_local const std::uint64_t number = ++next;
  return number;
}

std::uint64_t at(const Clock& clock, Actor actor) {
  return actor < clock.size() ? clock[actor] : 0;
}

void tick(Clock& clock, Actor actor) {
  if (clock.size() <= actor) clock.resize(actor + 1);
  ++clock[actor];
}

struct Checkers {
  std::atomic<std::size_t> count{0};
  std::mutex mutex;
  std::vector<OrderChecker*> all;
};

Checkers& checkers() {
  static auto* made = new Checkers();
  return *made;
}

bool covers(const Clock& known, const Access& access) {
  return at(known, access.actor) >= access.tick;
}

}  // namespace

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// ---- memory

Shadow::Pieces::iterator Shadow::cut(std::uintptr_t where) {
  auto next = pieces_.upper_bound(where);
  if (next == pieces_.begin()) return next;
  auto before = std::prev(next);
  if (before->first == where) return before;
  if (before->second.end <= where) return next;
  Piece rest = before->second;
  before->second.end = where;
  return pieces_.emplace_hint(next, where, std::move(rest));
}

const Access* Shadow::touch(std::uintptr_t begin, std::size_t bytes, const Access& access,
                            Mode mode, const Clock& known) {
  if (bytes == 0) return nullptr;
  if (dropped(rule_first_byte)) ++begin;
  const std::uintptr_t end = begin + bytes - (dropped(rule_first_byte) || dropped(rule_last_byte));
  const auto first = cut(begin);
  cut(end);
  // Looked at as a whole before anything is noted: a refused access leaves no trace.
  for (auto piece = first; piece != pieces_.end() && piece->first < end; ++piece) {
    const Piece& found = piece->second;
    const Site rule = mode == Mode::read ? rule_read_after_write : rule_write_after_write;
    if (found.written && !covers(known, found.write) && !dropped(rule)) {
      conflict_ = found.write;
      return &conflict_;
    }
    if (mode == Mode::read && !dropped(rule_read_after_read)) continue;
    for (const Access& read : found.reads) {
      if (!covers(known, read) && !dropped(rule_write_after_read)) {
        conflict_ = read;
        return &conflict_;
      }
    }
  }
  if (dropped(mode == Mode::write ? rule_note_write : rule_note_read)) return nullptr;
  if (mode == Mode::write) {
    pieces_.erase(first, pieces_.lower_bound(end));
    pieces_[begin] = {end, true, access, {}};
    return nullptr;
  }
  std::uintptr_t done = begin;
  for (auto piece = pieces_.lower_bound(begin); done < end;) {
    if (piece == pieces_.end() || piece->first > done) {
      const std::uintptr_t gap_end = piece == pieces_.end() ? end : std::min(end, piece->first);
      pieces_.emplace_hint(piece, done, Piece{gap_end, false, {}, {access}});
      done = gap_end;
      continue;
    }
    auto& reads = piece->second.reads;
    auto own = std::find_if(reads.begin(), reads.end(),
                            [&](const Access& read) { return read.actor == access.actor; });
    if (dropped(rule_every_reader)) {
      reads = {access};
    } else if (own == reads.end()) {
      reads.push_back(access);
    } else if (!dropped(rule_note_again)) {
      *own = access;
    }
    done = piece->second.end;
    ++piece;
  }
  return nullptr;
}

void Shadow::forget(std::uintptr_t begin, std::size_t bytes) {
  if (bytes == 0 || dropped(rule_fresh)) return;
  const auto first = cut(begin);
  cut(begin + bytes);
  pieces_.erase(first, pieces_.lower_bound(begin + bytes));
}

// ---- all of them

OrderChecker::OrderChecker() {
  std::lock_guard lock(checkers().mutex);
  checkers().all.push_back(this);
  checkers().count = checkers().all.size();
}

OrderChecker::~OrderChecker() {
  std::lock_guard lock(checkers().mutex);
  std::erase(checkers().all, this);
  checkers().count = checkers().all.size();
}

void acquired_by_all(const void* lock_id) noexcept {
  if (checkers().count == 0) return;
  std::lock_guard lock(checkers().mutex);
  for (OrderChecker* checker : checkers().all) checker->acquired(lock_id);
}

void released_by_all(const void* lock_id) noexcept {
  if (checkers().count == 0) return;
  std::lock_guard lock(checkers().mutex);
  for (OrderChecker* checker : checkers().all) checker->released(lock_id);
}

// ---- actors

Actor OrderChecker::new_actor(Clock& clock, std::string name) {
  const Actor made = names_.size();
  tick(clock, made);
  names_.push_back(std::move(name));
  sites_.push_back("");
  return made;
}

OrderChecker::Known& OrderChecker::known_to(StreamRef stream) {
  const auto [entry, fresh] = streams_.try_emplace({stream.handle, stream.device});
  Known& made = entry->second;
  if (fresh) {
    static constexpr const char* kinds[] = {"compute", "copy", "host"};
    made.actor = new_actor(made.clock, "stream " + std::to_string(streams_.size()) + " (" +
                                           kinds[static_cast<int>(stream.kind)] + ", device " +
                                           std::to_string(stream.device) + ")");
  }
  return made;
}

OrderChecker::Known& OrderChecker::known_here() {
  // Of a thread that ends nothing is kept but what it did.
  struct End {
    ~End() {
      if (process::forked()) return;  // whoever held the lock did not come along
      std::lock_guard lock(checkers().mutex);
      for (OrderChecker* checker : checkers().all) checker->thread_ended(thread_number());
    }
  };
  thread_local const End end;
  return threads_[thread_number()];
}

OrderChecker::Known& OrderChecker::acting_here() {
  Known& here = known_here();
  // A clock is as long as there are actors: who only hands on what others know is none.
  if (!here.actor) {
    here.actor = new_actor(here.clock, "host thread " + std::to_string(++acting_threads_));
  }
  return here;
}

void OrderChecker::thread_ended(std::uint64_t number) noexcept {
  std::lock_guard lock(mutex_);
  threads_.erase(number);
}

OrderChecker::Task* OrderChecker::task() const {
  for (Task* task = t_task; task != nullptr; task = task->outer_) {
    if (&task->checker_ == this) return task;
  }
  return nullptr;
}

OrderChecker::Task::Task(OrderChecker& checker, StreamRef stream, Clock clock)
    : checker_(checker), stream_(stream), actor_(0), clock_(std::move(clock)), outer_(t_task) {
  {
    std::lock_guard lock(checker_.mutex_);
    actor_ = *checker_.known_to(stream).actor;
  }
  if (!dropped(rule_task)) t_task = this;
}

OrderChecker::Task::~Task() {
  t_task = outer_;
  // What comes after it on its stream knows the same.
  if (!dropped(rule_task_teaches)) checker_.stream_learns(stream_, clock_);
}

Clock OrderChecker::known() {
  std::lock_guard lock(mutex_);
  if (const Task* running = task()) return running->clock_;
  return known_here().clock;
}

void OrderChecker::learn(const Clock& clock) {
  std::lock_guard lock(mutex_);
  if (Task* running = task()) {
    if (!dropped(rule_learn_task)) join(running->clock_, clock);
    return;
  }
  Known& here = known_here();
  if (!dropped(rule_learn)) join(here.clock, clock);
}

Clock OrderChecker::issue(StreamRef stream, Site site) {
  std::lock_guard lock(mutex_);
  Known& on = known_to(stream);
  if (Task* running = task()) {
    if (!dropped(rule_issue_task)) join(on.clock, running->clock_);
    if (!dropped(rule_tick_stream_task)) tick(on.clock, *on.actor);
  } else {
    Known& here = acting_here();
    if (!dropped(rule_issue)) join(on.clock, here.clock);
    if (!dropped(rule_tick_stream)) tick(on.clock, *on.actor);
    // What the thread does from here on is not before the operation.
    if (!dropped(rule_tick_thread)) tick(here.clock, *here.actor);
    if (*site.name != 0) sites_[*here.actor] = site.name;
  }
  if (*site.name != 0) sites_[*on.actor] = site.name;
  return on.clock;
}

Clock OrderChecker::stream_knows(StreamRef stream) {
  std::lock_guard lock(mutex_);
  return known_to(stream).clock;
}

void OrderChecker::stream_learns(StreamRef stream, const Clock& clock) {
  std::lock_guard lock(mutex_);
  Known& on = known_to(stream);
  if (!dropped(rule_stream_learns)) join(on.clock, clock);
}

Clock OrderChecker::device_knows(int device) {
  std::lock_guard lock(mutex_);
  Clock all;
  for (const auto& [key, on] : streams_) {
    const bool asked = key.second == device || dropped(rule_own_device);
    if (asked && !dropped(rule_device)) join(all, on.clock);
  }
  return all;
}

// ---- accesses

std::string OrderChecker::name_of(Actor actor) const { return names_[actor]; }

void OrderChecker::access(const Access& access, const Clock& known, const void* data, Mode mode) {
  ++accesses_;
  if (!unguarded_.empty()) throw Error(ErrorKind::order, std::exchange(unguarded_, {}));
  const Access* earlier =
      shadow_.touch(reinterpret_cast<std::uintptr_t>(data), access.bytes, access, mode, known);
  if (earlier == nullptr) return;
  const auto told = [&](const Access& one) {
    return std::string(one.what) + " of " + std::to_string(one.bytes) + " bytes by " +
           name_of(one.actor) + (*one.site == 0 ? "" : std::string(" after ") + one.site);
  };
  throw Error(ErrorKind::order, "two accesses to the same memory are not ordered: " + told(access) +
                                    ", and before it " + told(*earlier));
}

void OrderChecker::stream_access(StreamRef stream, const char* what, const void* data,
                                 std::size_t bytes, Mode mode) {
  std::lock_guard lock(mutex_);
  const Known& on = known_to(stream);
  const Actor self = *on.actor;
  access({self, at(on.clock, self), what, sites_[self], bytes}, on.clock, data, mode);
}

void OrderChecker::host_access(const char* what, const void* data, std::size_t bytes, Mode mode) {
  std::lock_guard lock(mutex_);
  if (const Task* running = task()) {
    access({running->actor_, at(running->clock_, running->actor_), what, sites_[running->actor_],
            bytes},
           running->clock_, data, mode);
    return;
  }
  const Known& here = acting_here();
  const Actor self = *here.actor;
  access({self, at(here.clock, self), what, sites_[self], bytes}, here.clock, data, mode);
}

void OrderChecker::fresh(const void* data, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  shadow_.forget(reinterpret_cast<std::uintptr_t>(data), bytes);
}

void OrderChecker::acquired(const void* lock_id) {
  std::lock_guard lock(mutex_);
  const Clock& left = locks_[lock_id];
  if (Task* running = task()) {
    if (!dropped(rule_acquired_task)) join(running->clock_, left);
    return;
  }
  Known& here = known_here();
  if (!dropped(rule_acquired)) join(here.clock, left);
}

void OrderChecker::released(const void* lock_id) {
  std::lock_guard lock(mutex_);
  if (const Task* running = task()) {
    if (!dropped(rule_released_task)) join(locks_[lock_id], running->clock_);
    return;
  }
  Known& here = known_here();
  if (!dropped(rule_released)) join(locks_[lock_id], here.clock);
  if (here.actor && !dropped(rule_tick_released)) tick(here.clock, *here.actor);
}

void OrderChecker::guarded(const void* lock_id, Site site) noexcept {
  std::lock_guard lock(mutex_);
  const Task* running = task();
  const Known* here = running != nullptr ? nullptr : &acting_here();
  const Actor self = running != nullptr ? running->actor_ : *here->actor;
  const Clock& known = running != nullptr ? running->clock_ : here->clock;
  Access& last = guarded_[lock_id];
  if (!covers(known, last) && !dropped(rule_guarded)) {
    unguarded_ = std::string("what a lock guards was touched without it: at ") + site.name +
                 " by " + name_of(self) + ", and before it at " + last.site + " by " +
                 name_of(last.actor);
  }
  last = {self, at(known, self), "", site.name, 0};
}

std::uint64_t OrderChecker::accesses() const {
  std::lock_guard lock(mutex_);
  return accesses_;
}

std::size_t OrderChecker::threads() const {
  std::lock_guard lock(mutex_);
  return threads_.size();
}

}  // namespace streamlap::order
