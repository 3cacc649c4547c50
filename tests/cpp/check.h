// A test header without dependencies: each tests/cpp/test_*.cpp includes it once and is one
// program.
//
//   TEST(name) { CHECK(cond); CHECK_EQ(a, b); CHECK_THROWS(expr, Type); REQUIRE(cond); SKIP("why");
//   }
//
// CHECKs count and go on, from any thread; REQUIRE and SKIP end the test, on its own thread only.
// An argument runs only the tests whose name contains it, or one of several between commas. Exit
// status: 0 all passed, 1 a failure,
// 2 no test selected, 77 every selected test skipped. STREAMLAP_REQUIRE_GPU makes a skip a failure.
#pragma once

#include <atomic>
#include <chrono>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace check {

struct Test {
  std::string name;
  void (*body)();
};

struct Skipped {
  std::string reason;
};

struct Stopped {};

inline std::vector<Test> registered;
inline std::atomic<int> failures{0};
inline std::FILE* out = stdout;

inline bool add(const char* name, void (*body)()) {
  registered.push_back({name, body});
  return true;
}

inline void fail(const char* file, int line, const std::string& what) {
  ++failures;
  std::fprintf(out, "%s:%d: %s\n", file, line, what.c_str());
}

template <class T>
concept Number = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char> &&
                 !std::same_as<T, wchar_t> && !std::same_as<T, char8_t> &&
                 !std::same_as<T, char16_t> && !std::same_as<T, char32_t>;

template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (Number<A> && Number<B>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <class T>
std::string show(const T& value) {
  if constexpr (requires(std::ostream& os) { os << value; }) {
    std::ostringstream os;
    os << std::boolalpha << value;
    return os.str();
  } else {
    return "(no text)";
  }
}

template <class A, class B>
void check_eq(const A& a, const B& b, const char* file, int line, const char* text) {
  if (!equal(a, b)) {
    fail(file, line, "CHECK_EQ(" + std::string(text) + "): " + show(a) + " != " + show(b));
  }
}

inline bool selected(std::string_view name, std::string_view filter) {
  for (;;) {
    const std::size_t comma = filter.find(',');
    if (name.find(filter.substr(0, comma)) != std::string_view::npos) return true;
    if (comma == std::string_view::npos) return false;
    filter.remove_prefix(comma + 1);
  }
}

inline int run(const std::vector<Test>& tests, std::string_view filter) {
  const bool skip_fails = std::getenv("STREAMLAP_REQUIRE_GPU") != nullptr;
  const int before = failures.exchange(0);
  int passed = 0;
  int failed = 0;
  int skipped = 0;
  for (const Test& test : tests) {
    if (!selected(test.name, filter)) continue;
    failures = 0;
    std::string skip;
    bool was_skipped = false;
    const auto start = std::chrono::steady_clock::now();
    try {
      test.body();
    } catch (const Skipped& s) {
      skip = ": " + s.reason;
      was_skipped = !skip_fails;
      failures += skip_fails;
    } catch (const Stopped&) {
    } catch (const std::exception& e) {
      fail(test.name.c_str(), 0, std::string("threw ") + e.what());
    } catch (...) {
      fail(test.name.c_str(), 0, "threw something that is no std::exception");
    }
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    const char* word = "ok";
    if (failures > 0) {
      word = "FAIL";
      ++failed;
    } else if (was_skipped) {
      word = "skip";
      ++skipped;
    } else {
      ++passed;
    }
    std::fprintf(out, "%-4s %s (%.1f ms)%s\n", word, test.name.c_str(), took.count(), skip.c_str());
    std::fflush(out);
  }
  std::fprintf(out, "%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  std::fflush(out);
  failures = before;
  if (failed > 0) return 1;
  if (passed > 0) return 0;
  return skipped > 0 ? 77 : 2;
}

}  // namespace check

#define TEST(name)                                                                  \
  static void test_##name();                                                        \
  [[maybe_unused]] static const bool added_##name = check::add(#name, test_##name); \
  static void test_##name()

#define CHECK(...)                                                                  \
  do {                                                                              \
    if (!(__VA_ARGS__)) check::fail(__FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ")"); \
  } while (false)

#define REQUIRE(...)                                                \
  do {                                                              \
    if (!(__VA_ARGS__)) {                                           \
      check::fail(__FILE__, __LINE__, "REQUIRE(" #__VA_ARGS__ ")"); \
      throw check::Stopped{};                                       \
    }                                                               \
  } while (false)

#define CHECK_EQ(a, b) check::check_eq((a), (b), __FILE__, __LINE__, #a ", " #b)

#define CHECK_THROWS(expr, Type)                                                      \
  do {                                                                                \
    std::string got_ = "nothing was thrown";                                          \
    try {                                                                             \
      static_cast<void>(expr);                                                        \
    } catch (const Type&) {                                                           \
      got_.clear();                                                                   \
    } catch (const std::exception& e_) {                                              \
      got_ = std::string("threw ") + e_.what();                                       \
    } catch (...) {                                                                   \
      got_ = "threw another type";                                                    \
    }                                                                                 \
    if (!got_.empty()) {                                                              \
      check::fail(__FILE__, __LINE__, "CHECK_THROWS(" #expr ", " #Type "): " + got_); \
    }                                                                                 \
  } while (false)

#define SKIP(why) throw check::Skipped(why)

int main(int argc, char** argv) { return check::run(check::registered, argc > 1 ? argv[1] : ""); }
