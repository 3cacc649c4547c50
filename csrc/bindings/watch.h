// What streamlap's one background thread of Python waits for: transfers with callbacks, transfers
// that nobody holds any more, and references that died on threads without the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "bindings/gil.h"
#include "transfer/copy_engine.h"

namespace streamlap::bindings {

class Watch {
 public:
  static Watch& instance();  // never destroyed

  // `token` is returned by next() once the transfer is done, with or without an error.
  void add(std::shared_ptr<Transfer> transfer, SharedObject token);
  // `token` is returned by next() as soon as it can be.
  void post(SharedObject token);
  // True while something that is on its way out still holds memory: abandoned transfers in flight
  // (of any engine: a pool serves all), and references yet to be dropped.
  bool holding();
  void abandon(const std::shared_ptr<CopyEngine>& engine, std::shared_ptr<Transfer> transfer);
  // Keeps an engine until none of its abandoned transfers is in flight.
  void look_after(const std::shared_ptr<CopyEngine>& engine);
  void drop_later(PyObject* object) noexcept;
  // Blocks (lock released) until something is done: the tokens, perhaps none. None after stop().
  py::object next();
  void stop() noexcept;

 private:
  struct Watched {
    std::shared_ptr<Transfer> transfer;
    SharedObject token;
  };

  struct Kept {
    std::shared_ptr<CopyEngine> engine;
    bool fresh = true;  // more may have been abandoned since the last look
  };

  bool collect(std::vector<SharedObject>& tokens, std::vector<PyObject*>& dropped);
  void wait(std::chrono::microseconds& nap);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Watched> watched_;
  std::vector<SharedObject> posted_;
  std::vector<PyObject*> dropped_;
  bool dropping_ = false;      // next() is letting go of some right now
  std::vector<Kept> engines_;  // with abandoned transfers in flight
  bool abandoned_ = false;     // something was abandoned since the last look
  bool stopped_ = false;
  bool in_flight_ = false;  // the last look found abandoned transfers that are not done
};

}  // namespace streamlap::bindings
