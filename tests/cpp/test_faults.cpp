// The fault sweep: every call of the seam that a program of the core makes is made to fail, one at
// a time, in every way it can. Then the caller has an error or the right bytes, nothing hangs, and
// nothing is left behind. `test_faults sim PROGRAM` runs one; a failure names the plan that replays
// it.
#include "check/faulty_runtime.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <set>
#include <span>
#include <thread>

#include "lab.h"
#include "transfer/copy_engine.h"
#include "transfer/pinned_pool.h"
#include "transfer/stripes.h"
#include "transfer/tree_plan.h"

using namespace streamlap;
using namespace streamlap::testing;
using fault::Call;
using fault::FaultyRuntime;
using fault::Mode;
using fault::Plan;

namespace {

constexpr std::size_t size = 8 << 10;
constexpr int dead = 0xDD;  // what memory holds once its keep-alive is gone
constexpr auto limit = 20s;

// Half of a staged copy fits, and its slots are used again.
constexpr StagingOptions small_ring{size / 4, 2, 2, 1};

struct Hang {};
struct WrongBytes {};

// What a program works with. The library is called on `faulty`; what belongs to the program itself,
// its memory and its producers, is on `plain`, the runtime beneath, where nothing fails.
struct World {
  explicit World(std::shared_ptr<Runtime> served)
      : lab(std::move(served)),
        plain(lab.runtime),
        faulty(std::make_shared<FaultyRuntime>(plain)),
        engine(std::make_shared<CopyEngine>(faulty, small_ring)),
        pool(std::make_shared<PinnedPool>(faulty, 4 * size)) {
    producer = lab.compute();
    consumer = lab.compute();
  }
  ~World() { settle(); }

  void settle() { plain->device_sync(0); }

  // A keep-alive; host memory is overwritten when it dies, so that a copy which still reads or
  // writes it is found out.
  std::shared_ptr<void> keep(const PinnedPtr& memory) {
    std::shared_ptr<void> made(memory.get(), [memory, this](void*) {
      std::memset(memory->data(), dead, memory->bytes());
      std::lock_guard lock(mutex);
      buried.push_back(memory);
    });
    kept.push_back(made);
    return made;
  }
  std::shared_ptr<void> keep(const std::shared_ptr<DeviceBytes>& memory) {
    std::shared_ptr<void> made(memory.get(), [memory](void*) {});
    kept.push_back(made);
    return made;
  }
  bool all_gone() const {
    return std::all_of(kept.begin(), kept.end(), [](const auto& weak) { return weak.expired(); });
  }

  std::shared_ptr<DeviceBytes> source(int fill, std::size_t bytes = size) {
    auto made = std::make_shared<DeviceBytes>(plain, bytes);
    lab.kept_device.push_back(made);
    lab.produce(producer, made->data(), fill, bytes);
    return made;
  }

  // As a caller does: until it says true. What is never true is a hang.
  template <class Wait>
  void wait(Wait&& wait) {
    const auto slice = plain->virtual_time() ? std::chrono::nanoseconds::max() : 50ms;
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!wait(slice)) {
      if (std::chrono::steady_clock::now() > end) throw Hang();
    }
  }
  template <class Ask>
  void poll(Ask&& ask) {
    wait([&](auto) {
      if (ask()) return true;
      faulty->poll();
      if (!plain->virtual_time()) std::this_thread::sleep_for(50us);
      return false;
    });
  }
  std::shared_ptr<PinnedBlock> allocate(std::size_t bytes) {
    std::shared_ptr<PinnedBlock> block;
    poll([&] {
      try {
        block = pool->try_allocate(bytes);
      } catch (const PoolExhausted&) {
        if (!engine->expects()) block = pool->try_allocate(bytes);
      }
      return block != nullptr;
    });
    return block;
  }
  // A part of a program whose failure does not end the rest.
  void apart(const std::function<void()>& part) {
    try {
      part();
    } catch (const Hang&) {
      throw;
    } catch (const WrongBytes&) {
      throw;
    } catch (...) {
      errors.push_back(std::current_exception());
    }
  }
  void right(bool bytes) {
    if (!bytes) throw WrongBytes();
  }

  Lab lab;
  std::mutex mutex;
  std::vector<PinnedPtr> buried;  // whose keep-alive is gone
  std::vector<std::weak_ptr<void>> kept;
  std::shared_ptr<Runtime> plain;
  std::shared_ptr<FaultyRuntime> faulty;
  std::shared_ptr<CopyEngine> engine;
  std::shared_ptr<PinnedPool> pool;
  StreamRef producer;
  StreamRef consumer;
  std::vector<std::exception_ptr> errors;
  bool only_one = true;       // a fault of one transfer was told to that one only
  std::size_t given_up = 0;   // transfers that the program itself had kept for ever
  std::size_t condemned = 0;  // bytes of blocks whose use could not be recorded
};

