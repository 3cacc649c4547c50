#include "sim/runtime_sim.h"

#include <cxxabi.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <sstream>
#include <utility>

#include "base/process.h"

namespace streamlap::sim {
namespace {

using RealClock = std::chrono::steady_clock;

constexpr double forever = std::numeric_limits<double>::infinity();
constexpr unsigned char unwritten = 0xA5;  // what a copy's destination holds while it runs
// Another host thread that does nothing for so long is taken for one that waits elsewhere.
constexpr auto real_patience = std::chrono::milliseconds(250);
constexpr auto real_nap = std::chrono::milliseconds(1);
// A host that asks so often whether something is done lets it be done.
constexpr std::size_t patient_polls = 64;

thread_local bool t_stands_by = false;
thread_local double t_spent = 0;
thread_local const void* t_body_of = nullptr;      // the simulation whose callable this thread runs
thread_local const void* t_body_stream = nullptr;  // and the stream that it is on

const char* kind_word(StreamKind kind) {
  switch (kind) {
    case StreamKind::copy:
      return "copy";
    case StreamKind::host:
      return "host";
    case StreamKind::compute:
      break;
  }
  return "compute";
}

// Destroys what it is given without the lock: that may run anything.
template <class Lock, class Value>
void drop_unlocked(Lock& lock, Value value) {
  lock.unlock();
  value = {};
  lock.lock();
}

}  // namespace

// One recording of an event.
struct SimRuntime::Mark {
  bool done = false;
  std::exception_ptr error;
  double time = 0;
  std::size_t stream = 0;
  StreamKind kind = StreamKind::compute;

  void rethrow_if_failed() const {
    if (error) std::rethrow_exception(error);
  }
};

struct SimRuntime::GateState {
  std::atomic<bool> open{false};
  std::atomic<bool> timed_out{false};
};

struct SimRuntime::Op {
  enum class Kind { task, copy, move, wait, record, reset, gate };
  Kind kind = Kind::task;
  double issued = 0;
  std::function<void()> body;
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  std::size_t bytes = 0;
  moves::MovePtr move;
  moves::MovePtr own;  // that, from what the sources held at the start
  MarkPtr mark;
  std::shared_ptr<GateState> gate;
  bool started = false;
  double end = 0;
  std::vector<std::byte> read;  // what the source held at the start
};

struct SimRuntime::Stream {
  std::size_t number = 0;
  StreamRef ref;
  std::deque<Op> ops;
  bool busy = false;  // a callable of it is running, or being destroyed
  std::exception_ptr error;
  double free_at = 0;

  std::string name() const {
    return std::to_string(number) + " (" + kind_word(ref.kind) + ", device " +
           std::to_string(ref.device) + ")";
  }
};

class SimRuntime::SimEvent final : public Event {
 public:
  MarkPtr get() const {
    std::lock_guard lock(mutex_);
    return mark_;
  }
  void set(MarkPtr mark) {
    std::lock_guard lock(mutex_);
    mark_.swap(mark);
  }

 private:
  mutable std::mutex mutex_;
  MarkPtr mark_;
};

class SimRuntime::SimGate final : public Gate {
 public:
  explicit SimGate(std::shared_ptr<GateState> state) : state_(std::move(state)) {}
  ~SimGate() override { open(); }
  void open() noexcept override { state_->open = true; }
  bool timed_out() const noexcept override { return state_->timed_out; }

 private:
  std::shared_ptr<GateState> state_;
};

// The threads that use a simulation, and how many of them are blocked in it. A thread that ends
// leaves by itself.
struct SimRuntime::Attendance {
  std::mutex mutex;
  std::map<std::thread::id, int> blocked;  // how often it is blocked: callables nest
  RealClock::time_point last = RealClock::now();

  struct Leaver {
    std::vector<std::weak_ptr<Attendance>> joined;
    ~Leaver() {
      if (process::forked()) return;  // whoever held one of the locks did not come along
      for (auto& weak : joined) {
        if (auto attendance = weak.lock()) {
          std::lock_guard lock(attendance->mutex);
          attendance->blocked.erase(std::this_thread::get_id());
        }
      }
    }
  };

