// Copy engines, transfers, and the thread that watches them.
#include <pybind11/stl.h>

#include <limits>
#include <thread>

#include "base/process.h"
#include "bindings/py_transfer.h"
#include "bindings/types.h"
#include "bindings/watch.h"

namespace streamlap::bindings {
namespace {

constexpr Site site_marks{"python.marks"};

using PyItem = std::tuple<std::uintptr_t, std::uintptr_t, std::size_t, std::size_t, py::object>;

std::unique_ptr<PyTransfer> submit(const std::shared_ptr<CopyEngine>& engine, int device,
                                   bool to_device, const std::vector<PyItem>& items,
                                   const std::vector<const PyStream*>& after,
                                   std::size_t chunk_bytes, bool staged,
                                   const std::vector<std::size_t>& fresh, const py::object& finish,
                                   bool open_ended, const py::object& keep_source,
                                   const py::object& keep_destination, bool timed, bool traced) {
  TransferRequest request;
  request.device = device;
  const Direction request_direction = to_device ? Direction::to_device : Direction::to_host;
  request.direction = request_direction;
  request.items.reserve(items.size());
  for (const auto& [dst, src, bytes, element, body] : items) {
    request.items.push_back({reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src),
                             bytes, element, body.is_none() ? nullptr : as_task(body)});
  }
  request.after = streams_of(*engine, after);
  request.policy.chunk_bytes = chunk_bytes;
  request.staged = staged;
  for (std::size_t index : fresh) request.items.at(index).fresh = true;
  if (!finish.is_none()) request.finish = as_task(finish);
  request.open_ended = open_ended;
  request.timed = timed;
  request.traced = traced;
  request.keep_source = share(keep_source);
  request.keep_destination = share(keep_destination);
  std::shared_ptr<Transfer> transfer;
  {
    GilRelease released;
    try {
      transfer = engine->submit(std::move(request));
    } catch (...) {
      Watch::instance().look_after(engine);  // it may hold what was issued before it failed
      throw;
    }
  }
  auto made = std::make_unique<PyTransfer>(engine, std::move(transfer));
  if (open_ended) {
    made->set_open(engine->copy_stream(device, request_direction));
  }
  return made;
}

// Blocks until the copies are issued, so that a stream can be made to wait for them.
void wait_on_stream(const PyTransfer& self, const PyStream& stream) {
  auto transfer = self.get();
  if (stream.runtime != transfer->runtime()) {
    throw Error(ErrorKind::invalid_argument, std::string("a stream of runtime '") +
                                                 stream.runtime->name() +
                                                 "' cannot wait for a copy of another runtime");
  }
  const bool on_host = transfer->waits_on_host();
  if (!on_host) {
    GilRelease released;  // the only one, where the caller's thread issued the copies
    if (transfer->issued()) {
      transfer->stream_wait(stream.ref);
      return;
    }
  }
  wait_sliced(*transfer->runtime(), std::nullopt, [&](std::chrono::nanoseconds slice) {
    return on_host ? transfer->sync_for(slice, false) : transfer->issued_for(slice);
  });
  GilRelease released;
  transfer->stream_wait(stream.ref);
}

// Blocks until the copies are issued; then the stream waits until the source has been read.
void wait_source_on_stream(const PyTransfer& self, const PyStream& stream) {
  auto transfer = self.get();
  if (stream.runtime != transfer->runtime()) {
    throw Error(ErrorKind::invalid_argument, std::string("a stream of runtime '") +
                                                 stream.runtime->name() +
                                                 "' cannot wait for a copy of another runtime");
  }
  const bool on_host = transfer->reads_on_host();
  wait_sliced(*transfer->runtime(), std::nullopt, [&](std::chrono::nanoseconds slice) {
    return on_host ? transfer->source_sync_for(slice) : transfer->issued_for(slice);
  });
  GilRelease released;
  transfer->stream_wait_source(stream.ref);
}

// Later work of `stream`, which runs callables, starts after the end of the transfer, failed or
// not. A stream's own wait would take the error over, and until it is reset, what other threads
// enqueue there meanwhile would be skipped.
void hold_stream(const PyTransfer& self, const PyStream& stream) {
  auto transfer = self.get();
  GilRelease released;
  stream.runtime->launch(
      [transfer] {
        while (transfer->pending()) {
          try {
            transfer->sync_for(std::chrono::seconds(1), false);
          } catch (...) {
            // Whoever asks for the transfer is told. It may be this wait that failed, not the
            // transfer, which then goes on.
            transfer->runtime()->poll();
            std::this_thread::yield();
          }
        }
      },
      stream.ref);
}

// Until everything of the transfer is done. An error of the work is thrown.
void sync_marks(const TransferMarks& marks) {
  for (const EventPtr& event : {marks.issued, marks.end}) {
    if (!event) continue;
    wait_sliced(*marks.runtime, std::nullopt, [&](std::chrono::nanoseconds slice) {
      return marks.runtime->event_sync_for(*event, slice, site_marks);
    });
  }
}

using Times = std::tuple<std::vector<double>, double, double, double>;

Times times_of(const TransferMarks& marks, const PyEvent& base, double base_time) {
  GilRelease released;
  std::vector<double> ready;
  for (const EventPtr& event : marks.ready) {
    ready.push_back(time_of(*marks.runtime, event, base, base_time));
  }
  return {ready, time_of(*marks.runtime, marks.begin, base, base_time),
          time_of(*marks.runtime, marks.copied, base, base_time),
          time_of(*marks.runtime, marks.end, base, base_time)};
}

}  // namespace

