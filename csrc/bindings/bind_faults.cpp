// Runtimes on which calls fail as planned.
#include <pybind11/stl.h>

#include "bindings/types.h"
#include "check/faulty_runtime.h"

namespace streamlap::bindings {

void bind_faults(py::module_& module) {
  py::class_<fault::FaultyRuntime, Runtime, std::shared_ptr<fault::FaultyRuntime>>(module,
                                                                                   "FaultyRuntime")
      .def(py::init<std::shared_ptr<Runtime>>(), py::arg("inner"))
      .def("arm", [](fault::FaultyRuntime& self,
                     const std::string& plan) { self.arm(fault::parse_plans(plan)); })
      .def("disarm", &fault::FaultyRuntime::disarm)
      .def_property_readonly("fired", &fault::FaultyRuntime::fired)
      .def_property_readonly("sites", &fault::FaultyRuntime::sites)
      .def_property_readonly("counts", [](const fault::FaultyRuntime& self) {
        std::map<std::string, std::size_t> counts;
        for (std::size_t call = 0; call < fault::calls; ++call) {
          const std::size_t count = self.count(static_cast<fault::Call>(call));
          if (count > 0) counts[fault::call_names[call]] = count;
        }
        return counts;
      });
  module.def("fault_modes", [](const std::string& call) {
    std::vector<std::string> found;
    for (std::size_t number = 0; number < fault::modes; ++number) {
      const char* mode = fault::mode_names[number];
      try {
        fault::parse_plans(call + ":1:" + mode);
        found.push_back(mode);
      } catch (const Error&) {
        // That call does not fail like that.
      }
    }
    return found;
  });
}

}  // namespace streamlap::bindings
