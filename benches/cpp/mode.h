// The four modes: each measures on the devices it is given and writes rows into the report.
#pragma once

#include <mutex>

#include "options.h"
#include "report.h"
#include "team.h"

namespace bench {

// What the modes share. The report is written by one thread at a time.
struct Bench {
  const Options& options;
  Devices& devices;
  Report& report;
  std::mutex mutex = {};

  Device& first() { return *devices.front(); }
  bool on_gpu() { return first().gpu(); }
  void fault(const std::string& text) {
    std::lock_guard lock(mutex);
    report.faults.push_back(text);
  }
  void note(const std::string& text) {
    std::lock_guard lock(mutex);
    report.note(text);
  }
  // One line on stderr that says what is being done, where a person watches.
  void progress(const std::string& text);
};

void run_bandwidth(Bench& bench);
void run_pool(Bench& bench);
void run_overlap(Bench& bench);
void run_small(Bench& bench);

}  // namespace bench
