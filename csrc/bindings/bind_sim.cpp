// The simulated runtime.
#include <pybind11/stl.h>

#include "bindings/types.h"
#include "sim/runtime_sim.h"

namespace streamlap::bindings {

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
             return std::make_shared<sim::SimRuntime>(options, sim::parse_strategy(schedule));
           }),
           py::kw_only(), py::arg("schedule"), py::arg("devices"), py::arg("costs"))
      .def("decisions", &sim::SimRuntime::decisions, py::call_guard<GilRelease>())
      .def("help", &sim::SimRuntime::help, py::call_guard<GilRelease>());
  module.def("spend", &sim::SimRuntime::spend);
}

}  // namespace streamlap::bindings
