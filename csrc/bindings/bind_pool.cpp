// The pinned pool, and blocks as Python objects that own their memory.
#include <pybind11/stl.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include "base/pages.h"
#include "base/process.h"
#include "bindings/py_block.h"
#include "bindings/types.h"
#include "bindings/watch.h"

namespace streamlap::bindings {
namespace {

// Set by Python: answers [(device, stream handle)], the streams that might still use a block.
SharedObject& current_streams_hook() {
  static auto* hook = new SharedObject();
  return *hook;
}

// Every pool there is, so that a pointer finds its own.
struct PoolRegistry {
  std::mutex mutex;
  std::vector<std::weak_ptr<PinnedPool>> pools;
};

PoolRegistry& registry() {
  static auto* made = new PoolRegistry();
  return *made;
}

// Pools that nobody has any more, but for blocks whose last use is not done: a device may still be
// at them. Looked at whenever a pool is made or let go.
struct Lingering {
  std::mutex mutex;
  std::vector<std::unique_ptr<PinnedPool>> pools;
};

Lingering& lingering() {
  static auto* made = new Lingering();
  return *made;
}

void let_go(std::unique_ptr<PinnedPool> pool) {
  if (process::leaking()) {
    static_cast<void>(pool.release());
    return;
  }
  std::optional<GilRelease> released;  // to give page-locked memory back can wait for a device
  if (PyGILState_Check() != 0 && !interpreter_ending()) released.emplace();
  std::vector<std::unique_ptr<PinnedPool>> over;
  std::lock_guard lock(lingering().mutex);
  std::vector<std::unique_ptr<PinnedPool>>& pools = lingering().pools;
  if (pool) pools.push_back(std::move(pool));
  for (auto& one : pools) {
    if (one->stats().in_flight == 0) over.push_back(std::move(one));
  }
  std::erase(pools, nullptr);
}

std::shared_ptr<PinnedPool> make_pool(const std::shared_ptr<Runtime>& runtime, std::size_t limit,
                                      std::size_t slab_bytes) {
  let_go(nullptr);
  std::shared_ptr<PinnedPool> pool(
      new PinnedPool(runtime, limit, slab_bytes),
      [](PinnedPool* last) { let_go(std::unique_ptr<PinnedPool>(last)); });
  std::lock_guard lock(registry().mutex);
  std::erase_if(registry().pools, [](const auto& other) { return other.expired(); });
  registry().pools.push_back(pool);
  return pool;
}

std::vector<std::shared_ptr<PinnedPool>> pools_of(const std::shared_ptr<Runtime>& runtime) {
  std::vector<std::shared_ptr<PinnedPool>> pools;
  std::lock_guard lock(registry().mutex);
  for (const auto& pool : registry().pools) {
    if (auto alive = pool.lock(); alive && alive->runtime() == runtime) {
      pools.push_back(std::move(alive));
    }
  }
  return pools;
}

bool record_use(std::uintptr_t pointer, const PyStream& stream) {
  GilRelease released;
  const auto pools = pools_of(stream.runtime);
  return std::any_of(pools.begin(), pools.end(), [&](const auto& pool) {
    return pool->record_use(reinterpret_cast<const void*>(pointer), stream.ref);
  });
}

// The block around `pointer`, for one more to hold it; null where it is no pool's.
std::shared_ptr<PinnedBlock> block_around(std::uintptr_t pointer,
                                          const std::shared_ptr<Runtime>& runtime) {
  for (const auto& pool : pools_of(runtime)) {
    if (auto block = pool->around(reinterpret_cast<const void*>(pointer))) return block;
  }
  return nullptr;
}

// Ordinary memory of its own mapping, on huge pages where there are some. A forked child has its
// own copy, so it may be unmapped there, too.
class PyPages {
 public:
  explicit PyPages(std::size_t bytes)
      : bytes_(bytes), data_(pages::map(bytes, pages::Fork::shared)) {}
  ~PyPages() { pages::unmap(data_, bytes_); }
  PyPages(const PyPages&) = delete;
  PyPages& operator=(const PyPages&) = delete;