// A user's transfer. It is given up as the Python module does it.
class Held {
 public:
  Held(World& world, TransferRequest request)
      : world_(world), transfer_(world.engine->submit(std::move(request))) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (open) {
      world_.engine->cut_off(*transfer_, *open);
    } else if (transfer_->ended()) {
      return;
    }
    try {
      for (StreamRef stream : users) transfer_->also_after(stream);
    } catch (...) {
      transfer_->keep_for_ever();
      ++world_.given_up;
    }
    world_.engine->abandon(std::move(transfer_));
  }
  Transfer* operator->() const { return transfer_.get(); }
  Transfer& operator*() const { return *transfer_; }
  void wait() {
    world_.wait([&](auto slice) { return transfer_->sync_for(slice); });
  }

  std::optional<StreamRef> open;
  std::vector<StreamRef> users;

 private:
  World& world_;
  std::shared_ptr<Transfer> transfer_;
};

TransferRequest to_host(World& world, const PinnedPtr& out,
                        const std::shared_ptr<DeviceBytes>& source) {
  TransferRequest request;
  request.items = {{out->data(), source->data(), source->bytes(), 1, nullptr}};
  request.after = {world.producer};
  request.keep_source = world.keep(source);
  request.keep_destination = world.keep(out);
  return request;
}

// ---- the programs

void chunks(World& w) {
  auto source = w.source(1);
  auto out = w.lab.pinned(size);
  TransferRequest request = to_host(w, out, source);
  request.policy = {size / 4, 1};
  Held transfer(w, std::move(request));
  for (std::size_t i = 0; i < transfer->plan().chunks.size(); ++i) {
    w.wait([&](auto slice) { return transfer->chunk_sync_for(i, slice); });
    const Chunk& chunk = transfer->plan().chunks[i];
    for (std::size_t at = 0; at < chunk.bytes; ++at) w.right(out->data()[chunk.offset + at] == 1);
  }
  w.poll([&] { return transfer->done(); });
  transfer.wait();
  transfer->elapsed_from(*transfer);
  transfer->interval();
  w.right(out->holds(1));
}

void tree(World& w) {
  TransferRequest request;
  request.after = {w.producer, w.consumer};
  request.traced = true;
  request.policy = {size / 2, size};
  std::vector<PinnedPtr> outs;
  std::vector<std::shared_ptr<DeviceBytes>> sources;
  for (std::size_t bytes : {size, std::size_t{0}, size / 4, size / 4, 2 * size}) {
    outs.push_back(w.lab.pinned(bytes));
    if (bytes == 0) {
      request.items.push_back({});
      sources.push_back(nullptr);
      continue;
    }
    sources.push_back(w.source(static_cast<int>(outs.size()), bytes));
    request.items.push_back({outs.back()->data(), sources.back()->data(), bytes, 1, nullptr});
  }
  request.keep_source = w.keep(sources[0]);
  request.keep_destination = w.keep(outs[0]);
  Held transfer(w, std::move(request));
  for (std::size_t leaf = 0; leaf < outs.size(); ++leaf) {
    if (leaf % 2 == 0) {
      w.wait([&](auto slice) { return transfer->leaf_sync_for(leaf, slice); });
    } else {
      w.poll([&] { return transfer->leaf_done(leaf); });
    }
    w.right(outs[leaf]->holds(static_cast<int>(leaf + 1)));
  }
  transfer.wait();
}

// Many leaves in one move, with a cast of some.
void gather(World& w) {
  const std::vector<TreeLeaf> leaves = {{moves::Element::bytes, moves::Element::bytes, size / 4},
                                        {moves::Element::float32, moves::Element::bfloat16, 100},
                                        {moves::Element::bytes, moves::Element::bytes, 7}};
  TreePlan plan(leaves, {});
  auto out = w.lab.pinned(plan.range_bytes());
  TransferRequest request;
  request.after = {w.producer};
  std::vector<std::shared_ptr<DeviceBytes>> sources;
  std::vector<void*> far;
  for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    sources.push_back(w.source(1, plan.far_bytes(leaf)));
    far.push_back(sources.back()->data());
    request.items.push_back(
        {out->data() + plan.offsets()[leaf], far.back(), plan.near_bytes(leaf), 1, nullptr});
  }
  request.moves = plan.bind(far, out->data(), nullptr);
  request.keep_source = w.keep(sources[0]);
  request.keep_destination = w.keep(out);
  Held transfer(w, std::move(request));
  for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    w.wait([&](auto slice) { return transfer->leaf_sync_for(leaf, slice); });
    // 0x01010101 as a bfloat16 is 0x0101.
    const unsigned char* data = out->data() + plan.offsets()[leaf];
    for (std::size_t i = 0; i < plan.near_bytes(leaf); ++i) w.right(data[i] == 1);
  }
  transfer.wait();
}

