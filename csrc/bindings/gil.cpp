#include "bindings/gil.h"

#include <unistd.h>

#include <mutex>
#include <vector>

#include "base/process.h"
#include "bindings/watch.h"
#include "check/order_checker.h"

namespace streamlap::bindings {

bool interpreter_ending() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

namespace {

thread_local bool t_on_worker = false;
thread_local bool t_own_thread = false;

class OnWorker {
 public:
  OnWorker() { t_on_worker = true; }
  ~OnWorker() { t_on_worker = outer_; }

 private:
  const bool outer_ = t_on_worker;  // a simulation runs callables in the thread that waits for them
};

}  // namespace

bool on_worker_thread() noexcept { return t_on_worker; }

void keep_thread_to_the_end() noexcept { t_own_thread = true; }

bool stranded() noexcept {
  if (interpreter_ending()) return true;
  // Workers finish what they are at; our own thread is joined; the main thread ends it all.
  return process::ending() && !t_on_worker && !t_own_thread && gettid() != getpid();
}

void park_thread() noexcept {
  for (;;) pause();
}

namespace {

// Never destroyed: threads come and go while the process's own statics die. In a forked child it is
// left alone: another thread may have held the mutex.
struct Register {
  std::mutex mutex;
  std::vector<const Outside*> all;

  static Register& instance() {
    static Register& only = *new Register;
    return only;
  }
};

}  // namespace

Outside::Outside() : thread_(PyThread_get_thread_ident()) {
  if (process::forked()) return;
  Register& known = Register::instance();
  const std::lock_guard lock(known.mutex);
  known.all.push_back(this);
}

Outside::~Outside() {
  if (process::forked()) return;
  Register& known = Register::instance();
  const std::lock_guard lock(known.mutex);
  std::erase(known.all, this);
}

std::vector<unsigned long> threads_outside() {
  if (process::forked()) return {};
  Register& known = Register::instance();
  const std::lock_guard lock(known.mutex);
  std::vector<unsigned long> answer;
  for (const Outside* one : known.all) {
    if (one->is()) answer.push_back(one->thread());
  }
  return answer;
}

SharedObject share(py::handle object) {
  object.inc_ref();
  return SharedObject(object.ptr(), [](PyObject* pointer) {
    if (process::leaking() || interpreter_ending()) return;
    // What is freed by this may be handed out next, to a thread that takes the lock after us.
    order::released_by_all(&interpreter_lock);
    if (PyGILState_Check() != 0) {
      Py_DECREF(pointer);
    } else {
      Watch::instance().drop_later(pointer);
    }
  });
}

std::function<void()> as_task(const py::object& callable) {
  return [shared = share(callable)] {
    if (process::closing()) return;
    OnWorker here;
    GilAcquire gil;
    PyObject* answer = PyObject_CallNoArgs(shared.get());
    if (answer != nullptr) {
      Py_DECREF(answer);
      return;
    }
    PyObject* type = nullptr;
    PyObject* value = nullptr;
    PyObject* traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) PyException_SetTraceback(value, traceback);
    PythonError error{share(value)};
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    throw error;
  };
}

}  // namespace streamlap::bindings
