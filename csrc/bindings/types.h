// What Python holds of the core's objects.
#pragma once

#include <memory>
#include <vector>

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

// When a done event was reached, on the clock of Runtime::now(). `base` is a timed event of the
// same device that was reached at `base_time`. NaN where it cannot be told.
double time_of(Runtime& runtime, const EventPtr& event, const PyEvent& base, double base_time);

// Those whose work so far a copy of `engine` comes after; streams of another runtime are refused.
std::vector<StreamRef> streams_of(const CopyEngine& engine,
                                  const std::vector<const PyStream*>& streams);

// torch's current streams on the devices in use; none for a runtime without device memory.
std::vector<PyStream> current_streams(const std::shared_ptr<Runtime>& runtime);

// For a runtime that Python may let go of. Its last owner may hold the interpreter's lock, which a
// task of its workers may be waiting for: it is taken down by a thread of its own, after the tasks.
std::shared_ptr<Runtime> hand_out(std::shared_ptr<Runtime> runtime);
// True when every one of these that there is, be it on its way out, has nothing left to do.
// Simulations do not count: they do nothing by themselves.
bool handed_out_idle();
// A runtime that cannot be asked any more is not waited for.
bool is_idle(Runtime& runtime) noexcept;

// The one engine of a runtime, as long as somebody needs it.
std::shared_ptr<CopyEngine> engine_of(const std::shared_ptr<Runtime>& runtime);

}  // namespace streamlap::bindings