// By way of device memory.
void through_scratch(World& w) {
  const TreePlan plan({{moves::Element::bytes, moves::Element::bytes, size}}, {});
  auto source = w.source(1, size);
  auto out = w.lab.pinned(size);
  auto scratch = std::make_shared<DeviceBytes>(w.plain, size);
  w.lab.kept_device.push_back(scratch);
  const std::vector<void*> far = {source->data()};
  Stripes stripes = stripes_of(*plan.bind(far, scratch->data(), nullptr)[0],
                               reinterpret_cast<std::byte*>(out->data()), 4);
  TransferRequest request;
  request.after = {w.producer};
  request.items = {{out->data(), source->data(), size, 1, nullptr}};
  request.moves = stripes.moves;
  request.landings = stripes.landings;
  request.policy.chunk_bytes = size / 2;
  request.keep_source = w.keep(source);
  request.keep_destination = w.keep(out);
  Held transfer(w, std::move(request));
  w.wait([&](auto slice) { return transfer->source_sync_for(slice); });
  transfer.wait();
  w.right(out->holds(1));
}

// Through the ring to the device. The source may be written to once it has been read.
void late(World& w) {
  auto source = w.lab.pinned(size, 2);
  auto middle = std::make_shared<DeviceBytes>(w.plain, size);
  w.lab.kept_device.push_back(middle);
  auto read = w.lab.pinned(size);
  TransferRequest request;
  request.direction = Direction::to_device;
  request.staged = true;
  request.items = {{middle->data(), source->data(), size, 4, nullptr}};
  request.after = {w.consumer};
  request.policy = {size / 4, 1};
  request.keep_source = w.keep(source);
  request.keep_destination = w.keep(middle);
  Held transfer(w, std::move(request));
  w.poll([&] { return transfer->issued(); });
  w.wait([&](auto slice) { return transfer->issued_for(slice); });
  w.poll([&] { return transfer->issued(); });
  w.wait([&](auto slice) { return transfer->source_sync_for(slice); });
  std::memset(source->data(), poison, size);
  // A transfer that has ended does not know who reads its result: that is the program's to wait
  // for.
  struct Settled {
    World& world;
    ~Settled() { world.settle(); }
  } settled{w};
  transfer->stream_wait(w.consumer);
  w.faulty->copy_async(read->data(), middle->data(), size, w.consumer);
  EventPtr event = w.faulty->event_create(0, false);
  w.faulty->event_record(*event, w.consumer, here);
  w.wait([&](auto slice) { return w.faulty->event_sync_for(*event, slice, here); });
  w.right(read->holds(2));
  transfer.wait();
}

void finish(World& w) {
  auto source = w.source(3);
  auto middle = w.lab.pinned(size);
  auto out = w.lab.pinned(size);
  TransferRequest request = to_host(w, middle, source);
  using Both = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
  request.keep_destination = std::make_shared<Both>(request.keep_destination, w.keep(out));
  request.finish = [middle, out] { std::memcpy(out->data(), middle->data(), size); };
  Held transfer(w, std::move(request));
  transfer.wait();
  w.right(out->holds(3));
}

void open_ended(World& w) {
  auto source = w.source(4);
  auto out = w.lab.pinned(2 * size);
  const StreamRef copies = w.engine->copy_stream(0, Direction::to_host);
  TransferRequest request = to_host(w, out, source);
  request.open_ended = true;
  Held transfer(w, std::move(request));
  transfer.open = copies;
  w.faulty->copy_async(out->data() + size, source->data(), size, copies);
  w.engine->complete(*transfer, copies);
  transfer.open.reset();
  transfer.wait();
  w.right(out->holds(4));
}

// Three that nobody waits for, as three users: one stream of the last user's may still read.
void abandoned(World& w) {
  for (bool staged : {false, true, false}) {
    auto source = w.source(5);
    TransferRequest request = to_host(w, w.lab.pinned(size), source);
    request.staged = staged;
    w.apart([&] {
      Held transfer(w, std::move(request));
      transfer.users = {w.consumer};
    });
    w.engine->reap();
  }
}

void to_device(World& w) {
  auto source = w.lab.pinned(size, 6);
  auto middle = std::make_shared<DeviceBytes>(w.plain, size);
  w.lab.kept_device.push_back(middle);
  auto read = w.lab.pinned(size);
  TransferRequest request;
  request.direction = Direction::to_device;
  request.items = {{middle->data(), source->data(), size, 4, nullptr}};
  request.after = {w.consumer};
  request.policy = {size / 2, size};
  request.keep_source = w.keep(source);
  request.keep_destination = w.keep(middle);
  Held transfer(w, std::move(request));
  transfer->stream_wait(w.consumer);
  // Of the program's own: only the library's wait puts it after the copy.
  w.faulty->copy_async(read->data(), middle->data(), size, w.consumer);
  w.faulty->stream_sync(w.consumer, here);
  w.right(read->holds(6));
  transfer.wait();
}

