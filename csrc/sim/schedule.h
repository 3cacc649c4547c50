// Who moves next in a simulation: the strategies, and the decisions of a run to replay it by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace streamlap::sim {

// A stream that can move: its head can start, or what it runs can end.
struct Choice {
  std::size_t stream = 0;  // in order of creation
  double time = 0;         // on the virtual clock, at which it would happen
};

// Not thread-safe: the simulation asks under its own lock.
class Strategy {
 public:
  Strategy() = default;
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;
  virtual ~Strategy() = default;

  // The position in `choices` of the one that moves; never called without any.
  virtual std::size_t pick(const std::vector<Choice>& choices) = 0;
  // Whether a stream moves now, while the host goes on by itself.
  virtual bool moves_beside_host(const std::vector<Choice>& choices) = 0;
};

// As fast as a device can, in order of time. What a prediction is made with.
std::unique_ptr<Strategy> eager();
// Nothing moves before the host blocks.
std::unique_ptr<Strategy> lazy();
std::unique_ptr<Strategy> random(std::uint64_t seed);
// A stream moves only when nothing else can.
std::unique_ptr<Strategy> starve(std::size_t stream);
// Priorities at random, lowered at `changes` moments of about `steps`: "A randomized scheduler with
// probabilistic guarantees of finding bugs" (Burckhardt and others, 2010).
std::unique_ptr<Strategy> pct(std::uint64_t seed, std::size_t changes, std::size_t steps = 1000);

// Every decision of a run, in order: a picked stream, or -1 for "the host goes on".
using Decisions = std::vector<int>;
// Takes the decisions of another run. Error(runtime) where the program does not follow.
std::unique_ptr<Strategy> replay(Decisions decisions);

// eager, lazy, random(7), starve(2), pct(7,3), replay(1 0 -1 2): as written by hand or by a report.
std::unique_ptr<Strategy> parse_strategy(const std::string& text);

}  // namespace streamlap::sim