  static void enter(const std::shared_ptr<Attendance>& self, int change = 0) {
    if (t_stands_by) return;
    thread_local Leaver leaver;
    std::lock_guard lock(self->mutex);
    self->last = RealClock::now();
    auto [entry, fresh] = self->blocked.try_emplace(std::this_thread::get_id(), 0);
    if (fresh) leaver.joined.push_back(self);
    entry->second += change;
  }
};

SimRuntime::SimRuntime(SimOptions options, std::unique_ptr<Strategy> strategy)
    : options_(options),
      strategy_(std::move(strategy)),
      attendance_(std::make_shared<Attendance>()) {}

SimRuntime::~SimRuntime() = default;

void SimRuntime::stand_by() noexcept { t_stands_by = true; }

void SimRuntime::spend(double seconds) {
  if (t_body_of == nullptr) {
    throw Error(ErrorKind::invalid_argument, "only a callable on a simulated stream spends time");
  }
  t_spent += seconds;
}

Decisions SimRuntime::decisions() const {
  std::lock_guard lock(mutex_);
  return decisions_;
}

std::string SimRuntime::stream_name(StreamRef stream) const { return stream_of(stream).name(); }

SimRuntime::Stream& SimRuntime::stream_of(StreamRef stream) const {
  return *reinterpret_cast<Stream*>(stream.handle);
}

SimRuntime::MarkPtr SimRuntime::mark_of(const Event& event) {
  return static_cast<const SimEvent&>(event).get();
}

void SimRuntime::check_device(int device) const {
  if (device < 0 || device >= options_.devices) {
    throw Error(ErrorKind::invalid_argument, "no simulated device " + std::to_string(device));
  }
}

// ---- memory

void* SimRuntime::map(std::size_t bytes) {
  void* pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pointer == MAP_FAILED) {
    throw Error(ErrorKind::out_of_memory, "the system refused " + std::to_string(bytes) + " bytes");
  }
  return pointer;
}

void* SimRuntime::alloc_pinned(std::size_t bytes) { return map(bytes); }

void SimRuntime::free_pinned(void* pointer, std::size_t bytes) noexcept { munmap(pointer, bytes); }

void* SimRuntime::alloc_device(int device, std::size_t bytes) {
  check_device(device);
  void* pointer = map(bytes);
  std::lock_guard lock(mutex_);
  device_memory_[static_cast<const std::byte*>(pointer)] = bytes;
  return pointer;
}

void SimRuntime::free_device(int, void* pointer, std::size_t bytes) noexcept {
  {
    std::lock_guard lock(mutex_);
    device_memory_.erase(static_cast<const std::byte*>(pointer));
  }
  munmap(pointer, bytes);
}

// ---- issuing

StreamRef SimRuntime::stream_create(int device, StreamKind kind, bool) {
  check_device(device);
  process::require_usable();
  Lock lock(mutex_);
  auto made = std::make_unique<Stream>();
  made->number = streams_.size();
  made->ref = {reinterpret_cast<std::uintptr_t>(made.get()), device, kind};
  streams_.push_back(std::move(made));
  return streams_.back()->ref;
}

void SimRuntime::issue(Lock& lock, Stream& stream, Op op) {
  Attendance::enter(attendance_);
  op.issued = now_;
  stream.ops.push_back(std::move(op));
  polls_ = 0;
  run_beside_host(lock, false);
  changed_.notify_all();
}

void SimRuntime::run_beside_host(Lock& lock, bool callables) {
  for (;;) {
    const std::vector<Choice> open = choices(forever, callables);
    if (open.empty()) return;
    if (!strategy_->moves_beside_host(open)) {
      if (!finished_) decisions_.push_back(-1);
      return;
    }
    step(lock, forever, callables);
  }
}

void SimRuntime::copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) {
  Stream& on = stream_of(stream);
  Op op;
  op.kind = Op::Kind::copy;
  op.dst = static_cast<std::byte*>(dst);
  op.src = static_cast<const std::byte*>(src);
  op.bytes = bytes;
  Lock lock(mutex_);
  if (options_.device_rules && stream.kind == StreamKind::host &&
      (on_device(op.src) || on_device(op.dst))) {
    throw Error(ErrorKind::invalid_argument, "a host stream reaches no device memory");
  }
  issue(lock, on, std::move(op));
}

