#include "team.h"

#include <exception>
#include <thread>

#include "buffers.h"
#include "options.h"

namespace bench {

void Rendezvous::meet() {
  std::unique_lock lock(mutex_);
  if (broken_) throw BrokenUp{};
  const std::size_t round = round_;
  if (++waiting_ == parties_) {
    waiting_ = 0;
    ++round_;
    changed_.notify_all();
    return;
  }
  changed_.wait(lock, [&] { return round_ != round || broken_; });
  if (round_ == round) throw BrokenUp{};
}

void Rendezvous::break_up() noexcept {
  {
    std::lock_guard lock(mutex_);
    broken_ = true;
  }
  changed_.notify_all();
}

void StartLine::Hold::go() {
  line_.meet();
  if (gate_) gate_->open();
}

void StartLine::Hold::check() const {
  if (gate_ && gate_->timed_out()) {
    throw streamlap::Error(streamlap::ErrorKind::runtime,
                           "the gate was not opened within its limit: enqueuing the work took more "
                           "than 5 s, so the times mean nothing");
  }
}

StartLine::Hold StartLine::arm(Device& device, std::size_t rank, StreamRef stream) {
  // Once the gate is closed nobody may make or free page-locked memory, which waits for all
  // devices.
  meet();
  std::unique_ptr<streamlap::Gate> gate;
  if (rank == 0) {
    if (!held_) held_ = device.mark(false);
    gate = device.runtime()->gate(stream);
    device.record(*held_, stream);
  }
  Hold hold(*this, std::move(gate));
  meet();
  if (rank != 0) device.wait(stream, *held_);
  return hold;
}

void on_each(Devices& devices, const std::function<void(Device&, std::size_t, StartLine&)>& body) {
  StartLine line(devices.size());
  std::mutex mutex;
  std::exception_ptr error;
  const auto run = [&](std::size_t rank) {
    try {
      devices[rank]->use_in_this_thread();
      body(*devices[rank], rank, line);
    } catch (const Rendezvous::BrokenUp&) {
      // Another thread's error is the reason.
    } catch (...) {
      {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
      line.break_up();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 1; rank < devices.size(); ++rank) threads.emplace_back(run, rank);
    run(0);
  }
  if (error) std::rethrow_exception(error);
}

void require_device_room(Device& device, std::size_t bytes, const std::string& what) {
  if (!device.gpu()) return;  // it is the host's memory, which has been counted
  // A little stays for what CUDA and cuBLAS take themselves.
  const std::size_t kept = std::size_t{256} << 20;
  const std::size_t room = device.room();
  if (bytes + kept > room) {
    throw UsageError("this needs " + format_bytes(bytes + kept) + " on " + device.label() +
                     " and there are " + format_bytes(room) + ": use a smaller " + what);
  }
}

}  // namespace bench
