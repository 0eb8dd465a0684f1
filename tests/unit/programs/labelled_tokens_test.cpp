#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "common/labelled_tokens.hpp"

namespace {

namespace fs = std::filesystem;
using chevron::train::ignored_label, chevron::train::labelled_tokens;

/// A file of tokens and its neighbours, in a folder of its own.
struct token_folder {
  fs::path const path = fs::temp_directory_path() / ("labelled-tokens-" + std::to_string(::getpid()));
  token_folder() { fs::create_directory(path); }
  ~token_folder() { fs::remove_all(path); }
  token_folder(token_folder const&) = delete;
  token_folder& operator=(token_folder const&) = delete;

  fs::path tokens(std::vector<std::uint16_t> const& all) const {
    write("a.bin", {reinterpret_cast<char const*>(all.data()), all.size() * 2});
    return path / "a.bin";
  }
  void write(char const* name, std::string const& content) const { std::ofstream(path / name, std::ios::binary) << content; }
};

std::string failure_of(std::function<void()> const& what) {
  try {
    what();
  } catch (chevron::usage_error const& e) {
    return e.what();
  }
  return "nothing was thrown";
}

bool says(std::string const& text, std::string const& words) { return text.find(words) != std::string::npos; }

std::string settings_of(labelled_tokens const& all) {
  chevron::detail::byte_fingerprint sum;
  all.add_to(sum);
  return sum.text();
}

}  // namespace

TEST_CASE("without a mask all tokens are labels, with one those it marks") {
  token_folder const here;
  fs::path const file = here.tokens({5, 6, 7, 8, 9});
  std::vector<std::int64_t> read(3);
  labelled_tokens const plain(file, 10);
  CHECK_FALSE(plain.masked());
  CHECK(plain.labels(1, 4) == 4);
  plain.read(2, read);
  plain.mask(2, read);
  CHECK(read == std::vector<std::int64_t>{7, 8, 9});
  here.write("a.mask", std::string("\0\1\0\0\1", 5));
  labelled_tokens const masked(file, 10);
  CHECK(masked.masked());
  CHECK(masked.labels(0, 5) == 2);
  CHECK(masked.labels(2, 2) == 0);
  masked.read(2, read);
  CHECK(read == std::vector<std::int64_t>{7, 8, 9});
  masked.mask(2, read);
  CHECK(read == std::vector<std::int64_t>{ignored_label, ignored_label, 9});
  std::string const settings = settings_of(masked);
  CHECK(settings_of(plain) != settings);
  masked.check();
  here.write("a.mask", std::string("\0\1\0\1\1", 5));
  CHECK(settings_of(labelled_tokens(file, 10)) != settings);
}

TEST_CASE("a mask of other tokens, and one that is no mask, are refused") {
  token_folder const here;
  fs::path const file = here.tokens({5, 6, 7, 8, 9});
  here.write("a.mask", std::string(4, '\1'));
  CHECK(says(failure_of([&] { labelled_tokens(file, 10); }), "a.mask has 4 bytes, and "));
  here.write("a.mask", "11011");
  labelled_tokens const text(file, 10);
  CHECK(says(failure_of([&] { text.labels(2, 2); }), "a.mask: byte 2 is 48. Remedy: a mask of bytes 0 and 1"));
  CHECK(says(failure_of([&] { text.check(); }), "a.mask: byte 0 is 49"));
  fs::remove(here.path / "a.mask");
  fs::create_directory(here.path / "a.mask");
  CHECK(says(failure_of([&] { labelled_tokens(file, 10); }), "a.mask cannot be mapped: Is a directory"));
  fs::remove(here.path / "a.mask");
  CHECK(says(failure_of([&] { labelled_tokens(file, 9).check(); }), "token 4 is 9, and the vocabulary has 9"));
}