void SimRuntime::move(moves::MovePtr move, StreamRef stream) {
  Stream& on = stream_of(stream);
  if (options_.device_rules && stream.kind == StreamKind::host) {
    throw Error(ErrorKind::invalid_argument, "a move needs a device's stream, not a host stream");
  }
  Op op;
  op.kind = Op::Kind::move;
  // For what it costs: where it goes, and what travels.
  const moves::Piece& first = move->pieces.front();
  if (move->way == moves::Way::checksum) {
    op.dst = reinterpret_cast<std::byte*>(move->counts);
    op.src = first.far;
  } else {
    const moves::Sides sides = moves::sides_of(first, move->base, move->way == moves::Way::gather);
    op.dst = sides.dst;
    op.src = sides.src;
  }
  for (const moves::Access& access : moves::accesses_of(*move)) {
    // What is on the side of the one range; of a checksum what is read.
    if (access.writes == (move->way == moves::Way::gather)) op.bytes += access.bytes;
  }
  op.move = std::move(move);
  Lock lock(mutex_);
  issue(lock, on, std::move(op));
}

void SimRuntime::launch(std::function<void()> task, StreamRef stream) {
  Stream& on = stream_of(stream);
  if (options_.device_rules && stream.kind != StreamKind::host) {
    throw Error(ErrorKind::invalid_argument, "callables run on streams of kind host only");
  }
  Op op;
  op.body = std::move(task);
  Lock lock(mutex_);
  issue(lock, on, std::move(op));
}

SimRuntime::MarkPtr SimRuntime::record(Lock& lock, Stream& stream) {
  Op op;
  op.kind = Op::Kind::record;
  op.mark = std::make_shared<Mark>();
  op.mark->stream = stream.number;
  op.mark->kind = stream.ref.kind;
  MarkPtr mark = op.mark;
  issue(lock, stream, std::move(op));
  return mark;
}

void SimRuntime::stream_wait(StreamRef stream, const Event& event, Site) {
  MarkPtr mark = mark_of(event);
  if (!mark) return;
  Lock lock(mutex_);
  if (options_.device_rules && stream.kind != StreamKind::host && mark->kind == StreamKind::host) {
    if (!mark->done) {
      throw Error(ErrorKind::invalid_argument,
                  "a device's stream cannot wait for host work that is not finished");
    }
    mark->rethrow_if_failed();
    return;
  }
  Op op;
  op.kind = Op::Kind::wait;
  op.mark = std::move(mark);
  issue(lock, stream_of(stream), std::move(op));
}

void SimRuntime::stream_reset_error(StreamRef stream) {
  Op op;
  op.kind = Op::Kind::reset;
  Lock lock(mutex_);
  issue(lock, stream_of(stream), std::move(op));
}

EventPtr SimRuntime::event_create(int, bool) { return std::make_shared<SimEvent>(); }

void SimRuntime::event_record(Event& event, StreamRef stream, Site) {
  MarkPtr mark;
  {
    // The event stands for the new mark before the device can get there.
    Lock lock(mutex_);
    Op op;
    op.kind = Op::Kind::record;
    mark = op.mark = std::make_shared<Mark>();
    Stream& on = stream_of(stream);
    mark->stream = on.number;
    mark->kind = on.ref.kind;
    static_cast<SimEvent&>(event).set(mark);
    issue(lock, on, std::move(op));
  }
}

std::unique_ptr<Gate> SimRuntime::gate(StreamRef stream) {
  Op op;
  op.kind = Op::Kind::gate;
  op.gate = std::make_shared<GateState>();
  auto made = std::make_unique<SimGate>(op.gate);
  Lock lock(mutex_);
  issue(lock, stream_of(stream), std::move(op));
  return made;
}

// ---- moving

double SimRuntime::start_time(const Stream& stream, const Op& op) const {
  double time = std::max(stream.free_at, op.issued);
  if (op.kind == Op::Kind::wait) time = std::max(time, op.mark->time);
  if (op.kind == Op::Kind::gate) time = std::max(time, now_);  // it was opened by now
  return time;
}

std::vector<Choice> SimRuntime::choices(double until, bool callables) const {
  std::vector<Choice> open;
  for (const auto& stream : streams_) {
    if (stream->busy || stream->ops.empty()) continue;
    const Op& head = stream->ops.front();
    if (head.kind == Op::Kind::task && !callables) continue;
    if (head.kind == Op::Kind::wait && !head.mark->done) continue;
    if (head.kind == Op::Kind::gate && !head.gate->open) continue;
    const double time = head.started ? head.end : start_time(*stream, head);
    if (time <= until) open.push_back({stream->number, time});
  }
  return open;
}

