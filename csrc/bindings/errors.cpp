// Turns the core's errors into the classes of streamlap.errors.
#include "base/errors.h"

#include "bindings/gil.h"
#include "check/fault_plan.h"

namespace streamlap::bindings {
namespace {

const char* class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument:
      return "InvalidArgument";
    case ErrorKind::out_of_memory:
      return "OutOfMemory";
    case ErrorKind::pool_exhausted:
      return "PoolExhausted";
    case ErrorKind::sticky:
      return "DeviceLost";
    case ErrorKind::forked:
      return "ForkedProcess";
    case ErrorKind::capture:
      return "CaptureError";
    case ErrorKind::order:
      return "OrderError";
    case ErrorKind::runtime:
      break;
  }
  return "DeviceError";
}

py::object error_class(ErrorKind kind) {
  return py::module_::import("streamlap.errors").attr(class_name(kind));
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const PythonError& error) {
    PyObject* value = error.value.get();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  } catch (const fault::Interrupt&) {
    PyErr_SetNone(PyExc_KeyboardInterrupt);
  } catch (const PoolExhausted& error) {
    py::object cls = error_class(error.kind());
    py::object value = cls(error.what(), error.used, error.limit);
    PyErr_SetObject(cls.ptr(), value.ptr());
  } catch (const Error& error) {
    PyErr_SetString(error_class(error.kind()).ptr(), error.what());
  }
}

}  // namespace

void register_errors() { py::register_exception_translator(&translate); }

}  // namespace streamlap::bindings
