// What Python holds of the core's objects.
#pragma once

#include <memory>

#include "bindings/gil.h"
#include "runtime/runtime.h"
#include "transfer/copy_engine.h"
#include "transfer/pinned_pool.h"

namespace streamlap::bindings {

struct PyStream {
  std::shared_ptr<Runtime> runtime;
  StreamRef ref;
};

struct PyEvent {
  std::shared_ptr<Runtime> runtime;
  EventPtr event;
};

const char* kind_name(StreamKind kind);

}  // namespace streamlap::bindings