bool SimRuntime::step(Lock& lock, double until, bool callables) {
  const std::vector<Choice> open = choices(until, callables);
  if (open.empty()) return false;
  const std::size_t picked = strategy_->pick(open);
  if (!finished_) decisions_.push_back(static_cast<int>(open[picked].stream));
  advance(lock, *streams_[open[picked].stream]);
  changed_.notify_all();
  return true;
}

bool SimRuntime::on_device(const std::byte* pointer) const {
  auto after = device_memory_.upper_bound(pointer);
  if (after == device_memory_.begin()) return false;
  --after;
  return pointer < after->first + after->second;
}

double SimRuntime::cost(const Op& op) const {
  const bool from = on_device(op.src);
  const bool to = on_device(op.dst);
  const CostModel& model = options_.cost;
  const double rate = from && to ? model.on_device
                      : from     ? model.to_host
                      : to       ? model.to_device
                                 : model.memcpy;
  return model.per_copy + (rate > 0 ? static_cast<double>(op.bytes) / rate : 0);
}

// Copies of one device in one direction take turns, whatever stream they are on.
double* SimRuntime::engine_of(const Op& op, const Stream& stream) {
  const bool from = on_device(op.src);
  if (from == on_device(op.dst)) return nullptr;
  return &engines_[{stream.ref.device, from ? 0 : 1}];
}

// What the source holds now is what arrives; until it does, nobody may read the destination.
void SimRuntime::begin_bytes(Op& op) {
  if (op.kind == Op::Kind::copy) {
    op.read.assign(op.src, op.src + op.bytes);
    std::memset(op.dst, unwritten, op.bytes);
    return;
  }
  op.own = std::make_shared<moves::Move>(moves::with_own_sources(*op.move, op.read));
  for (const moves::Access& access : moves::accesses_of(*op.move)) {
    if (access.writes) std::memset(access.data, unwritten, access.bytes);
  }
}

void SimRuntime::end_bytes(Op& op) {
  if (op.kind == Op::Kind::copy) {
    if (op.bytes > 0) std::memcpy(op.dst, op.read.data(), op.bytes);
  } else {
    moves::run(*op.own);
  }
}

void SimRuntime::advance(Lock& lock, Stream& stream) {
  Op& head = stream.ops.front();
  const double start = start_time(stream, head);
  switch (head.kind) {
    case Op::Kind::record: {
      head.mark->error = stream.error;
      head.mark->time = stream.free_at = start;
      head.mark->done = true;
      stream.ops.pop_front();
      return;
    }
    case Op::Kind::wait: {
      stream.free_at = start;
      if (!stream.error) stream.error = head.mark->error;
      stream.ops.pop_front();
      return;
    }
    case Op::Kind::reset: {
      std::exception_ptr error = std::move(stream.error);
      stream.error = nullptr;
      stream.ops.pop_front();
      drop_unlocked(lock, std::move(error));
      return;
    }
    case Op::Kind::gate: {
      stream.free_at = start;
      if (head.gate->timed_out && !options_.device_rules && !stream.error) {
        stream.error = std::make_exception_ptr(
            Error(ErrorKind::runtime, "a gate was not opened within its limit"));
      }
      stream.ops.pop_front();
      return;
    }
    case Op::Kind::copy:
    case Op::Kind::move: {
      if (stream.error) {
        stream.ops.pop_front();
        return;
      }
      if (!head.started) {
        double* engine = engine_of(head, stream);
        const double begin = engine == nullptr ? start : std::max(start, *engine);
        begin_bytes(head);
        head.end = begin + cost(head);
        if (engine != nullptr) *engine = head.end;
        head.started = true;
        return;
      }
      end_bytes(head);
      stream.free_at = head.end;
      stream.ops.pop_front();
      return;
    }
    case Op::Kind::task: {
      Op op = std::move(head);
      stream.ops.pop_front();
      run_body(lock, stream, op);
      return;
    }
  }
}

void SimRuntime::run_body(Lock& lock, Stream& stream, Op& op) {
  const double start = start_time(stream, op);
  const bool skipped = stream.error != nullptr;
  stream.busy = true;
  ++bodies_;
  lock.unlock();

  const void* outer = std::exchange(t_body_of, this);
  const void* outer_stream = std::exchange(t_body_stream, &stream);
  const double outer_spent = std::exchange(t_spent, 0.0);
  std::exception_ptr thrown;
  try {
    if (!skipped) op.body();
  } catch (abi::__forced_unwind&) {
    throw;  // the interpreter ends this thread
  } catch (...) {
    thrown = std::current_exception();
  }
  op.body = nullptr;  // what it holds is let go before anything later is reported done
  const double spent = std::exchange(t_spent, outer_spent);
  t_body_of = outer;
  t_body_stream = outer_stream;

  lock.lock();
  --bodies_;
  stream.busy = false;
  if (!skipped) stream.free_at = start + options_.cost.task + spent;
  if (thrown && !stream.error) stream.error = thrown;
}

