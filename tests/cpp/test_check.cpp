// The test header itself: what fails is counted, and the exit status says so.
#include "check.h"

#include <cstddef>
#include <stdexcept>

namespace {

void pass() { CHECK(true); }
void fail_twice() {
  CHECK(1 + 1 == 3);
  CHECK_EQ(2, 3);
}
void skip() { SKIP("no device"); }
void stop() {
  REQUIRE(false);
  std::abort();
}
void throw_error() { throw std::runtime_error("lost"); }
void expect_throw() { CHECK_THROWS(pass(), std::runtime_error); }
void expect_other() { CHECK_THROWS(throw_error(), std::logic_error); }

struct Result {
  int status;
  std::string text;
};

// Runs tests inside this one, with their lines kept out of the real report.
Result run_apart(const std::vector<check::Test>& tests, std::string_view filter = "") {
  std::FILE* kept = std::exchange(check::out, std::tmpfile());
  const int status = check::run(tests, filter);
  std::rewind(check::out);
  std::string text;
  for (int c = std::fgetc(check::out); c != EOF; c = std::fgetc(check::out)) {
    text += static_cast<char>(c);
  }
  std::fclose(std::exchange(check::out, kept));
  return {status, text};
}

bool contains(const Result& result, const char* part) {
  return result.text.find(part) != std::string::npos;
}

}  // namespace

TEST(a_failing_check_is_counted) {
  const Result result = run_apart({{"good", pass}, {"bad", fail_twice}, {"good_too", pass}});
  CHECK_EQ(result.status, 1);
  CHECK(contains(result, "CHECK(1 + 1 == 3)"));
  CHECK(contains(result, "CHECK_EQ(2, 3): 2 != 3"));
  CHECK(contains(result, "FAIL bad"));
  CHECK(contains(result, "2 passed, 1 failed, 0 skipped\n"));
  CHECK_EQ(check::failures.load(), 0);
}

TEST(exceptions_fail_a_test) {
  CHECK_EQ(run_apart({{"throws", throw_error}}).status, 1);
  CHECK_EQ(run_apart({{"no_throw", expect_throw}}).status, 1);
  CHECK_EQ(run_apart({{"other_type", expect_other}}).status, 1);
  CHECK_EQ(run_apart({{"stops", stop}}).status, 1);
  CHECK_THROWS(throw_error(), std::runtime_error);
}

TEST(the_filter_selects_and_no_test_is_an_error) {
  const std::vector<check::Test> tests = {{"good", pass}, {"bad", fail_twice}};
  CHECK_EQ(run_apart(tests, "oo").status, 0);
  CHECK_EQ(run_apart(tests, "other").status, 2);
  CHECK_EQ(run_apart(tests, "other,goo").status, 0);
  CHECK_EQ(run_apart(tests, "goo,ba").status, 1);
  CHECK_EQ(run_apart({}).status, 2);
}

TEST(a_skip_is_shown_and_may_be_forbidden) {
  const char* given = std::getenv("STREAMLAP_REQUIRE_GPU");
  const std::string before = given ? given : "";
  unsetenv("STREAMLAP_REQUIRE_GPU");
  const Result skipped = run_apart({{"skips", skip}});
  setenv("STREAMLAP_REQUIRE_GPU", "1", 1);
  const Result forbidden = run_apart({{"skips", skip}});
  if (given) {
    setenv("STREAMLAP_REQUIRE_GPU", before.c_str(), 1);
  } else {
    unsetenv("STREAMLAP_REQUIRE_GPU");
  }
  CHECK_EQ(skipped.status, 77);
  CHECK(contains(skipped, "no device"));
  CHECK_EQ(forbidden.status, 1);
}

TEST(numbers_compare_by_value) {
  CHECK_EQ(std::size_t{3}, 3);
  CHECK(!check::equal(-1, ~0U));
  CHECK_EQ(std::string("a"), "a");
}