// Through the ring to the host, to memory that is fresh in part.
void staged(World& w) {
  auto source = w.source(14);
  auto out = w.lab.pinned(size);
  TransferRequest request;
  request.after = {w.producer};
  request.staged = true;
  request.items = {{out->data(), source->data(), size / 2, 1, nullptr},
                   {out->data() + size / 2, source->data() + size / 2, size / 2, 1, nullptr}};
  request.items[1].fresh = true;
  request.policy = {size / 4, 1};
  request.keep_source = w.keep(source);
  request.keep_destination = w.keep(out);
  Held transfer(w, std::move(request));
  w.wait([&](auto slice) { return transfer->leaf_sync_for(0, slice); });
  w.wait([&](auto slice) { return transfer->source_sync_for(slice); });
  transfer->stream_wait_source(w.consumer);
  w.lab.produce(w.consumer, source->data(), 0, size);
  transfer.wait();
  w.right(out->holds(14));
}

// Twice into the same memory: the second has the last word.
void rewritten(World& w) {
  auto out = w.lab.pinned(size);
  std::shared_ptr<void> kept = w.keep(out);
  const auto request = [&](int value) {
    auto source = w.source(value);
    TransferRequest made;
    made.after = {w.producer};
    made.staged = true;
    made.items = {{out->data(), source->data(), size, 1, nullptr}};
    made.policy = {size / 4, 1};
    made.keep_source = w.keep(source);
    made.keep_destination = kept;
    return made;
  };
  Held first(w, request(18));
  Held second(w, request(19));
  second.wait();
  first.wait();
  w.right(out->holds(19));
}

// Two on one ring, of two shapes.
void reshaped(World& w) {
  auto first = w.lab.pinned(size);
  auto second = w.lab.pinned(size);
  TransferRequest request = to_host(w, first, w.source(15));
  request.staged = true;
  Held a(w, std::move(request));
  w.engine->configure_staging({size / 8, 3, 1, 1});
  request = to_host(w, second, w.source(16));
  request.staged = true;
  Held b(w, std::move(request));
  w.engine->configure_staging(small_ring);
  a.wait();
  b.wait();
  w.right(first->holds(15));
  w.right(second->holds(16));
}

// Two on one lane: what one fails with is none of the other's business.
void neighbours(World& w) {
  auto first = w.lab.pinned(size);
  auto second = w.lab.pinned(size);
  const std::size_t before = w.errors.size();
  w.apart([&] {
    Held a(w, to_host(w, first, w.source(7)));
    w.apart([&] {
      TransferRequest request = to_host(w, second, w.source(8));
      w.plain->stream_wait(w.consumer, *w.lab.record(w.producer), here);
      request.after = {w.consumer};
      Held b(w, std::move(request));
      b.wait();
      w.right(second->holds(8));
    });
    a.wait();
    w.right(first->holds(7));
  });
  w.only_one = w.errors.size() - before <= 1;
}

void pool_reuse(World& w) {
  for (int value : {10, 11, 12}) {
    auto block = w.allocate(2 * size);
    std::memset(block->data(), poison, size);
    auto source = w.source(value);
    TransferRequest request;
    request.items = {{block->data(), source->data(), size, 1, nullptr}};
    request.after = {w.producer};
    request.keep_source = w.keep(source);
    auto held = std::make_shared<std::shared_ptr<PinnedBlock>>(std::move(block));
    request.keep_destination = held;
    w.kept.push_back(std::weak_ptr<void>(held));
    Held transfer(w, std::move(request));
    transfer.wait();
    const std::byte* data = (*held)->data();
    for (std::size_t i = 0; i < size; ++i) w.right(data[i] == static_cast<std::byte>(value));
    auto read = w.lab.pinned(size);
    w.plain->copy_async(read->data(), data, size, w.consumer);
    try {
      (*held)->record_use(w.consumer);
    } catch (...) {
      (*held)->condemn();
      w.condemned += (*held)->capacity();
      throw;
    }
    // Given back while the consumer may still read: the next one must not get it too soon.
    transfer->release_all();
    held.reset();
    w.apart([&] {
      auto next = w.allocate(2 * size);
      std::memset(next->data(), poison, size);
    });
    w.plain->stream_sync(w.consumer, here);
    w.right(read->holds(value));
  }
}

