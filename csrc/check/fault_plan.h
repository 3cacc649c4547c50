// Faults that are made on purpose: which call fails, and how. Written "event_record:3:once", or
// several as "launch:1:once,stream_sync:1:always".
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "base/errors.h"

namespace streamlap::fault {

// Every call of the seam that may throw.
enum class Call {
  alloc_pinned,
  alloc_device,
  stream_create,
  event_create,
  copy_async,
  move,
  launch,
  event_record,
  stream_wait,
  stream_reset_error,
  event_query,
  stream_capturing,
  stream_idle,
  event_elapsed,
  event_time,
  mark_workers,
  idle,
  event_sync,
  stream_sync,
  device_sync,
};
inline constexpr std::size_t calls = 20;
inline constexpr std::array<const char*, calls> call_names = {"alloc_pinned",  "alloc_device",
                                                              "stream_create", "event_create",
                                                              "copy_async",    "move",
                                                              "launch",        "event_record",
                                                              "stream_wait",   "stream_reset_error",
                                                              "event_query",   "stream_capturing",
                                                              "stream_idle",   "event_elapsed",
                                                              "event_time",    "mark_workers",
                                                              "idle",          "event_sync",
                                                              "stream_sync",   "device_sync"};

enum class Mode {
  once,       // this call fails, the next ones do not
  always,     // this call and all later ones of its kind
  sticky,     // the device's context is lost: from here on every call fails
  later,      // the call succeeds; its error is met by whoever waits for the stream
  memory,     // there is no memory for it
  interrupt,  // what Ctrl-C does to a host that waits; never in a callable, which has no Ctrl-C
};
inline constexpr std::size_t modes = 6;
inline constexpr std::array<const char*, modes> mode_names = {"once",  "always", "sticky",
                                                              "later", "memory", "interrupt"};

constexpr bool enqueues(Call call) { return call >= Call::copy_async && call <= Call::stream_wait; }
constexpr bool waits(Call call) { return call >= Call::event_sync; }
// Only what enqueues can fail later, only what waits can be interrupted, and what only asks or
// waits needs no memory.
constexpr bool applies(Mode mode, Call call) {
  if (mode == Mode::later) return enqueues(call);
  if (mode == Mode::interrupt) return waits(call);
  if (mode == Mode::memory) return call <= Call::stream_reset_error || call == Call::mark_workers;
  return true;
}

struct Plan {
  Call call{};
  std::size_t at = 1;  // the first call is 1
  Mode mode{};
};

std::string to_string(const Plan& plan);
// Plans with commas between them; none if the text is empty. Throws Error(invalid_argument) that
// says what may be written.
std::vector<Plan> parse_plans(const std::string& text);

// The error of a fault; the text names the plan.
class Injected final : public Error {
 public:
  using Error::Error;
};
// What the Python module turns into a KeyboardInterrupt.
struct Interrupt {};

}  // namespace streamlap::fault
