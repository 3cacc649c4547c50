// The simulated runtime.
#include <pybind11/stl.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "bindings/types.h"
#include "sim/runtime_sim.h"

namespace streamlap::bindings {
namespace {

struct Simulations {
  std::mutex mutex;
  std::vector<std::weak_ptr<sim::SimRuntime>> all;
};

Simulations& simulations() {
  static auto* made = new Simulations();
  return *made;
}

void note(const std::shared_ptr<sim::SimRuntime>& made) {
  std::lock_guard lock(simulations().mutex);
  std::erase_if(simulations().all, [](const auto& other) { return other.expired(); });
  simulations().all.push_back(made);
}

// Nobody knows which of them moves what a thread waits for: a slot names no runtime.
bool help_simulations() {
  std::vector<std::shared_ptr<sim::SimRuntime>> alive;
  {
    std::lock_guard lock(simulations().mutex);
    for (const auto& weak : simulations().all) {
      if (auto simulation = weak.lock()) alive.push_back(std::move(simulation));
    }
  }
  return std::any_of(alive.begin(), alive.end(), [](const auto& one) { return one->help(); });
}

}  // namespace

void bind_sim(py::module_& module) {
  py::class_<sim::SimRuntime, Runtime, std::shared_ptr<sim::SimRuntime>>(module, "SimRuntime")
      .def(py::init([](const std::string& schedule, int devices,
                       const std::map<std::string, double>& costs) {
             sim::SimOptions options;
             options.devices = devices;
             const std::map<std::string, double*> known = {
                 {"per_copy", &options.cost.per_copy},   {"to_host", &options.cost.to_host},
                 {"to_device", &options.cost.to_device}, {"on_device", &options.cost.on_device},
                 {"memcpy", &options.cost.memcpy},       {"task", &options.cost.task}};
             for (const auto& [name, value] : costs) {
               auto found = known.find(name);
               if (found == known.end() || !(value >= 0)) {
                 throw Error(ErrorKind::invalid_argument,
                             "unknown or negative cost '" + name + "' of a simulation");
               }
               *found->second = value;
             }
             auto made = std::make_shared<sim::SimRuntime>(options, sim::parse_strategy(schedule));
             note(made);
             return made;
           }),
           py::kw_only(), py::arg("schedule"), py::arg("devices"), py::arg("costs"))
      .def("decisions", &sim::SimRuntime::decisions, py::call_guard<GilRelease>())
      .def("finish", &sim::SimRuntime::finish, py::call_guard<GilRelease>())
      .def("help", &sim::SimRuntime::help, py::call_guard<GilRelease>());
  module.def("spend", &sim::SimRuntime::spend);
  module.def("help_simulations", &help_simulations, py::call_guard<GilRelease>());
}

}  // namespace streamlap::bindings