void pool_limit(World& w) {
  w.pool->set_limit(3 * size);
  auto a = w.allocate(size);
  auto b = w.allocate(2 * size);
  w.apart([&] {
    try {
      w.allocate(size);
      w.right(false);
    } catch (const PoolExhausted& error) {
      w.right(error.limit == 3 * size);
    }
  });
  // In flight to the end of the producer's work: another size has to wait, and then to be mapped.
  auto slow = w.source(13);
  try {
    b->record_use(w.producer);
  } catch (...) {
    b->condemn();
    w.condemned += b->capacity();
    throw;
  }
  b.reset();
  auto c = w.allocate(size);
  auto d = w.allocate(size / 2);
  w.right(c->data() != a->data());
}

void trim(World& w) {
  {
    auto block = w.allocate(size);
  }
  w.pool->stats();
  w.right(w.pool->trim() >= size);
  auto block = w.allocate(size / 2);
  w.right(w.pool->stats().live == size / 2);
}

struct Program {
  const char* name;
  void (*run)(World&);
};
const std::vector<Program> programs = {
    {"chunks", chunks},
    {"tree", tree},
    {"gather", gather},
    {"through scratch memory", through_scratch},
    {"late", late},
    {"finish", finish},
    {"open_ended", open_ended},
    {"abandoned", abandoned},
    {"to_device", to_device},
    {"staged", staged},
    {"rewritten", rewritten},
    {"reshaped", reshaped},
    {"neighbours", neighbours},
    {"pool_reuse", pool_reuse},
    {"pool_limit", pool_limit},
    {"trim", trim},
};

// ---- the sweep

struct Counts {
  std::size_t runs = 0;
  std::size_t fired = 0;
  std::size_t errors = 0;    // told to the caller
  std::size_t absorbed = 0;  // the result was right all the same
  std::size_t missed = 0;    // the call did not come this time
  std::size_t left_out = 0;  // beyond the bound
  std::size_t kept = 0;      // transfers that nobody could tell the end of
  std::size_t hangs = 0;
  std::size_t leaks = 0;
  std::size_t swallowed = 0;
  std::set<std::string> sites;
  std::set<std::string> met;     // kinds of calls that the programs make
  std::set<std::string> faults;  // kinds and modes that fired
};

bool is_fault(const std::exception_ptr& error, bool sticky) {
  try {
    std::rethrow_exception(error);
  } catch (const fault::Injected& injected) {
    return !sticky || injected.kind() == ErrorKind::sticky;
  } catch (const std::bad_alloc&) {
    return !sticky;
  } catch (const fault::Interrupt&) {
    return !sticky;
  } catch (const Error& other) {
    // The pool's own report of a lost context.
    return sticky && other.kind() == ErrorKind::sticky;
  } catch (...) {
    return false;
  }
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "something that is no std::exception";
  }
}

std::string text_of(const std::vector<Plan>& plans) {
  std::string text;
  for (const Plan& plan : plans) {
    if (!text.empty()) text += ',';
    text += to_string(plan);
  }
  return text;
}

using Backend = std::function<std::shared_ptr<Runtime>()>;

class Sweep {
 public:
  Sweep(const Program& program, std::string where, Backend backend)
      : program_(program), where_(std::move(where)), backend_(std::move(backend)) {}

  // Every call, up to `bound` of a kind and then a spread of `bound` more.
  void one_fault(Counts& total, std::size_t bound) {
    const std::vector<std::size_t> clean = calls_of({}, total);
    for (std::size_t kind = 0; kind < fault::calls; ++kind) {
      const Call call = static_cast<Call>(kind);
      if (clean[kind] > 0) total.met.insert(fault::call_names[kind]);
      const std::vector<std::size_t> numbers = spread(0, clean[kind], bound);
      total.left_out += clean[kind] - numbers.size();
      for (std::size_t at : numbers) {
        for (std::size_t mode = 0; mode < fault::modes; ++mode) {
          if (applies(static_cast<Mode>(mode), call)) {
            run({{call, at, static_cast<Mode>(mode)}}, total);
          }
        }
      }
    }
  }

  // A call that enqueues or creates fails, and then one of those that this leads to.
  void two_faults(Counts& total, std::size_t bound) {
    const std::vector<std::size_t> clean = calls_of({}, total);
    for (std::size_t kind = 0; kind <= static_cast<std::size_t>(Call::stream_reset_error); ++kind) {
      for (std::size_t at : spread(0, clean[kind], bound)) {
        const Plan first{static_cast<Call>(kind), at, Mode::once};
        const std::vector<std::size_t> more = calls_of({first}, total);
        for (std::size_t other = 0; other < fault::calls; ++other) {
          const Call call = static_cast<Call>(other);
          // The handling of a fault comes last.
          const std::size_t from = more[other] > 4 ? more[other] - 4 : 0;
          for (std::size_t second : spread(from, more[other], 4)) {
            run({first, {call, second, Mode::once}}, total);
            run({first, {call, second, Mode::always}}, total);
          }
        }
      }
    }
  }

