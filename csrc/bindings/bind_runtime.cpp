// Runtimes, streams, events and gates.
#include <pybind11/stl.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "base/process.h"
#include "bindings/types.h"
#include "bindings/watch.h"
#include "check/checked_runtime.h"
#include "check/faulty_runtime.h"
#include "runtime/worker.h"

namespace streamlap::bindings {
namespace {

constexpr Site site_python{"python.runtime"};

StreamKind kind_from_name(const std::string& name) {
  if (name == "compute") return StreamKind::compute;
  if (name == "copy") return StreamKind::copy;
  if (name == "host") return StreamKind::host;
  throw Error(ErrorKind::invalid_argument,
              "unknown kind of stream '" + name + "': compute, copy or host");
}

bool check_asked() {
  const char* value = std::getenv("STREAMLAP_CHECK");
  return value != nullptr && *value != 0 && std::string(value) != "0";
}

std::shared_ptr<Runtime> checked_if_asked(std::shared_ptr<Runtime> runtime) {
  if (!check_asked()) return runtime;
  return std::make_shared<order::CheckedRuntime>(std::move(runtime));
}

// Runtimes live to the end of the process: workers and driver handles must not be torn down by
// static destruction.
std::shared_ptr<Runtime>& host_runtime_slot() {
  static auto* runtime = new std::shared_ptr<Runtime>(checked_if_asked(make_host_runtime()));
  return *runtime;
}

// What the exit handler finds of CUDA, without waiting for a thread that is just starting it.
std::atomic<Runtime*> g_cuda_runtime{nullptr};

std::shared_ptr<Runtime> cuda_runtime() {
  static std::mutex mutex;
  static auto* runtime = new std::shared_ptr<Runtime>();
  GilRelease released;
  std::lock_guard lock(mutex);
  if (!*runtime) {
    *runtime = checked_if_asked(make_cuda_runtime());
    g_cuda_runtime = runtime->get();
  }
  return *runtime;
}

// What checks a runtime's calls, be it beneath injected faults; null: nothing does.
order::CheckedRuntime* checking(Runtime& runtime) {
  if (auto* faulty = dynamic_cast<fault::FaultyRuntime*>(&runtime))
    return checking(*faulty->inner());
  return dynamic_cast<order::CheckedRuntime*>(&runtime);
}

// One that is checked is its own; what it wraps is used by nobody else, or lives to the end.
std::shared_ptr<Runtime> checked(const std::shared_ptr<Runtime>& runtime) {
  if (runtime.get() != g_cuda_runtime) {
    return hand_out(std::make_shared<order::CheckedRuntime>(runtime));
  }
  static auto* stock = new std::shared_ptr<StreamStock>(std::make_shared<StreamStock>(runtime));
  return hand_out(std::make_shared<order::CheckedRuntime>(runtime, *stock));
}

void sync_stream(const PyStream& stream) {
  EventPtr event = stream.runtime->event_create(stream.ref.device);
  stream.runtime->event_record(*event, stream.ref, site_python);
  try {
    wait_sliced(*stream.runtime, std::nullopt, [&](std::chrono::nanoseconds slice) {
      return stream.runtime->event_sync_for(*event, slice, site_python);
    });
  } catch (const PythonError&) {
    // Thrown again below, by the call that takes the error off the stream.
  } catch (const Error&) {
  }
  GilRelease released;
  stream.runtime->stream_sync(stream.ref, site_python);
}

py::dict probe() {
  CudaProbe found;
  {
    GilRelease released;
    found = probe_cuda();
  }
  py::dict answer;
  answer["built"] = found.built;
  answer["devices"] = found.devices;
  answer["driver_version"] = found.driver_version;
  answer["runtime_version"] = found.runtime_version;
  answer["architectures"] = found.architectures;
  answer["reason"] = found.reason;
  return answer;
}

// While it lives, in the thread that asked for it: see Runtime::hold_device.
struct HeldDevice {
  std::shared_ptr<void> held;
};

// Waits until what this process started is idle, then lets everything leak. For the exit handler.
bool shutdown(double timeout) {
  bool idle = false;
  process::mark_ending();
  if (!process::forked()) {
    std::vector<Runtime*> runtimes{host_runtime_slot().get()};
    if (Runtime* cuda = g_cuda_runtime) runtimes.push_back(cuda);
    GilRelease released;
    const double deadline = steady_seconds() + timeout;
    do {
      idle = !pools_busy() && handed_out_idle();
      for (Runtime* runtime : runtimes) idle = idle && is_idle(*runtime);
      if (!idle) std::this_thread::sleep_for(std::chrono::microseconds(200));
    } while (!idle && steady_seconds() < deadline);
  }
  process::mark_closing();
  if (!process::forked()) Watch::instance().stop();
  return idle;
}

}  // namespace

const char* kind_name(StreamKind kind) {
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

void bind_runtime(py::module_& module) {
  py::class_<PyStream>(module, "Stream")
      .def_property_readonly("device", [](const PyStream& self) { return self.ref.device; })
      .def_property_readonly("kind", [](const PyStream& self) { return kind_name(self.ref.kind); })
      .def_property_readonly("handle", [](const PyStream& self) { return self.ref.handle; })
      .def_property_readonly("runtime", [](const PyStream& self) { return self.runtime; })
      .def("synchronize", &sync_stream)
      .def("idle",
           [](const PyStream& self) {
             GilRelease released;
             self.runtime->poll();
             return self.runtime->stream_idle(self.ref);
           })
      .def("capturing",
           [](const PyStream& self) { return self.runtime->stream_capturing(self.ref); })
      .def("launch",
           [](const PyStream& self, const py::object& callable) {
             auto task = as_task(callable);
             GilRelease released;
             self.runtime->launch(std::move(task), self.ref);
             self.runtime->poll();
           })
      .def("reset_error",
           [](const PyStream& self) {
             GilRelease released;
             self.runtime->stream_reset_error(self.ref);
           })
      .def("gate",
           [](const PyStream& self) {
             GilRelease released;
             return self.runtime->gate(self.ref);
           })
      .def(
          "record",
          [](const PyStream& self, bool timed) {
            GilRelease released;
            PyEvent event{self.runtime, self.runtime->event_create(self.ref.device, timed)};
            self.runtime->event_record(*event.event, self.ref, site_python);
            return event;
          },
          py::arg("timed") = false)
      .def("wait", [](const PyStream& self, const PyEvent& event) {
        GilRelease released;
        self.runtime->stream_wait(self.ref, *event.event, site_python);
      });

  py::class_<PyEvent>(module, "Event")
      .def("done",
           [](const PyEvent& self) {
             GilRelease released;
             self.runtime->poll();
             return self.runtime->event_query(*self.event, site_python);
           })
      .def(
          "synchronize",
          [](const PyEvent& self, std::optional<double> timeout) {
            return wait_sliced(*self.runtime, timeout, [&](std::chrono::nanoseconds slice) {
              return self.runtime->event_sync_for(*self.event, slice, site_python);
            });
          },
          py::arg("timeout") = py::none())
      .def(
          "time",
          [](const PyEvent& self, const PyEvent& base, double base_time) {
            GilRelease released;
            return time_of(*self.runtime, self.event, base, base_time);
          },
          py::arg("base"), py::arg("base_time"))
      .def("elapsed", [](const PyEvent& begin, const PyEvent& end) {
        return begin.runtime->event_elapsed(*begin.event, *end.event);
      });

  py::class_<Gate>(module, "Gate")
      .def("open", &Gate::open)
      .def_property_readonly("timed_out", &Gate::timed_out);

  py::class_<HeldDevice>(module, "HeldDevice");
  py::class_<Runtime, std::shared_ptr<Runtime>>(module, "Runtime")
      .def_property_readonly("name", &Runtime::name)
      .def_property_readonly("device_count", &Runtime::device_count)
      .def_property_readonly("uses_device_memory", &Runtime::uses_device_memory)
      .def_property_readonly("pinned_how", &Runtime::pinned_how)
      .def("active_devices",
           [](Runtime& self) {
             std::vector<int> active;
             for (int device = 0; device < self.device_count(); ++device) {
               if (self.device_active(device)) active.push_back(device);
             }
             return active;
           })
      .def(
          "stream",
          [](const std::shared_ptr<Runtime>& self, int device, const std::string& kind,
             bool high_priority) {
            StreamKind wanted = kind_from_name(kind);
            GilRelease released;
            return PyStream{self, self->stream_create(device, wanted, high_priority)};
          },
          py::arg("device"), py::arg("kind"), py::arg("high_priority") = false)
      .def(
          "adopt",
          [](const std::shared_ptr<Runtime>& self, int device, std::uintptr_t handle) {
            return PyStream{self, StreamRef{handle, device, StreamKind::compute}};
          },
          py::arg("device"), py::arg("handle"))
      .def("synchronize",
           [](Runtime& self, int device) {
             // Twice: what a worker issues in its last task may be another's work.
             for (int round = 0; round < 2; ++round) {
               for (const EventPtr& mark : self.mark_workers(device)) {
                 try {
                   wait_sliced(self, std::nullopt, [&](std::chrono::nanoseconds slice) {
                     return self.event_sync_for(*mark, slice, site_python);
                   });
                 } catch (const PythonError&) {
                   // Whoever owns that work is told; this only waits for its end.
                 } catch (const Error&) {
                   if (self.event_state(*mark, site_python) != EventState::passed) throw;
                 }
               }
             }
             if (!self.uses_device_memory()) return;
             GilRelease released;
             self.device_sync(device);
           })
      .def("idle",
           [](Runtime& self) {
             GilRelease released;
             return self.idle();
           })
      .def("hold_device",
           [](Runtime& self, int device) { return HeldDevice{self.hold_device(device)}; })
      .def("now", &Runtime::now)
      .def_property_readonly("checked", &Runtime::checked)
      .def("accesses",
           [](Runtime& self) {
             auto* checked = checking(self);
             return checked == nullptr ? 0 : checked->checker().accesses();
           })
      .def(
          "declare",
          [](Runtime& self, const PyStream& stream, std::uintptr_t pointer, std::size_t bytes,
             bool writes) {
            self.declare(stream.ref, reinterpret_cast<const void*>(pointer), bytes, writes);
          },
          py::arg("stream"), py::arg("pointer"), py::arg("nbytes"), py::arg("writes"))
      .def(
          "fresh",
          [](Runtime& self, std::uintptr_t pointer, std::size_t bytes) {
            self.fresh(reinterpret_cast<void*>(pointer), bytes);
          },
          py::arg("pointer"), py::arg("nbytes"))
      .def(
          "host_reads",
          [](Runtime& self, std::uintptr_t pointer, std::size_t bytes) {
            self.host_reads(reinterpret_cast<const void*>(pointer), bytes);
          },
          py::arg("pointer"), py::arg("nbytes"));

  module.def("checked", &checked);
  // Python's own hand-overs from thread to thread; `lock` is any number that both sides use.
  module.def("acquired", [](std::uintptr_t lock) {
    order::acquired_by_all(reinterpret_cast<const void*>(lock));
  });
  module.def("released", [](std::uintptr_t lock) {
    order::released_by_all(reinterpret_cast<const void*>(lock));
  });
  module.attr("interpreter_lock") = reinterpret_cast<std::uintptr_t>(&interpreter_lock);
  module.def("new_host_runtime", [] { return hand_out(make_host_runtime()); });
  module.def("host_runtime", [] { return host_runtime_slot(); });
  module.def("cuda_runtime", &cuda_runtime);
  module.def("cuda_probe", &probe);
  module.def("cuda_reason", [] { return probe_cuda().reason; });
  module.def("shutdown", &shutdown);
  module.def("on_worker_thread", &on_worker_thread);
  module.def("threads_outside", &threads_outside);
  // Does not return in a thread that is to be parked.
  module.def("park_if_stranded", [] { const GilRelease released; });
  module.def("mark_started", &process::mark_started);
  module.def("forked", &process::forked);
  module.def("ending", &process::ending);
  module.def("closing", &process::closing);
  module.def("enter", [] {
    process::require_usable();
    return process::ending();
  });
  module.def("require_usable", &process::require_usable);
}

}  // namespace streamlap::bindings