  void* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::size_t bytes_;
  void* data_;
};

// Uses of the block around `pointer`, declared by record_use().
std::vector<PyEvent> uses_of(std::uintptr_t pointer, const std::shared_ptr<Runtime>& runtime) {
  GilRelease released;
  std::vector<PyEvent> found;
  for (const auto& pool : pools_of(runtime)) {
    for (EventPtr& event : pool->uses(reinterpret_cast<const void*>(pointer))) {
      found.push_back({runtime, std::move(event)});
    }
  }
  return found;
}

// The pool with what it makes ahead; letting go of it cancels nothing.
struct PyGrowth {
  std::shared_ptr<PinnedPool> pool;
  std::shared_ptr<Growth> growth;

  void wait() const {
    wait_sliced(*pool->runtime(), std::nullopt, [&](std::chrono::nanoseconds slice) {
      const std::uint64_t seen = pool->changes().seen();
      if (pool->grown(*growth)) return true;
      pool->changes().wait(seen,
                           std::min<std::chrono::nanoseconds>(slice, std::chrono::seconds(1)));
      return false;
    });
  }
};

using Grow = std::shared_ptr<Growth> (PinnedPool::*)(std::size_t bytes, std::size_t count);

template <Grow grow>
std::optional<PyGrowth> start_growth(const std::shared_ptr<PinnedPool>& pool, std::size_t bytes,
                                     std::size_t count) {
  GilRelease released;
  std::shared_ptr<Growth> growth = ((*pool).*grow)(bytes, count);
  if (!growth) return std::nullopt;
  return PyGrowth{pool, std::move(growth)};
}

py::dict stats(PinnedPool& pool) {
  PoolStats found;
  {
    GilRelease released;
    found = pool.stats();
  }
  py::dict answer;
  answer["limit"] = found.limit;
  answer["reserved"] = found.reserved;
  answer["live"] = found.live;
  answer["in_flight"] = found.in_flight;
  answer["cached"] = found.cached;
  answer["growing"] = found.growing;
  answer["waste"] = found.waste;
  answer["peak"] = found.peak;
  answer["live_blocks"] = found.live_blocks;
  answer["slabs"] = found.slabs;
  answer["hits"] = found.hits;
  answer["misses"] = found.misses;
  return answer;
}

}  // namespace

std::shared_ptr<PinnedBlock> allocate_block(PinnedPool& pool, std::size_t bytes) {
  std::shared_ptr<PinnedBlock> block;
  wait_sliced(*pool.runtime(), std::nullopt, [&](std::chrono::nanoseconds slice) {
    const bool simulated = pool.runtime()->virtual_time();
    const auto until = std::chrono::steady_clock::now() +
                       std::min<std::chrono::nanoseconds>(slice, std::chrono::milliseconds(50));
    for (;;) {
      const std::uint64_t seen = pool.changes().seen();
      try {
        block = pool.try_allocate(bytes);
      } catch (const PoolExhausted&) {
        // What nobody holds any more, but for a copy in flight, comes home by itself.
        if (!Watch::instance().holding()) {
          block = pool.try_allocate(bytes);  // it may have come home just now
        }
      }
      if (block || std::chrono::steady_clock::now() >= until) return block != nullptr;
      pool.runtime()->poll();
      // Blocks in flight come home without a word; those being made are told of.
      if (!simulated) pool.changes().wait(seen, std::chrono::microseconds(100));
    }
  });
  return block;
}

std::vector<PyStream> current_streams(const std::shared_ptr<Runtime>& runtime) {
  std::vector<PyStream> streams;
  if (!current_streams_hook() || !runtime->uses_device_memory()) return streams;
  py::object answer = py::reinterpret_borrow<py::object>(current_streams_hook().get())();
  for (auto [device, handle] : answer.cast<std::vector<std::pair<int, std::uintptr_t>>>()) {
    streams.push_back({runtime, {handle, device, StreamKind::compute}});
  }
  return streams;
}

bool pools_busy() {
  std::vector<std::shared_ptr<PinnedPool>> pools;
  std::lock_guard lock(registry().mutex);
  for (const auto& pool : registry().pools) {
    if (auto alive = pool.lock()) pools.push_back(std::move(alive));
  }
  return std::any_of(pools.begin(), pools.end(), [](const auto& pool) { return pool->busy(); });
}

void bind_pool(py::module_& module) {
  py::class_<PyBlock>(module, "Block", py::buffer_protocol())
      .def_property_readonly("address",
                             [](const PyBlock& self) {
                               return reinterpret_cast<std::uintptr_t>(self.block()->data());
                             })
      .def_property_readonly("nbytes",
                             [](const PyBlock& self) { return self.block()->requested(); })
      .def_property_readonly("fresh", [](const PyBlock& self) { return self.block()->fresh(); })
      .def_property_readonly("capacity",
                             [](const PyBlock& self) { return self.block()->capacity(); })
      .def_buffer([](PyBlock& self) {
        return py::buffer_info(self.block()->data(), 1,
                               py::format_descriptor<std::uint8_t>::format(),
                               static_cast<py::ssize_t>(self.block()->requested()));
      });

  py::class_<PyGrowth>(module, "Growth")
      .def("wait", &PyGrowth::wait)
      .def("cancel", [](const PyGrowth& self) {
        GilRelease released;
        self.pool->cancel(*self.growth);
      });

  py::class_<PyPages>(module, "Pages", py::buffer_protocol())
      .def(py::init<std::size_t>(), py::arg("nbytes"))
      .def_buffer([](PyPages& self) {
        return py::buffer_info(self.data(), 1, py::format_descriptor<std::uint8_t>::format(),
                               static_cast<py::ssize_t>(self.bytes()));
      });

  py::class_<PinnedPool, std::shared_ptr<PinnedPool>>(module, "Pool")
      .def(py::init(&make_pool), py::arg("runtime"), py::arg("limit"),
           py::arg("slab_bytes") = PinnedPool::usual_slab)
      .def_property_readonly_static("smallest_block",
                                    [](const py::object&) { return PinnedPool::smallest_block; })
      .def("allocate",
           [](PinnedPool& self, std::size_t bytes) {
             return std::make_unique<PyBlock>(allocate_block(self, bytes));
           })
      .def("stats", &stats)
      .def("trim",
           [](PinnedPool& self) {
             GilRelease released;
             return self.trim();
           })
      .def_property_readonly("runtime", &PinnedPool::runtime)
      .def_property_readonly("live", &PinnedPool::live)
      .def("has_room", &PinnedPool::has_room)
      .def("grow_ahead", &start_growth<&PinnedPool::grow_ahead>, py::arg("nbytes"),
           py::arg("count"))
      .def("prewarm", &start_growth<&PinnedPool::start_prewarm>, py::arg("nbytes"),
           py::arg("count"))
      .def_property("limit", &PinnedPool::limit, &PinnedPool::set_limit)
      .def_static("size_class", &PinnedPool::size_class);

  module.def("record_use", &record_use);
  py::class_<PinnedBlock, std::shared_ptr<PinnedBlock>>(module, "HeldBlock")
      .def_property_readonly(
          "begin",
          [](const PinnedBlock& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_property_readonly("end", [](const PinnedBlock& self) {
        return reinterpret_cast<std::uintptr_t>(self.data()) + self.requested();
      });
  module.def("block_around", &block_around, py::arg("pointer"), py::arg("runtime"));
  module.def("uses_of", &uses_of, py::arg("pointer"), py::arg("runtime"));
  module.def("set_current_streams_hook",
             [](const py::object& hook) { current_streams_hook() = share(hook); });
}

}  // namespace streamlap::bindings