 private:
  static std::vector<std::size_t> spread(std::size_t from, std::size_t to, std::size_t bound) {
    std::vector<std::size_t> numbers;
    for (std::size_t at = from + 1; at <= std::min(to, from + bound); ++at) numbers.push_back(at);
    const std::size_t rest = to > from + bound ? to - from - bound : 0;
    for (std::size_t i = 1; i <= std::min(bound, rest); ++i) {
      numbers.push_back(from + bound + i * rest / std::min(bound, rest));
    }
    return numbers;
  }

  std::vector<std::size_t> calls_of(const std::vector<Plan>& plans, Counts& total) {
    return run(plans, total);
  }

  void complain(const std::vector<Plan>& plans, const std::string& what) {
    check::fail(program_.name, 0, where_ + " " + text_of(plans) + ": " + what);
  }

  std::vector<std::size_t> run(const std::vector<Plan>& plans, Counts& total) {
    World world(backend_());
    world.faulty->arm(plans);
    const bool sticky = std::any_of(plans.begin(), plans.end(),
                                    [](const Plan& plan) { return plan.mode == Mode::sticky; });
    bool finished = go(world, plans, total);
    std::vector<std::size_t> met;
    for (std::size_t kind = 0; kind < fault::calls; ++kind) {
      met.push_back(world.faulty->count(static_cast<Call>(kind)));
    }
    judge(world, plans, finished, total);
    const bool lost = sticky && world.faulty->fired() > 0;
    if (lost) {
      after_loss(world, plans, total);
    } else {
      world.faulty->disarm();
      leaves_nothing(world, plans, total);
      again(world, plans, total);
      world.settle();
      world.engine->trim_staging();
      if (world.engine->staging_bytes() != 0) {
        ++total.leaks;
        complain(plans, "a slot is lost");
      }
    }
    return met;
  }

  // True when the program came to its end.
  bool go(World& world, const std::vector<Plan>& plans, Counts& total) {
    try {
      program_.run(world);
      return true;
    } catch (const Hang&) {
      ++total.hangs;
      complain(plans, "hangs");
    } catch (const WrongBytes&) {
      ++total.swallowed;
      complain(plans, "reports no error, and the result is wrong");
    } catch (...) {
      world.errors.push_back(std::current_exception());
    }
    return false;
  }

  void judge(World& world, const std::vector<Plan>& plans, bool finished, Counts& total) {
    const bool fired = world.faulty->fired() > 0;
    ++total.runs;
    if (!plans.empty()) {
      total.fired += fired;
      total.missed += !fired;
      total.errors += fired && !world.errors.empty();
      total.absorbed += fired && finished && world.errors.empty();
      for (const std::string& site : world.faulty->sites()) total.sites.insert(site);
      if (fired) total.faults.insert(fault::call_names[static_cast<std::size_t>(plans[0].call)]);
    }
    const bool sticky = std::any_of(plans.begin(), plans.end(),
                                    [](const Plan& plan) { return plan.mode == Mode::sticky; });
    if (world.faulty->fired() == 1 && !sticky && !world.only_one) {
      complain(plans, "one fault is told to two transfers");
    }
    for (const std::exception_ptr& error : world.errors) {
      if (fired && is_fault(error, sticky)) continue;
      const std::string text = text_of(error);
      total.hangs += text.find("deadlock") != std::string::npos;
      complain(plans, "an error of another kind: " + text);
    }
  }

  // What was in flight is let go of, and nobody had used it when that happened.
  void leaves_nothing(World& world, const std::vector<Plan>& plans, Counts& total) {
    try {
      world.poll([&] { return !world.engine->expects(); });
    } catch (const Hang&) {
      ++total.hangs;
      complain(plans, "an abandoned transfer is never let go of");
    }
    world.settle();
    const std::size_t kept = world.engine->reap();
    total.kept += kept;
    const bool drain_fails = std::any_of(plans.begin(), plans.end(), [](const Plan& plan) {
      return plan.call == Call::stream_sync;
    });
    if (kept > world.given_up && !drain_fails) {
      ++total.leaks;
      complain(plans, "a transfer is kept for ever");
    }
    if (kept == 0 && !world.all_gone()) {
      ++total.leaks;
      complain(plans, "a source or a destination is kept");
    }
    const PoolStats stats = world.pool->stats();
    if (kept == 0 && (stats.live != world.condemned || stats.in_flight != 0)) {
      ++total.leaks;
      complain(plans, "the pool has " + std::to_string(stats.live) + " bytes live and " +
                          std::to_string(stats.in_flight) + " in flight");
    }
    for (const PinnedPtr& memory : world.buried) {
      if (memory->holds(dead)) continue;
      ++total.leaks;
      complain(plans, "memory was written after it was let go of");
    }
  }