bool SimRuntime::help() {
  Lock lock(mutex_);
  Attendance::enter(attendance_);
  return step(lock, forever);
}

void SimRuntime::finish() {
  Lock lock(mutex_);
  strategy_ = eager();
  finished_ = true;
  while (step(lock, forever)) {
  }
}

void SimRuntime::poll() {
  Lock lock(mutex_);
  Attendance::enter(attendance_);
  run_beside_host(lock, true);
  if (++polls_ % patient_polls == 0) step(lock, forever);
}

// ---- waiting

bool SimRuntime::others_may_act() const {
  std::lock_guard lock(attendance_->mutex);
  if (RealClock::now() - attendance_->last > real_patience) return false;
  const auto self = std::this_thread::get_id();
  return std::any_of(attendance_->blocked.begin(), attendance_->blocked.end(),
                     [&](const auto& entry) { return entry.first != self && entry.second == 0; });
}

bool SimRuntime::block(Lock& lock, const MarkPtr& mark, std::chrono::nanoseconds timeout,
                       const std::string& who) {
  const bool endless = timeout == std::chrono::nanoseconds::max();
  const double deadline = endless ? forever : now_ + std::chrono::duration<double>(timeout).count();
  if (timeout <= std::chrono::nanoseconds(0)) return mark->done;
  const bool inside = t_body_of == this;
  Attendance::enter(attendance_, +1);
  if (inside) --bodies_;
  auto mine = deadlines_.end();
  if (!endless) mine = deadlines_.insert(deadline);
  const auto leave = [&](bool answer) {
    if (mine != deadlines_.end()) deadlines_.erase(mine);
    if (inside) ++bodies_;
    Attendance::enter(attendance_, -1);
    return answer;
  };
  for (;;) {
    if (mark->done && mark->time <= deadline) {
      now_ = std::max(now_, mark->time);
      return leave(true);
    }
    try {
      if (step(lock, deadline)) continue;
    } catch (...) {
      leave(false);
      throw;
    }
    if (bodies_ > 0 || others_may_act()) {
      changed_.wait_for(lock, real_nap);
      continue;
    }
    // Everything stands still: the next time limit comes.
    double limit = forever;
    GateState* gate = nullptr;
    for (const auto& stream : streams_) {
      if (stream->busy || stream->ops.empty()) continue;
      const Op& head = stream->ops.front();
      if (head.kind != Op::Kind::gate || head.gate->open) continue;
      const double end = std::max(stream->free_at, head.issued) + Gate::limit_seconds;
      if (end < limit) {
        limit = end;
        gate = head.gate.get();
      }
    }
    const double first = deadlines_.empty() ? forever : *deadlines_.begin();
    if (gate != nullptr && limit < first) {
      now_ = std::max(now_, limit);
      gate->timed_out = true;
      gate->open = true;
      continue;
    }
    if (!endless && deadline <= first) {
      now_ = std::max(now_, deadline);
      return leave(mark->done && mark->time <= now_);
    }
    if (first < forever) {
      changed_.wait_for(lock, real_nap);  // another thread's limit comes first; it takes it
      continue;
    }
    std::string report = deadlock_report(who);
    leave(false);
    throw Error(ErrorKind::runtime, report);
  }
}

std::string SimRuntime::deadlock_report(const std::string& who) const {
  std::ostringstream text;
  text << "deadlock at " << now_ << " s: " << who << ", and nothing can move";
  for (const auto& stream : streams_) {
    if (stream->ops.empty()) continue;
    const Op& head = stream->ops.front();
    text << "; stream " << stream->name() << " has " << stream->ops.size() << " operations, first ";
    if (stream->busy) {
      text << "a callable that is running";
    } else if (head.kind == Op::Kind::wait) {
      text << "a wait for stream " << streams_[head.mark->stream]->name();
    } else if (head.kind == Op::Kind::gate) {
      text << "a closed gate";
    } else {
      text << "one that could move";
    }
  }
  return text.str();
}

