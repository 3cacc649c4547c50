#include "sim/schedule.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "base/errors.h"

namespace streamlap::sim {
namespace {

std::size_t earliest(const std::vector<Choice>& choices) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < choices.size(); ++i) {
    if (choices[i].time < choices[best].time) best = i;
  }
  return best;
}

class Eager final : public Strategy {
 public:
  std::size_t pick(const std::vector<Choice>& choices) override { return earliest(choices); }
  bool moves_beside_host(const std::vector<Choice>&) override { return true; }
};

class Lazy final : public Strategy {
 public:
  std::size_t pick(const std::vector<Choice>& choices) override { return earliest(choices); }
  bool moves_beside_host(const std::vector<Choice>&) override { return false; }
};

class Random final : public Strategy {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  // Not std::uniform_int_distribution: its numbers differ from library to library.
  std::size_t pick(const std::vector<Choice>& choices) override {
    return static_cast<std::size_t>(engine_() % choices.size());
  }
  bool moves_beside_host(const std::vector<Choice>&) override { return engine_() % 2 == 0; }

 private:
  std::mt19937_64 engine_;
};

class Starve final : public Strategy {
 public:
  explicit Starve(std::size_t stream) : stream_(stream) {}
  std::size_t pick(const std::vector<Choice>& choices) override {
    std::vector<Choice> others;
    for (const Choice& choice : choices) {
      if (choice.stream != stream_) others.push_back(choice);
    }
    if (others.empty()) return 0;
    const std::size_t stream = others[earliest(others)].stream;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (choices[i].stream == stream) return i;
    }
    return 0;
  }
  bool moves_beside_host(const std::vector<Choice>& choices) override {
    return std::any_of(choices.begin(), choices.end(),
                       [&](const Choice& choice) { return choice.stream != stream_; });
  }

 private:
  std::size_t stream_;
};

class Pct final : public Strategy {
 public:
  Pct(std::uint64_t seed, std::size_t changes, std::size_t steps) : engine_(seed) {
    for (std::size_t i = 0; i < changes; ++i) {
      changes_.insert(static_cast<std::size_t>(engine_() % std::max<std::size_t>(steps, 1)));
    }
  }
  std::size_t pick(const std::vector<Choice>& choices) override {
    std::size_t best = highest(choices);
    if (changes_.contains(step_++)) {
      priorities_[choices[best].stream] = --lowest_;
      best = highest(choices);
    }
    return best;
  }
  bool moves_beside_host(const std::vector<Choice>& choices) override {
    return priority(choices[highest(choices)].stream) > priority(host);
  }

 private:
  static constexpr std::size_t host = static_cast<std::size_t>(-1);

  long long priority(std::size_t stream) {
    auto known = priorities_.find(stream);
    if (known == priorities_.end()) {
      known = priorities_.emplace(stream, static_cast<long long>(engine_() >> 2) + 1).first;
    }
    return known->second;
  }
  std::size_t highest(const std::vector<Choice>& choices) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < choices.size(); ++i) {
      if (priority(choices[i].stream) > priority(choices[best].stream)) best = i;
    }
    return best;
  }

  std::mt19937_64 engine_;
  std::map<std::size_t, long long> priorities_;
  std::set<std::size_t> changes_;
  std::size_t step_ = 0;
  long long lowest_ = 0;  // below every priority that was drawn
};

class Replay final : public Strategy {
 public:
  explicit Replay(Decisions decisions) : decisions_(std::move(decisions)) {}
  std::size_t pick(const std::vector<Choice>& choices) override {
    const int stream = next();
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (static_cast<int>(choices[i].stream) == stream) return i;
    }
    throw Error(ErrorKind::runtime, "the replayed program differs: stream " +
                                        std::to_string(stream) + " cannot move at decision " +
                                        std::to_string(position_ - 1));
  }
  bool moves_beside_host(const std::vector<Choice>&) override {
    if (peek() != -1) return true;
    ++position_;
    return false;
  }

 private:
  int peek() const {
    if (position_ < decisions_.size()) return decisions_[position_];
    throw Error(ErrorKind::runtime, "the replayed program differs: it goes on after decision " +
                                        std::to_string(position_));
  }
  int next() {
    const int value = peek();
    ++position_;
    return value;
  }

  Decisions decisions_;
  std::size_t position_ = 0;
};

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorKind::invalid_argument,
              "'" + text +
                  "' is no strategy: eager, lazy, random(SEED), starve(STREAM), "
                  "pct(SEED,CHANGES) or replay(DECISIONS)");
}

}  // namespace

std::unique_ptr<Strategy> eager() { return std::make_unique<Eager>(); }
std::unique_ptr<Strategy> lazy() { return std::make_unique<Lazy>(); }
std::unique_ptr<Strategy> random(std::uint64_t seed) { return std::make_unique<Random>(seed); }
std::unique_ptr<Strategy> starve(std::size_t stream) { return std::make_unique<Starve>(stream); }
std::unique_ptr<Strategy> pct(std::uint64_t seed, std::size_t changes, std::size_t steps) {
  return std::make_unique<Pct>(seed, changes, steps);
}
std::unique_ptr<Strategy> replay(Decisions decisions) {
  return std::make_unique<Replay>(std::move(decisions));
}

std::unique_ptr<Strategy> parse_strategy(const std::string& text) {
  if (text == "eager") return eager();
  if (text == "lazy") return lazy();
  const std::size_t open = text.find('(');
  if (open == std::string::npos || text.back() != ')') refuse(text);
  std::string inside = text.substr(open + 1, text.size() - open - 2);
  std::replace(inside.begin(), inside.end(), ',', ' ');
  std::istringstream words(inside);
  std::vector<long long> numbers;
  for (std::string word; words >> word;) {
    std::size_t used = 0;
    try {
      numbers.push_back(std::stoll(word, &used));
    } catch (const std::exception&) {
      refuse(text);
    }
    if (used != word.size()) refuse(text);
  }
  const std::string name = text.substr(0, open);
  if (name == "replay") return replay(Decisions(numbers.begin(), numbers.end()));
  if (std::any_of(numbers.begin(), numbers.end(), [](long long n) { return n < 0; })) refuse(text);
  if (name == "random" && numbers.size() == 1)
    return random(static_cast<std::uint64_t>(numbers[0]));
  if (name == "starve" && numbers.size() == 1) return starve(static_cast<std::size_t>(numbers[0]));
  if (name == "pct" && (numbers.size() == 2 || numbers.size() == 3)) {
    return pct(static_cast<std::uint64_t>(numbers[0]), static_cast<std::size_t>(numbers[1]),
               numbers.size() == 3 ? static_cast<std::size_t>(numbers[2]) : 1000);
  }
  refuse(text);
}

}  // namespace streamlap::sim
