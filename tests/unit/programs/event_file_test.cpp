#include "common/event_file.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <optional>

namespace {

using namespace chevron::train;
namespace format = event_format;

// Division of polynomials bit by bit, without a table: what the checksum is defined as.
std::uint32_t checksum_by_division(std::string_view bytes) {
  std::uint32_t remainder = 0xffffffff;
  for (char const c : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      bool const top = ((static_cast<unsigned char>(c) >> bit ^ remainder) & 1u) != 0;
      remainder >>= 1;
      if (top) remainder ^= 0x82f63b78;  // 0x1edc6f41, its bits reversed
    }
  }
  return ~remainder;
}

template <class Value>
Value value_at(std::string const& bytes, std::size_t at) {
  Value out{};
  REQUIRE(at + sizeof out <= bytes.size());
  std::memcpy(&out, bytes.data() + at, sizeof out);  // x86 and arm64 store the lowest byte first
  return out;
}

/// A message's fields as they come: number, and content as bytes or as a number.
struct field {
  std::uint64_t number = 0, value = 0;
  std::string bytes;
};
std::vector<field> fields_of(std::string const& message) {
  std::vector<field> out;
  std::size_t at = 0;
  auto const varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      REQUIRE(at < message.size());
      auto const byte = static_cast<unsigned char>(message[at++]);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < message.size()) {
    std::uint64_t const key = varint();
    field one{.number = key >> 3, .bytes = {}};
    std::size_t const size = key % 8 == 0 ? 0 : key % 8 == 1 ? 8 : key % 8 == 5 ? 4 : static_cast<std::size_t>(varint());
    if (key % 8 == 0) one.value = varint();
    REQUIRE(at + size <= message.size());
    one.bytes = message.substr(at, size);
    at += size;
    out.push_back(one);
  }
  return out;
}

struct read_event {
  double time = 0;
  std::int64_t step = 0;
  std::string version;
  bool starts = false;
  std::map<std::string, float> figures;
};

read_event event_of(std::string const& message) {
  read_event out;
  for (field const& one : fields_of(message)) {
    if (one.number == 1) out.time = value_at<double>(one.bytes, 0);
    if (one.number == 2) out.step = static_cast<std::int64_t>(one.value);
    if (one.number == 3) out.version = one.bytes;
    if (one.number == 7) out.starts = fields_of(one.bytes).at(0).value == 1;
    if (one.number != 5) continue;
    for (field const& value : fields_of(one.bytes)) {
      auto const parts = fields_of(value.bytes);
      REQUIRE(parts.size() == 2);
      CHECK(parts[0].number == 1);
      CHECK(parts[1].number == 2);
      out.figures[parts[0].bytes] = value_at<float>(parts[1].bytes, 0);
    }
  }
  return out;
}

std::vector<read_event> events_of(std::filesystem::path const& file) {
  std::ifstream in(file, std::ios::binary);
  std::string const bytes(std::istreambuf_iterator<char>(in), {});
  auto const unmasked = [](std::uint32_t masked) {
    std::uint32_t const rotated = masked - 0xa282ead8u;
    return rotated >> 17 | rotated << 15;
  };
  std::vector<read_event> out;
  for (std::size_t at = 0; at < bytes.size();) {
    auto const size = static_cast<std::size_t>(value_at<std::uint64_t>(bytes, at));
    REQUIRE(at + size + 16 <= bytes.size());
    CHECK(unmasked(value_at<std::uint32_t>(bytes, at + 8)) == checksum_by_division(bytes.substr(at, 8)));
    std::string const message = bytes.substr(at + 12, size);
    CHECK(unmasked(value_at<std::uint32_t>(bytes, at + 12 + size)) == checksum_by_division(message));
    out.push_back(event_of(message));
    at += size + 16;
  }
  return out;
}