std::vector<StreamRef> streams_of(const CopyEngine& engine,
                                  const std::vector<const PyStream*>& streams) {
  std::vector<StreamRef> refs;
  refs.reserve(streams.size());
  for (const PyStream* stream : streams) {
    if (stream->runtime != engine.runtime()) {
      throw Error(ErrorKind::invalid_argument, std::string("a stream of runtime '") +
                                                   stream->runtime->name() +
                                                   "' cannot order a copy of another runtime");
    }
    refs.push_back(stream->ref);
  }
  return refs;
}

double time_of(Runtime& runtime, const EventPtr& event, const PyEvent& base, double base_time) {
  if (!event) return std::numeric_limits<double>::quiet_NaN();
  const double known = runtime.event_time(*event);
  if (known == known) return known;
  try {
    return base_time - runtime.event_elapsed(*event, *base.event);
  } catch (const Error&) {
    return std::numeric_limits<double>::quiet_NaN();  // never recorded, or not done
  }
}

std::shared_ptr<CopyEngine> engine_of(const std::shared_ptr<Runtime>& runtime) {
  static std::mutex mutex;
  static auto* engines = new std::map<Runtime*, std::weak_ptr<CopyEngine>>();
  std::lock_guard lock(mutex);
  std::weak_ptr<CopyEngine>& slot = (*engines)[runtime.get()];
  std::shared_ptr<CopyEngine> engine = slot.lock();
  if (!engine) {
    slot = engine = std::make_shared<CopyEngine>(runtime);
    std::erase_if(*engines, [](const auto& entry) { return entry.second.expired(); });
  }
  return engine;
}

