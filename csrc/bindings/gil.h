// The rules for the interpreter's lock, in one place.
//
//   * It is released around every call that may wait, and waits are sliced so that Ctrl-C arrives.
//   * No destructor of ours takes it: a Python reference that dies without it is handed to the
//     watch thread (see watch.h), so that no lock of ours is ever held while waiting for the
//     interpreter.
//     What torch calls when a tensor dies does take it, as torch's own of Python's memory does: it
//     is the streams of the thread that dropped the tensor which may still read it.
//   * A thread that would take it while the interpreter goes down is parked for good instead:
//     Python would end the thread by unwinding through code that must not be unwound.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/process.h"
#include "runtime/runtime.h"

namespace streamlap::bindings {

namespace py = pybind11;

bool interpreter_ending() noexcept;
// True in a daemon thread of the user's once the exit handler runs: it must not come back.
bool stranded() noexcept;
// For our own background thread, which the exit handler joins.
void keep_thread_to_the_end() noexcept;
// True while this thread runs a callable for a stream.
bool on_worker_thread() noexcept;
[[noreturn]] void park_thread() noexcept;

// Whether a thread is where the interpreter's end cannot hurt it: in code of ours that does not
// hold the lock and looks at stranded() before it takes it again. One for each thread.
class Outside {
 public:
  Outside();
  ~Outside();
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

  static Outside& here() {
    thread_local Outside mine;
    return mine;
  }
  void leave() noexcept { is_.store(true, std::memory_order_relaxed); }
  // Ordered before stranded(): the exit handler marks first and looks then, we the other way round,
  // so that one of the two sees the other.
  void come_back() noexcept {
    is_.store(false, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  bool is() const noexcept { return is_.load(std::memory_order_seq_cst); }
  unsigned long thread() const noexcept { return thread_; }

 private:
  std::atomic<bool> is_{false};
  const unsigned long thread_;
};
// The threads that are outside, as Python names them (threading.get_ident()).
std::vector<unsigned long> threads_outside();

class GilRelease {
 public:
  GilRelease() : outside_(Outside::here()), state_(PyEval_SaveThread()) { outside_.leave(); }
  ~GilRelease() noexcept(false) {
    outside_.come_back();
    if (stranded()) {
      outside_.leave();
      park_thread();
    }
    PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  Outside& outside_;
  PyThreadState* state_;
};

class GilAcquire {
 public:
  GilAcquire() {
    if (interpreter_ending()) park_thread();
    state_ = PyGILState_Ensure();
  }
  // Python ends a worker by unwinding it when the interpreter goes down in the middle of its work.
  ~GilAcquire() {
    if (interpreter_ending()) park_thread();
    PyGILState_Release(state_);
  }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

// A Python reference that C++ code may hold and drop anywhere.
using SharedObject = std::shared_ptr<PyObject>;
SharedObject share(py::handle object);

// A Python exception on its way through C++ threads; it may be thrown many times.
struct PythonError {
  SharedObject value;
};

// A callable for a worker thread. Exceptions come out as PythonError.
std::function<void()> as_task(const py::object& callable);

// What a checker knows the interpreter's lock by. A block dies with its last reference, and whoever
// had one before let go of it under that lock: the one that dies knows what they had waited for.
inline constexpr char interpreter_lock = 0;
inline constexpr Site site_interpreter{"python.interpreter_lock"};

// Calls `wait(slice)` without the lock until it answers true (then true) or `timeout` seconds of
// the runtime's clock have passed (then false). Signal handlers run between slices; what they raise
// is thrown. On a virtual clock a wait without a timeout is one slice: it ends, or is a deadlock.
template <class Wait>
bool wait_sliced(Runtime& runtime, std::optional<double> timeout, Wait&& wait) {
  process::require_usable();
  const std::chrono::nanoseconds slice =
      runtime.virtual_time() ? std::chrono::nanoseconds::max() : std::chrono::milliseconds(50);
  const double begin = timeout ? runtime.now() : 0;
  for (;;) {
    std::chrono::nanoseconds next = slice;
    if (timeout) {
      // Longer than a year is for ever: it must fit the type.
      const double left = std::min(*timeout - (runtime.now() - begin), 3e7);
      if (left < std::chrono::duration<double>(slice).count()) {
        // Rounded up: a virtual clock that is asked to go on by nothing stands still for ever.
        next = std::chrono::nanoseconds(
            left > 0 ? static_cast<std::chrono::nanoseconds::rep>(std::ceil(left * 1e9)) : 0);
      }
    }
    bool done = false;
    {
      GilRelease released;
      done = wait(next);
    }
    if (done) {
      runtime.lock_released(&interpreter_lock, site_interpreter);
      return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout && runtime.now() - begin >= *timeout) return false;
  }
}

// True while a pool reserves memory ahead of its use, in a thread of its own.
bool pools_busy();

void register_errors();
void bind_runtime(py::module_& module);
void bind_pool(py::module_& module);
void bind_transfer(py::module_& module);
void bind_copy_out(py::module_& module);
void bind_torch_tensor(py::module_& module);
void bind_tensor_row(py::module_& module);
void bind_tree(py::module_& module);
void bind_pages(py::module_& module);
void bind_sim(py::module_& module);
void bind_faults(py::module_& module);

}  // namespace streamlap::bindings