  void again(World& world, const std::vector<Plan>& plans, Counts& total) {
    for (StreamRef own : {world.producer, world.consumer}) world.faulty->stream_reset_error(own);
    world.errors.clear();
    world.buried.clear();
    world.pool->set_limit(4 * size + world.condemned);
    if (std::string(program_.name) == "pool_limit" && world.condemned > 0) return;
    if (!go(world, plans, total) || !world.errors.empty()) {
      complain(plans, "and then the program fails without a fault: " +
                          (world.errors.empty() ? "" : text_of(world.errors[0])));
    }
  }

  // Nothing is promised but that calls come back.
  void after_loss(World& world, const std::vector<Plan>& plans, Counts& total) {
    world.settle();
    if (world.engine->expects()) {
      ++total.hangs;
      complain(plans, "a lost context is waited for");
    }
    try {
      world.pool->stats();
      world.pool->trim();
      world.allocate(size);
    } catch (const Hang&) {
      ++total.hangs;
      complain(plans, "the pool waits for a lost context");
    } catch (const Error&) {
    }
  }

  const Program& program_;
  const std::string where_;
  const Backend backend_;
};

void report(const char* where, const Counts& counts) {
  std::printf(
      "     %s: %zu programs, %zu kinds of calls, %zu sites, %zu runs, %zu faults (%zu told, %zu "
      "absorbed), %zu missed, %zu calls left out, %zu kept for ever, hangs %zu, leaks %zu, "
      "swallowed %zu\n",
      where, programs.size(), counts.met.size(), counts.sites.size(), counts.runs, counts.fired,
      counts.errors, counts.absorbed, counts.missed, counts.left_out, counts.kept, counts.hangs,
      counts.leaks, counts.swallowed);
}

// Every ordering call of csrc/transfer; tests/test_faults.py compares.
const std::set<std::string> all_sites = {
    "engine.copy_after_pack",
    "engine.copy_after_producer",
    "engine.finish_after_copies",
    "engine.late_copy_after_producer",
    "engine.pack_after_producer",
    "engine.record_begin",
    "engine.record_end",
    "engine.record_issued",
    "engine.record_mark",
    "engine.record_packed",
    "engine.record_ready",
    "pool.record_use",
    "staging.arrival_after_dma",
    "staging.copy_out_after_arrival",
    "staging.copy_out_after_populate",
    "staging.copy_out_after_writer",
    "staging.dma_after_copy_in",
    "staging.drain",
    "staging.in_order_after_copy_out",
    "staging.record_arrived",
    "staging.record_begin",
    "staging.record_copied_in",
    "staging.record_copied_out",
    "staging.record_device_mark",
    "staging.record_mark",
    "staging.record_moved",
    "staging.record_populated",
    "staging.record_sent",
    "staging.record_source_read",
    "staging.record_source_taken",
    "staging.slot_is_free",
    "transfer.abandoned_after_current_streams",
    "transfer.ask_done",
    "transfer.ask_issued",
    "transfer.ask_leaf",
    "transfer.chunk",
    "transfer.consumer_waits",
    "transfer.done",
    "transfer.issued",
    "transfer.leaf",
    "transfer.outlives_failed_issue",
    "transfer.source_read",
    "transfer.writer_waits",
};
// Those that only the handling of another fault reaches.
const std::set<std::string> second_sites = {"staging.drain"};

std::set<std::string> without(const std::set<std::string>& all, const std::set<std::string>& some) {
  std::set<std::string> left;
  std::set_difference(all.begin(), all.end(), some.begin(), some.end(),
                      std::inserter(left, left.end()));
  return left;
}

std::string joined(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += name + " ";
  return text;
}

void found_nothing(const Counts& counts) {
  CHECK_EQ(counts.hangs, 0);
  CHECK_EQ(counts.leaks, 0);
  CHECK_EQ(counts.swallowed, 0);
  CHECK(counts.fired > 0);
}

}  // namespace

TEST(a_plan_is_read_and_written) {
  for (const char* text :
       {"event_record:3:once", "alloc_pinned:1:memory", "event_sync:12:interrupt",
        "launch:1:later,stream_sync:2:always", "event_query:1:sticky"}) {
    CHECK_EQ(text_of(fault::parse_plans(text)), text);
  }
  CHECK(fault::parse_plans("").empty());
  for (const char* text :
       {",", "event_record", "event_record:3", "event_record:0:once", "event_record:x:once",
        "event_record::once", "event_record:3:never", "no_call:3:once", "event_query:1:later",
        "launch:1:interrupt", "event_query:1:memory", "launch:1:once,", "launch:1:once:x",
        "launch:-1:once", "launch:99999999999999999999999:once"}) {
    CHECK_THROWS(fault::parse_plans(text), Error);
  }
}