bool SimRuntime::event_query(const Event& event, Site) {
  MarkPtr mark = mark_of(event);
  if (!mark) return true;
  Lock lock(mutex_);
  if (!mark->done) return false;
  now_ = std::max(now_, mark->time);
  mark->rethrow_if_failed();
  return true;
}

EventState SimRuntime::event_state(const Event& event, Site) noexcept {
  MarkPtr mark = mark_of(event);
  if (!mark) return EventState::passed;
  Lock lock(mutex_);
  if (!mark->done) return EventState::pending;
  now_ = std::max(now_, mark->time);
  return EventState::passed;
}

bool SimRuntime::event_sync_for(const Event& event, std::chrono::nanoseconds timeout, Site site) {
  MarkPtr mark = mark_of(event);
  if (!mark) return true;
  Lock lock(mutex_);
  const std::string who = std::string("a host thread waits for stream ") +
                          streams_[mark->stream]->name() + " at " + site.name;
  if (!block(lock, mark, timeout, who)) return false;
  mark->rethrow_if_failed();
  return true;
}

void SimRuntime::stream_sync(StreamRef stream, Site site) {
  Stream& on = stream_of(stream);
  if (t_body_stream == &on) {
    throw Error(ErrorKind::invalid_argument, "a stream's own work cannot wait for the stream");
  }
  Lock lock(mutex_);
  MarkPtr mark = record(lock, on);
  block(lock, mark, std::chrono::nanoseconds::max(),
        "a host thread waits for stream " + on.name() + " at " + site.name);
  if (!mark->error) return;
  if (on.error == mark->error) on.error = nullptr;
  mark->rethrow_if_failed();
}

double SimRuntime::event_elapsed(const Event& begin, const Event& end) {
  MarkPtr first = mark_of(begin);
  MarkPtr last = mark_of(end);
  std::lock_guard lock(mutex_);
  if (!first || !last || !first->done || !last->done) {
    throw Error(ErrorKind::invalid_argument, "elapsed time of events that are not both done");
  }
  const bool host_first = first->kind == StreamKind::host;
  if (options_.device_rules && host_first != (last->kind == StreamKind::host)) {
    throw Error(ErrorKind::invalid_argument, "elapsed time between a device's and a host's event");
  }
  return last->time - first->time;
}

double SimRuntime::event_time(const Event& event) {
  MarkPtr mark = mark_of(event);
  std::lock_guard lock(mutex_);
  return mark && mark->done ? mark->time : std::numeric_limits<double>::quiet_NaN();
}

bool SimRuntime::stream_idle(StreamRef stream) {
  Stream& on = stream_of(stream);
  Lock lock(mutex_);
  run_beside_host(lock, false);
  return on.ops.empty() && !on.busy;
}

std::vector<EventPtr> SimRuntime::mark_workers(int device) {
  check_device(device);
  std::vector<EventPtr> events;
  Lock lock(mutex_);
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    Stream& stream = *streams_[i];
    if (stream.ref.device != device || (stream.ops.empty() && !stream.busy)) continue;
    if (options_.device_rules && stream.ref.kind != StreamKind::host) continue;
    if (t_body_of == this && stream.ref.kind == StreamKind::compute) continue;
    auto event = std::make_shared<SimEvent>();
    event->set(record(lock, stream));
    events.push_back(std::move(event));
  }
  return events;
}

void SimRuntime::device_sync(int device) {
  check_device(device);
  Lock lock(mutex_);
  // Twice: what a callable issues may be another stream's work.
  for (int round = 0; round < 2; ++round) {
    std::vector<MarkPtr> marks;
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      Stream& stream = *streams_[i];
      if (stream.ref.device != device || (stream.ops.empty() && !stream.busy)) continue;
      if (t_body_stream == &stream) continue;
      marks.push_back(record(lock, stream));
    }
    for (const MarkPtr& mark : marks) {
      block(lock, mark, std::chrono::nanoseconds::max(),
            "a host thread synchronises device " + std::to_string(device));
    }
  }
}

double SimRuntime::now() const {
  std::lock_guard lock(mutex_);
  return now_;
}

bool SimRuntime::idle() {
  Lock lock(mutex_);
  run_beside_host(lock, false);
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const auto& stream) { return stream->ops.empty() && !stream->busy; });
}

}  // namespace streamlap::sim