void bind_transfer(py::module_& module) {
  py::class_<PyTransfer>(module, "Transfer")
      .def("done",
           [](const PyTransfer& self) {
             auto transfer = self.get();
             GilRelease released;
             transfer->runtime()->poll();
             const bool done = transfer->done();
             if (done) transfer->runtime()->lock_released(&interpreter_lock, site_interpreter);
             return done;
           })
      .def(
          "sync",
          [](const PyTransfer& self, std::optional<double> timeout, bool reads) {
            auto transfer = self.get();
            return wait_sliced(*transfer->runtime(), timeout, [&](std::chrono::nanoseconds slice) {
              return transfer->sync_for(slice, reads);
            });
          },
          py::arg("timeout") = py::none(), py::arg("reads") = true)
      .def(
          "leaf_sync",
          [](const PyTransfer& self, std::size_t leaf, std::optional<double> timeout) {
            auto transfer = self.get();
            return wait_sliced(*transfer->runtime(), timeout, [&](std::chrono::nanoseconds slice) {
              return transfer->leaf_sync_for(leaf, slice);
            });
          },
          py::arg("leaf"), py::arg("timeout") = py::none())
      .def("chunk_sync",
           [](const PyTransfer& self, std::size_t chunk) {
             auto transfer = self.get();
             return wait_sliced(*transfer->runtime(), std::nullopt,
                                [&](std::chrono::nanoseconds slice) {
                                  return transfer->chunk_sync_for(chunk, slice);
                                });
           })
      .def("pending", [](const PyTransfer& self) { return self.get()->pending(); })
      .def("issued", [](const PyTransfer& self) { return self.get()->issued(); })
      .def("source_sync",
           [](const PyTransfer& self) {
             auto transfer = self.get();
             return wait_sliced(
                 *transfer->runtime(), std::nullopt,
                 [&](std::chrono::nanoseconds slice) { return transfer->source_sync_for(slice); });
           })
      .def("wait_on_stream", &wait_on_stream)
      .def("wait_source_on_stream", &wait_source_on_stream)
      .def("hold_stream", &hold_stream)
      .def("elapsed_from",
           [](const PyTransfer& self, const PyTransfer& first) {
             return self.get()->elapsed_from(*first.get());
           })
      .def("interval", [](const PyTransfer& self) { return self.get()->interval(); })
      .def("marks", [](const PyTransfer& self) { return self.get()->marks(); })
      .def("chunks",
           [](const PyTransfer& self) {
             py::list answer;
             const auto transfer = self.get();
             for (const Chunk& chunk : transfer->plan().chunks) {
               answer.append(py::make_tuple(chunk.leaf, chunk.offset, chunk.bytes));
             }
             return answer;
           })
      .def("release_source", [](const PyTransfer& self) { self.get()->release_source(); })
      .def("discard", &PyTransfer::discard)
      .def("take_result", &PyTransfer::take_result)
      .def("release_all", [](const PyTransfer& self) { self.get()->release_all(); })
      .def("watch", [](const PyTransfer& self, const py::object& token) {
        Watch::instance().add(self.get(), share(token));
      });

  py::class_<TransferMarks>(module, "TransferMarks")
      .def("synchronize", &sync_marks)
      .def("times", &times_of, py::arg("base"), py::arg("base_time"));

  module.attr("most_staged") = StagingOptions::most_pinned / 2;  // each way
  py::class_<CopyEngine, std::shared_ptr<CopyEngine>>(module, "Engine")
      .def("submit", &submit, py::kw_only(), py::arg("device"), py::arg("to_device"),
           py::arg("items"), py::arg("after"), py::arg("chunk_bytes"), py::arg("staged") = false,
           py::arg("fresh") = std::vector<std::size_t>(), py::arg("finish") = py::none(),
           py::arg("open_ended") = false, py::arg("keep_source"), py::arg("keep_destination"),
           py::arg("timed") = true, py::arg("traced") = false)
      .def("complete",
           [](CopyEngine& self, PyTransfer& transfer, const PyStream& stream) {
             auto target = transfer.get();
             {
               GilRelease released;
               self.complete(*target, stream.ref);
             }
             transfer.set_complete();
           })
      .def(
          "copy_stream",
          [](CopyEngine& self, int device, bool to_device) {
            GilRelease released;
            return PyStream{
                self.runtime(),
                self.copy_stream(device, to_device ? Direction::to_device : Direction::to_host)};
          },
          py::arg("device"), py::arg("to_device"))
      .def(
          "configure_staging",
          [](CopyEngine& self, std::size_t slots, std::size_t slot_bytes, int threads,
             int populate_threads) {
            StagingOptions options;
            options.slots = slots;
            options.slot_bytes = slot_bytes;
            options.copiers = threads;
            options.populators = populate_threads;
            self.configure_staging(options);
          },
          py::arg("slots"), py::arg("slot_bytes"), py::arg("threads"), py::arg("populate_threads"))
      .def("staging_bytes", &CopyEngine::staging_bytes)
      .def("trim_staging",
           [](CopyEngine& self) {
             GilRelease released;
             return self.trim_staging();
           })
      .def("abandoned", [](CopyEngine& self) {
        GilRelease released;
        return self.reap();
      });

  module.def("engine", &engine_of);
  module.def("watch_post", [](const py::object& token) { Watch::instance().post(share(token)); });
  module.def("watch_next", [] { return Watch::instance().next(); });
  module.def(
      "plan_chunks",
      [](const std::vector<std::pair<std::size_t, std::size_t>>& leaves, std::size_t chunk_bytes) {
        std::vector<LeafExtent> extents;
        for (auto [bytes, element] : leaves) extents.push_back({bytes, element});
        ChunkPolicy policy;
        policy.chunk_bytes = chunk_bytes;
        std::vector<std::tuple<std::size_t, std::size_t, std::size_t>> answer;
        for (const Chunk& chunk : plan_chunks(extents, policy).chunks) {
          answer.emplace_back(chunk.leaf, chunk.offset, chunk.bytes);
        }
        return answer;
      },
      py::arg("leaves"), py::arg("chunk_bytes"));
}

}  // namespace streamlap::bindings