ON_EACH_THREADED_RUNTIME(a_fault_happens_where_it_is_planned_and_only_there) {
  FaultyRuntime faulty(lab.runtime);
  StreamRef stream = lab.host();
  const auto launch = [&] { faulty.launch([] {}, stream); };
  faulty.arm(fault::parse_plans("launch:2:once"));
  launch();
  CHECK_THROWS(launch(), fault::Injected);
  launch();
  CHECK_EQ(faulty.count(Call::launch), 3);
  CHECK_EQ(faulty.fired(), 1);
  faulty.arm(fault::parse_plans("launch:2:always"));
  launch();
  CHECK_THROWS(launch(), fault::Injected);
  CHECK_THROWS(launch(), fault::Injected);
  faulty.disarm();
  launch();
  faulty.arm(fault::parse_plans("launch:1:memory"));
  CHECK_THROWS(launch(), std::bad_alloc);
  faulty.arm(fault::parse_plans("event_sync:1:interrupt"));
  EventPtr event = faulty.event_create(0, false);
  faulty.event_record(*event, stream, here);
  CHECK_THROWS(faulty.event_sync_for(*event, patience, here), fault::Interrupt);
  CHECK(faulty.event_sync_for(*event, patience, here));
  CHECK(faulty.sites() == std::vector<std::string>{here.name});
  faulty.arm(fault::parse_plans("event_query:1:sticky"));
  launch();
  CHECK(faulty.event_state(*event, here) == EventState::passed);
  CHECK_THROWS(faulty.event_query(*event, here), fault::Injected);
  CHECK_THROWS(launch(), fault::Injected);
  CHECK(faulty.event_state(*event, here) == EventState::lost);
}

ON_EACH_THREADED_RUNTIME(an_error_that_comes_later_follows_its_stream) {
  FaultyRuntime faulty(lab.runtime);
  StreamRef first = lab.host();
  StreamRef second = lab.host();
  int ran = 0;
  faulty.arm(fault::parse_plans("launch:1:later"));
  EventPtr before = faulty.event_create(0, false);
  faulty.event_record(*before, first, here);
  faulty.launch([&] { ran += 1; }, first);
  faulty.launch([&] { ran += 2; }, first);
  EventPtr after = faulty.event_create(0, false);
  faulty.event_record(*after, first, here);
  faulty.stream_wait(second, *after, here);
  faulty.stream_reset_error(first);
  faulty.launch([&] { ran += 4; }, first);
  faulty.stream_sync(first, here);
  CHECK_EQ(ran, 4);
  CHECK(faulty.event_sync_for(*before, patience, here));
  CHECK_THROWS(faulty.event_sync_for(*after, patience, here), fault::Injected);
  CHECK_THROWS(faulty.event_query(*after, here), fault::Injected);
  CHECK(faulty.event_state(*after, here) == EventState::passed);
  CHECK_THROWS(faulty.stream_sync(second, here), fault::Injected);
  faulty.stream_sync(second, here);
}

TEST(sim_one_fault) {
  Counts counts;
  for (const Program& program : programs) {
    for (bool device_rules : {false, true}) {
      for (const char* schedule : {"eager", "lazy", "random(1)", "starve(0)", "pct(1,3)"}) {
        Sweep(program, std::string(schedule) + (device_rules ? " device" : " host"), [=] {
          return sim_backend(schedule, device_rules);
        }).one_fault(counts, 40);
      }
    }
  }
  report("sim", counts);
  found_nothing(counts);
  CHECK(counts.faults == counts.met);
  CHECK_EQ(joined(without(all_sites, counts.sites)), joined(second_sites));
  CHECK_EQ(joined(without(counts.sites, all_sites)), joined({here.name}));
}

TEST(sim_two_faults) {
  Counts counts;
  for (const Program& program : programs) {
    for (bool device_rules : {false, true}) {
      Sweep(program, std::string("lazy") + (device_rules ? " device" : " host"), [=] {
        return sim_backend("lazy", device_rules);
      }).two_faults(counts, 3);
    }
  }
  report("sim, two faults", counts);
  found_nothing(counts);
  CHECK(without(second_sites, counts.sites).empty());
}

TEST(host_one_fault) {
  Counts counts;
  for (const Program& program : programs) {
    Sweep(program, "host", host_backend).one_fault(counts, 4);
  }
  report("worker threads", counts);
  found_nothing(counts);
}

TEST(cuda_one_fault) {
  Counts counts;
  for (const Program& program : programs) {
    Sweep(program, "cuda", cuda_backend).one_fault(counts, 4);
  }
  report("cuda", counts);
  found_nothing(counts);
}
