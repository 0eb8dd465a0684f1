#include "support/scratch_folder.hpp"

#include <chevron/data.hpp>

#include "common/token_windows.hpp"

#include <torch/data.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace fs = std::filesystem;

namespace {

using chevron::train::token_file, chevron::train::token_windows;

template <class Number>
std::string bytes_of(std::vector<Number> const& all) {
  return {reinterpret_cast<char const*>(all.data()), all.size() * sizeof(Number)};
}
void write(fs::path const& file, std::string const& text) { std::ofstream(file, std::ios::binary) << text; }

/// An index of Megatron's, put together by hand.
struct index_of {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  std::uint64_t version = 1;
  std::uint8_t dtype = 8;
  std::vector<std::int32_t> lengths{};
  std::vector<std::int64_t> places{}, documents{0};
  std::uint64_t sequences = lengths.size(), count = documents.size();

  std::string text() const {
    return magic + bytes_of<std::uint64_t>({version}) + bytes_of<std::uint8_t>({dtype}) +
           bytes_of<std::uint64_t>({sequences, count}) + bytes_of(lengths) + bytes_of(places) + bytes_of(documents);
  }
};

std::string failure_of(std::function<void()> const& what) {
  try {
    what();
  } catch (chevron::usage_error const& e) {
    return e.what();
  }
  return "nothing was thrown";
}

void check_says(std::string const& text, std::vector<std::string> const& words) {
  CAPTURE(text);
  for (std::string const& word : words) {
    CAPTURE(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

std::vector<std::int64_t> values(at::Tensor const& t) {
  return {t.data_ptr<std::int64_t>(), t.data_ptr<std::int64_t>() + t.numel()};
}

}  // namespace

TEST_CASE("nanoGPT's tokens are packed into windows, over several files") {
  scratch_folder const here;
  write(here.path / "a.bin",
        bytes_of<std::uint16_t>({0, 1, 2, 3, 4, 5, 6, 7}));  // two windows of 3, and one token too few for a third
  write(here.path / "b.bin", bytes_of<std::uint16_t>({10, 11, 12, 65535}));
  token_windows const set({here.path / "a.bin", here.path / "b.bin"}, 3, 65536);
  CHECK(set.size() == 3);
  CHECK(set.tokens() == 12);
  std::vector<std::size_t> const some = {2, 0, 1};
  auto const [tokens, following] = set.batch(some);
  CHECK(tokens.sizes() == at::IntArrayRef({3, 3}));
  CHECK(values(tokens) == std::vector<std::int64_t>{10, 11, 12, 0, 1, 2, 3, 4, 5});
  CHECK(values(following) == std::vector<std::int64_t>{11, 12, 65535, 1, 2, 3, 4, 5, 6});

  token_windows const small({here.path / "b.bin"}, 3, 65535);
  check_says(failure_of([&] { small.batch(std::vector<std::size_t>{0}); }),
             {"b.bin", "token 3 is 65535, and the vocabulary has 65535"});
  check_says(failure_of([&] { small.batch(std::vector<std::size_t>{1}); }), {"no window 1 of 1"});
}

TEST_CASE("Megatron's tokens are as wide as their index says") {
  scratch_folder const here;
  std::vector<std::int64_t> const expected = {5, 6, 7, 8, 9};
  auto const check = [&](std::uint8_t dtype, std::string const& bytes, std::int64_t width) {
    write(here.path / "m.bin", bytes);
    write(here.path / "m.idx",
          index_of{.dtype = dtype, .lengths = {2, 0, 4}, .places = {0, 2 * width, 2 * width}, .documents = {0, 3}}.text());
    token_file const file(here.path / "m.bin");
    CHECK(file.size() == 6);
    std::vector<std::int64_t> read(5);
    file.read(1, read);
    CHECK(read == expected);
  };
  check(1, bytes_of<std::uint8_t>({4, 5, 6, 7, 8, 9}), 1);
  check(8, bytes_of<std::uint16_t>({4, 5, 6, 7, 8, 9}), 2);
  check(4, bytes_of<std::int32_t>({4, 5, 6, 7, 8, 9}), 4);
  check(5, bytes_of<std::int64_t>({4, 5, 6, 7, 8, 9}), 8);

  auto const refused = [&](index_of const& index, std::vector<std::string> const& words) {
    write(here.path / "m.bin", bytes_of<std::uint16_t>({4, 5, 6, 7, 8, 9}));
    write(here.path / "m.idx", index.text());
    check_says(failure_of([&] { token_file(here.path / "m.bin"); }), words);
  };
  refused({.magic = "something"}, {"m.idx", "is no index of Megatron's"});
  refused({.version = 2, .lengths = {6}, .places = {0}}, {"version 2"});
  refused({.dtype = 7, .lengths = {6}, .places = {0}}, {"dtype 7"});
  refused({.lengths = {2, 4}, .places = {0, 6}}, {"sequence 1", "from byte 6", "ends at 4"});
  refused({.lengths = {-2}, .places = {0}}, {"-2 tokens"});
  refused({.lengths = {2}, .places = {0}}, {"m.bin has 12 bytes", "speaks of 4"});
  refused({.lengths = {6}, .places = {0}, .sequences = std::uint64_t{1} << 61}, {"was cut short"});
  refused({.lengths = {6}, .places = {0}, .count = ~std::uint64_t{0}}, {"was cut short"});
}

TEST_CASE("files that are no tokens are refused") {
  scratch_folder const here;
  auto const of = [&](std::string const& bytes) {
    write(here.path / "a.bin", bytes);
    return failure_of([&] { token_windows({here.path / "a.bin"}, 3, 10); });
  };
  check_says(of("abc"), {"a.bin has an odd number of bytes, 3"});
  check_says(of(""), {"a.bin holds no token"});
  check_says(of("abcdef"), {"holds 3 tokens, and a window with its next token needs 4"});
  check_says(failure_of([&] { token_windows({here.path / "none.bin"}, 3, 10); }),
             {"none.bin cannot be mapped: No such file"});
  check_says(failure_of([&] { token_windows({here.path}, 3, 10); }), {"cannot be mapped: Is a directory"});
  write(here.path / "a.txt", "text whose bytes are an even number.");  // each two of them would be a token
  check_says(failure_of([&] { token_windows({here.path / "a.txt"}, 3, 65536); }), {"a.txt is no FILE.bin, and no index a.idx"});
  check_says(failure_of([&] { token_windows({}, 3, 10); }), {"need a file of tokens"});
  write(here.path / "a.bin", std::string(40, 'x'));
  token_file const file(here.path / "a.bin");
  fs::resize_file(here.path / "a.bin", 2);
  std::vector<std::int64_t> read(4);
  check_says(failure_of([&] { file.read(0, read); }), {"was cut short while it was read"});
}

TEST_CASE("numbers of 32 bits without an index are not taken for twice as many of 16") {
  scratch_folder const here;
  fs::path const file = here.path / "wide.bin";
  write(file, bytes_of<std::uint32_t>({70000, 1, 70000, 2}));
  check_says(failure_of([&] { token_windows({file}, 3, 65537); }), {"wide.bin has no index", "a vocabulary of 65537"});
  write(here.path / "wide.idx", index_of{.dtype = 4, .lengths = {4}, .places = {0}, .documents = {0, 1}}.text());
  token_windows const set({file}, 3, 70001);
  CHECK(values(set.batch(std::vector<std::size_t>{0}).second) == std::vector<std::int64_t>{1, 70000, 2});
}

TEST_CASE("a token outside the vocabulary is found before it is drawn, and where no window takes it") {
  scratch_folder const here;
  std::vector<std::uint16_t> tokens(100'000, 9);
  write(here.path / "a.bin", bytes_of(tokens));
  token_windows({here.path / "a.bin"}, 7, 10).check_vocabulary();
  tokens.back() = 10;
  write(here.path / "a.bin", bytes_of(tokens));
  check_says(failure_of([&] { token_windows({here.path / "a.bin"}, 7, 10).check_vocabulary(); }),
             {"a.bin: token 99999 is 10, and the vocabulary has 10"});
}

TEST_CASE("an epoch takes every window once, in an order of the seed, and goes on where it was") {
  scratch_folder const here;
  std::vector<std::uint16_t> tokens(101);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint16_t>(i);
  write(here.path / "a.bin", bytes_of(tokens));
  token_windows const set({here.path / "a.bin"}, 5, 101);
  REQUIRE(set.size() == 20);
  auto const order = [&](std::uint64_t seed, long from) {
    chevron::distributed_sampler sampler(set.size(), {}, {.batch_size = 4, .seed = seed});
    sampler.start_at(from);
    std::vector<std::int64_t> first;
    for (long b = from; b < 10; ++b) {
      auto next = sampler.next(4);
      if (!next) sampler.reset(), next = sampler.next(4);
      at::Tensor const batch = set.batch(*next).first;
      for (std::int64_t i = 0; i < 4; ++i) first.push_back(batch[i][0].item<std::int64_t>());
    }
    return first;
  };
  auto const whole = order(1, 0);
  CHECK(std::set<std::int64_t>(whole.begin(), whole.begin() + 20).size() == 20);
  CHECK(std::vector<std::int64_t>(whole.begin() + 28, whole.end()) == order(1, 7));
  CHECK(whole != order(2, 0));
  std::string const settings = set.settings();
  tokens[50] = 0;
  write(here.path / "b.bin", bytes_of(tokens));
  CHECK(settings != token_windows({here.path / "b.bin"}, 5, 101).settings());
}