struct own_folder {
  own_folder() {
    std::string name = (std::filesystem::temp_directory_path() / "chevron-events-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~own_folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

TEST_CASE("checksums of RFC 3720, section B.4, and of polynomial division") {
  CHECK(format::crc32c("123456789") == 0xe3069283);
  CHECK(format::crc32c(std::string(32, '\0')) == 0x8a9136aa);
  CHECK(format::crc32c(std::string(32, '\xff')) == 0x62a8ab43);
  std::string rising;
  for (char c = 0; c < 32; ++c) rising += c;
  CHECK(format::crc32c(rising) == 0x46dd794e);
  CHECK(format::crc32c(std::string(rising.rbegin(), rising.rend())) == 0x113fdb5c);
  std::string text;
  for (std::uint32_t i = 0, state = 1; i < 300; ++i, state = state * 1664525u + 1013904223u) {
    CHECK(format::crc32c(text) == checksum_by_division(text));
    text += static_cast<char>(state >> 24);
  }
}

TEST_CASE("numbers in groups of seven bits") {
  for (int bits = 0; bits < 64; ++bits) {
    for (std::int64_t const off : {-1, 0, 1}) {
      std::uint64_t const value = (std::uint64_t{1} << bits) + static_cast<std::uint64_t>(off);
      auto const read = fields_of(format::tag(2, format::wire::number) + format::varint(value));
      REQUIRE(read.size() == 1);
      CHECK(read[0].number == 2);
      CHECK(read[0].value == value);
      CHECK(format::varint(value).size() == (value == 0 ? 1 : static_cast<std::size_t>(std::bit_width(value) + 6) / 7));
    }
  }
}

TEST_CASE("a run's figures are read back, the step's time with them") {
  own_folder const here;
  std::filesystem::path const folder = here.path / "runs" / "first";
  named_figures const figures{{"loss_metrics/global_avg_loss", 2.5},
                              {"grad_norm", 1e-3},
                              {"a name with ümlauts", -7},
                              {"infinite", std::numeric_limits<double>::infinity()},
                              {"none", std::nan("")}};
  std::filesystem::path path;
  {
    event_file file(folder, 300);
    path = file.path();
    CHECK(path.filename().string().find("tfevents") != std::string::npos);
    for (std::int64_t step = 300; step < 400; ++step) {
      file.add(step, figures);
      CHECK(events_of(path).size() == static_cast<std::size_t>(step - 300) + 3);  // at once, not at the end
    }
    file.add(std::int64_t{1} << 40, {});
  }
  auto const events = events_of(path);
  REQUIRE(events.size() == 103);
  CHECK(events[0].version == "brain.Event:2");
  CHECK(events[1].starts);
  CHECK(events[1].step == 300);
  double before = 0;
  for (std::size_t i = 2; i < 102; ++i) {
    CHECK(events[i].step == static_cast<std::int64_t>(i) + 298);
    CHECK(events[i].time >= before);
    before = events[i].time;
    REQUIRE(events[i].figures.size() == figures.size());
    for (auto const& [name, value] : figures) {
      float const read = events[i].figures.at(name);
      CHECK((std::isnan(value) ? std::isnan(read) : read == static_cast<float>(value)));
    }
  }
  CHECK(events[102].step == std::int64_t{1} << 40);
  CHECK(events[102].figures.empty());
  CHECK(std::abs(before - std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count()) < 60);
}

TEST_CASE("files of one folder do not replace each other, and are read in their order") {
  own_folder const here;
  std::vector<std::string> names;
  for (int run = 0; run < 3; ++run) names.push_back(event_file(here.path, run + 1).path().filename().string());
  CHECK(std::is_sorted(names.begin(), names.end()));
  CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
  CHECK(events_of(here.path / names[0]).at(1).step == 1);
}

TEST_CASE("a folder that cannot be made is an error") {
  own_folder const here;
  std::ofstream(here.path / "file") << "text";
  CHECK_THROWS_AS(event_file(here.path / "file", 1), std::system_error);
  CHECK_THROWS_AS(event_file(here.path / "file" / "below", 1), std::system_error);
}

}  // namespace
