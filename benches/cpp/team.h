// One thread for each device, and the means by which they do things at the same time.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"

namespace bench {

// Where the threads meet. When one fails it is broken up, so that nobody waits for one that is
// gone.
class Rendezvous {
 public:
  struct BrokenUp {};

  explicit Rendezvous(std::size_t parties) : parties_(parties) {}
  void meet();  // throws BrokenUp
  void break_up() noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t parties_;
  std::size_t waiting_ = 0;
  std::size_t round_ = 0;
  bool broken_ = false;
};

// The streams of all devices held until all have their work: one gate, on the first device, for
// which the others wait. A second gate would have to be made while the first is closed, and making
// one may wait for the device that the first holds.
class StartLine {
 public:
  explicit StartLine(std::size_t parties) : rendezvous_(parties) {}

  // Opens when it dies, so that a throw does not leave a stream held.
  class Hold {
   public:
    Hold(StartLine& line, std::unique_ptr<streamlap::Gate> gate)
        : line_(line), gate_(std::move(gate)) {}
    // All have enqueued; the streams go.
    void go();
    // After the streams are done: throws when the gate opened by itself.
    void check() const;

   private:
    StartLine& line_;
    std::unique_ptr<streamlap::Gate> gate_;  // the first device's only
  };

  Hold arm(Device& device, std::size_t rank, StreamRef stream);
  void meet() { rendezvous_.meet(); }
  void break_up() noexcept { rendezvous_.break_up(); }

 private:
  Rendezvous rendezvous_;
  MarkPtr held_;  // after the gate; the first device's thread makes it
};

using Devices = std::vector<DevicePtr>;

// Runs body(device, rank, line) in one thread for each device; throws the first real error.
void on_each(Devices& devices, const std::function<void(Device&, std::size_t, StartLine&)>& body);

}  // namespace bench
